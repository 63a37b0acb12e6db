"""vLLM as the rollout engine: its boundaries computed by samebits, its weights published in place, with proof."""

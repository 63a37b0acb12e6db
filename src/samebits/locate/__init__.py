"""Which boundary, layer and token first differ between trainer and rollout engine, and why."""

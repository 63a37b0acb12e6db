"""WHEN: steps, samples, weight versions, and the append-only ledger that records them."""

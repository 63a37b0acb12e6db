"""PROOF: the records of a run, the manifest and seal that close it, and verifying from these alone."""

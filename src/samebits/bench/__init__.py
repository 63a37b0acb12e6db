"""WHAT IT COSTS: the operators beside PyTorch's own on the same work, as records that state their origin."""

"""Which module makes the difference: the same job with each module on either route, arm by arm, from one plan."""

"""HOW each boundary is computed: one folder per op, read contract, reference, backends, public function."""

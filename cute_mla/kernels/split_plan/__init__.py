"""Plan that divides the key tiles of a batch into parts of equal cost."""

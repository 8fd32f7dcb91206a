"""Keys normalised, rotated and written to a paged cache, and queries rotated, in one launch."""

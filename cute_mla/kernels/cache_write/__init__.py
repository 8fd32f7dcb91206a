"""Keys written to paged caches."""

"""Keys gathered from paged caches."""

"""Keys of the indexer into an index cache, and its queries prepared likewise."""

"""lse with the sink, and delta, of every query row of a backward pass."""

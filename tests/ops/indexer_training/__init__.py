"""Tests of what trains an indexer: head sums, scores at chosen keys, their gradients and the loss."""

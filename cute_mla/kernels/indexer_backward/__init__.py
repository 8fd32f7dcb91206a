"""Gradients of an indexer's scores at the keys that tokens have chosen."""

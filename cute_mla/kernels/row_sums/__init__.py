"""Sums of the rows of each key's list."""

"""Positions of the greatest numbers of each row."""

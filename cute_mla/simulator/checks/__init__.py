"""Checks on the order of accesses, the life cycle of barriers, and what is left over at exits."""

"""Merging of attention states."""

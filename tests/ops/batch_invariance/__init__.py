"""Tests of batch invariance, for every operation."""

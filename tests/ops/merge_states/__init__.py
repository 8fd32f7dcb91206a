"""Tests of merge_states."""

"""Tests of context parallelism."""

"""Tests of index_write."""

"""Tests of sparse decode."""

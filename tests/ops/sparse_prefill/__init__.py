"""Tests of sparse prefill."""

"""Tests of the backward of sparse prefill."""

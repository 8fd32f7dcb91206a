"""Tests of dense prefill."""

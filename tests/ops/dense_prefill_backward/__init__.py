"""Tests of the backward pass of dense prefill."""

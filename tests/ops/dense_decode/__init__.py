"""Tests of dense decode."""

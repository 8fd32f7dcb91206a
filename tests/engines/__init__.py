"""Tests of the adapters to serving engines."""

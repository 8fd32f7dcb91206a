"""Tests of the runtime and of the manifest."""

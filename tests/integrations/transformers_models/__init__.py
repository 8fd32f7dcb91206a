"""Tests of cute_mla.integrations.transformers beside the package transformers: `make test-transformers`."""

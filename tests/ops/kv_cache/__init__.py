"""Tests of write_kv_cache and gather_kv_cache."""

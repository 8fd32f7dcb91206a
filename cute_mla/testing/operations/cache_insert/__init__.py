"""The record of cache_insert: its cases, their suites, and how it is called and judged."""

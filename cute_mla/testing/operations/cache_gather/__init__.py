"""The record of cache_gather: its cases, their suites, and how it is called and judged."""

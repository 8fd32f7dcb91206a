"""The record of index_write: its cases, their suites, and how it is called and judged."""

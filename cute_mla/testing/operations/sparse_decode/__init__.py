"""The record of sparse_decode: its cases, their suites, and how it is called and judged."""

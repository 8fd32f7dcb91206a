"""The record of sparse_prefill: its cases, their suites, and how it is called and judged."""

"""The record of head_sums: its cases, their suites, and how it is called and judged."""

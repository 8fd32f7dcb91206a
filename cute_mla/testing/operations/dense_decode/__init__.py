"""The record of dense_decode: its cases, their suites, and how it is called and judged."""

"""The record of dense_prefill: its cases, their suites, and how it is called and judged."""

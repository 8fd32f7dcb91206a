"""The record of sparse_prefill_backward: its cases, their suites, and how it is called and judged."""

"""The record of dense_prefill_backward: its cases, their suites, and how it is called and judged."""

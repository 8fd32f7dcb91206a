"""The record of merge_states: its cases, their suites, and how it is called and judged."""

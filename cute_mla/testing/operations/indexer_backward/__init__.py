"""The record of indexer_backward: its cases, their suites, and how it is called and judged."""

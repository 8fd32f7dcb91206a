"""The record of indexer_topk: its cases, their suites, and how it is called and judged."""

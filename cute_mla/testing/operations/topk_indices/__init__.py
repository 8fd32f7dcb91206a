"""The record of topk_indices: its cases, their suites, and how it is called and judged."""

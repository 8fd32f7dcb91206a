"""The record of mqa_logits: its cases, their suites, and how it is called and judged."""

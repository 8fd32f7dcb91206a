"""Merge of the splits of each request into out and lse."""

"""Masked dense prefill; see README.md."""

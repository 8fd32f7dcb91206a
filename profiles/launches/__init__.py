"""Launches of a benchmark row: its kernels, their CTAs, and the work that the plan gives to each CTA."""

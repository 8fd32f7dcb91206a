"""Measuring: the benchmark rows, their rooflines, static reports of built kernels, and timings on a GPU."""

"""Figures of built kernels: static ones from the manifest, executed instructions from the simulated device, and golden values."""

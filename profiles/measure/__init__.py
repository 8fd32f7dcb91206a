"""Timing of benchmark rows on a GPU, beside other libraries and beside the device's own ceilings."""

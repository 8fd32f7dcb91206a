"""Manifest -> loaded kernel -> launch, on a CUDA device or on the simulated one."""

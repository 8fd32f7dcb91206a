"""Tests of single kernels on the simulator, below the runtime."""

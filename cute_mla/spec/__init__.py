"""Specs: problems, their tiling, and the parameters of kernels. Standard library only; every other room imports it."""

"""Roles and products of the SM120 kernels over a latent."""

"""Roles and products of the Blackwell kernels over a latent."""

"""Roles and products of the Hopper kernels over a latent."""

"""Rows that query tokens add to the gradient of the latent."""

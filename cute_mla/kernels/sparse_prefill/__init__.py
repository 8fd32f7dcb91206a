"""Sparse prefill: MQA of each query token over the rows of an unpaged latent that its indices name."""

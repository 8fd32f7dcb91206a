"""Sparse decode: MQA of each query token over the slots of a latent cache that its indices name."""

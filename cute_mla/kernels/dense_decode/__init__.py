"""Dense decode: MQA of a few query tokens over a paged latent cache."""

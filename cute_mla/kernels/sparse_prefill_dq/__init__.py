"""dQ of sparse prefill, and the gradients of its scores."""

"""The kernel that computes dQ of dense prefill."""

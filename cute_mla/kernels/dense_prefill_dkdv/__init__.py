"""The kernel that computes dK and dV of dense prefill."""

"""Dense prefill: attention of packed sequences over their own keys and values."""

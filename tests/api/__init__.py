"""Tests of what all public functions share: is_supported, torch's operator registry, torch.compile."""

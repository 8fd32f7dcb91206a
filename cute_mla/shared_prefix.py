"""Decode of requests that begin with the same keys, such as a system prompt."""

from .api.shared_prefix import SharedPrefix, decode_shared_prefix, split_shared_prefix

__all__ = ["SharedPrefix", "decode_shared_prefix", "split_shared_prefix"]

"""All ops of torch, torch.ops.cute_mla. They are registered when their public functions are imported, and so by importing this module."""

from . import api, cache, indexer

__all__ = ["api", "cache", "indexer"]

"""Paged KV caches: how kernels read them (layout), and the reference quantiser of the FP8 formats (codec)."""

from .codec import dequantise_cache, empty_cache, quantise_cache
from .layout import DenseCache, dense_cache, dense_tensor_map, page_size_problem

__all__ = [
    "DenseCache",
    "dense_cache",
    "dense_tensor_map",
    "dequantise_cache",
    "empty_cache",
    "page_size_problem",
    "quantise_cache",
]

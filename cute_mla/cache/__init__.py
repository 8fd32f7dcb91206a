"""Paged KV caches: how kernels read them (layout, gathered), keys to and from them (write, gather), and the reference quantiser of the
FP8 formats (codec)."""

from .codec import dequantise_cache, empty_cache, quantise_cache
from .gather import gather_kv_cache
from .layout import DenseCache, dense_cache, dense_tensor_map, page_size_problem
from .write import write_kv_cache

__all__ = [
    "DenseCache",
    "dense_cache",
    "dense_tensor_map",
    "dequantise_cache",
    "empty_cache",
    "gather_kv_cache",
    "page_size_problem",
    "quantise_cache",
    "write_kv_cache",
]

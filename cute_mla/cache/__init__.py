"""Paged KV caches: how kernels read them (layout), keys to and from them by slot (latent), and the reference quantiser of the FP8
formats (codec)."""

from .codec import dequantise_cache, empty_cache, quantise_cache
from .latent import gather_latent, write_latent
from .layout import DenseCache, dense_cache, dense_tensor_map, page_size_problem

__all__ = [
    "DenseCache",
    "dense_cache",
    "dense_tensor_map",
    "dequantise_cache",
    "empty_cache",
    "gather_latent",
    "page_size_problem",
    "quantise_cache",
    "write_latent",
]

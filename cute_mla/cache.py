"""Paged KV caches: write keys to them, gather keys from them, and the reference quantiser of the quantised formats."""

from .api.kv_cache import gather_kv_cache, insert_kv_cache, write_kv_cache
from .ops.cache_codec import dequantise_cache, empty_cache, quantise_cache, reorder_cache

__all__ = ["dequantise_cache", "empty_cache", "gather_kv_cache", "insert_kv_cache", "quantise_cache", "reorder_cache", "write_kv_cache"]

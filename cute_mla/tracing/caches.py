"""Ops of paged caches: keys to them and from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops import cache_gather, cache_insert, cache_write
from ..ops.paged_cache import columns_of
from ..spec.cache_rows import CACHED
from ..spec.mla import D_QK
from .register import TorchOp


def _new_keys(k_cache: Tensor, rows: int, dtype: torch.dtype | None, **others: Any) -> Tensor:
    """Allocate the result of gather_kv_cache."""
    own = torch.bfloat16 if k_cache.dtype.itemsize == 1 else k_cache.dtype
    same = [cache for cache in CACHED.values() if bool(cache.quantised) == (k_cache.dtype.itemsize == 1)]
    d_qk = next((cache.d_qk for cache in same if columns_of(cache) == k_cache.shape[-1]), D_QK)  # no dict: a symbol has no hash
    return k_cache.new_empty((rows, d_qk), dtype=dtype or own)


WRITE = TorchOp(cache_write.run, spelled={"k_cache": "Tensor(a!) k_cache"})
INSERT = TorchOp(
    cache_insert.run,
    spelled={"q_pe": "Tensor(a!)? q_pe", "k_cache": "Tensor(b!) k_cache", "keys": "Tensor(c!)? keys=None"},
)
GATHER = TorchOp(cache_gather.run, _new_keys, ("out",))

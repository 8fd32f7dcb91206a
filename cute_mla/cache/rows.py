"""Paged caches as keys are written to them and gathered from them, one by one: the format of a tensor, and where its rows lie."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..spec.cache_format import LATENT, CacheFormat
from ..spec.cache_rows import CACHED, FP8_576
from ..tensors import TensorSpec, check_device, check_dtype, check_last_contiguous
from .gathered import MOST_SLOTS, byte_strides, columns_of, dtypes_of


class CacheRows(NamedTuple):
    """The layout of a cache. Strides in bytes."""

    format: CacheFormat
    pages: int
    page_size: int
    page_stride: int
    row_stride: int


def cache_rows(name: str, spec: TensorSpec, *more: torch.dtype) -> CacheRows:
    """The layout of a cache of any format. ValueError if it has none that is supported.

    more: dtypes that a latent cache may have besides bf16 and fp16.
    """
    fits = len(spec.shape) == 4 and spec.shape[2] == 1
    for cache in CACHED.values():
        allowed = (*dtypes_of(cache), *(more if cache is LATENT else ()))
        if fits and spec.shape[3] == columns_of(cache) and spec.dtype in allowed:
            check_last_contiguous(name, spec)
            pages, page_size = spec.shape[:2]
            page_stride, row_stride = byte_strides(name, spec, cache)
            if pages * page_size > MOST_SLOTS:
                raise ValueError(f"{name} has shape {list(spec.shape)}, {pages * page_size} slots; supported: to {MOST_SLOTS}")
            return CacheRows(cache, pages, page_size, page_stride, row_stride)
    supported = "; ".join(
        f"[pages, page size, 1, {columns_of(cache)}] of {', '.join(str(dtype).removeprefix('torch.') for dtype in dtypes_of(cache))}"
        for cache in CACHED.values()
    )
    raise ValueError(f"{name} has shape {list(spec.shape)} and dtype {spec.dtype}; supported: {supported}")


def check_cache_scale(scale: TensorSpec | None, cache: CacheFormat, device: torch.device) -> None:
    """ValueError for a scale of a whole cache that is none, or that has nothing to scale."""
    if scale is None:
        return
    if cache is not FP8_576:
        raise ValueError(f"descale_k is given with a {cache.name} cache; supported: with {FP8_576.name}")
    if math.prod(scale.shape) != 1:
        raise ValueError(f"descale_k has shape {list(scale.shape)}; supported: one element")
    check_dtype("descale_k", scale, torch.float32)
    check_device("descale_k", scale, device, "k_cache")

"""The paged KV cache: k_cache [pages, page, h_kv, 576], rows of 512 latent and 64 rotary values."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..spec.dense_decode import MAX_KEYS, SMALL_PAGES
from ..spec.mla import D_QK
from ..spec.split_plan import TILE_KEYS
from ..spec.tensor_map import Swizzle, TensorMap
from ..tensors import DTYPE_NAMES, TensorSpec, check_dtype, check_last_contiguous, check_shape, is_integer, map_strides, shown

BOX_ROW_BYTES = 128  # the span of the swizzle
ELEMENT_SIZES = {"bf16": 2, "fp16": 2, "u8": 1}
_MAX_SIZE = 1 << 32  # exclusive: of a dimension of a tensor map


def page_size_problem(page_size: Any) -> str | None:
    """Why a page size is not supported, or None if it is."""
    if is_integer(page_size) and (page_size in SMALL_PAGES or (0 < page_size <= MAX_KEYS and page_size % TILE_KEYS == 0)):
        return None
    return f"page size is {shown(page_size)}; supported: {', '.join(map(str, SMALL_PAGES))} and multiples of {TILE_KEYS}"


class DenseCache(NamedTuple):
    """The layout of a cache. dtype: of its elements, "u8" for e4m3. strides: bytes between KV heads, keys of a page, pages."""

    dtype: str
    pages: int
    page_size: int
    h_kv: int
    strides: tuple[int, ...]


@lru_cache(maxsize=4096)
def dense_tensor_map(cache: DenseCache, address: int, box_keys: int) -> TensorMap:
    """A cache at an address, for boxes of 128 bytes by box_keys keys of one head and page. Kept, like the cache it describes."""
    return TensorMap(
        dtype=cache.dtype,
        address=address,
        dims=(D_QK, cache.h_kv, cache.page_size, cache.pages),
        strides=cache.strides,
        box=(BOX_ROW_BYTES // ELEMENT_SIZES[cache.dtype], 1, box_keys, 1),
        swizzle=Swizzle.B128,
    )


def dense_cache(spec: TensorSpec, dtype: torch.dtype) -> DenseCache:
    """The layout of a cache for queries of this dtype. ValueError if kernels cannot read it."""
    fp8 = spec.dtype == torch.float8_e4m3fn
    check_shape("k_cache", spec, ("pages", "page size", 1 if fp8 else "h_kv", D_QK), f" of {spec.dtype}" if fp8 else "")
    check_dtype("k_cache", spec, *dict.fromkeys((dtype, torch.float8_e4m3fn)))
    check_last_contiguous("k_cache", spec)
    pages, page_size, h_kv, _ = spec.shape
    if pages == 0:
        raise ValueError(f"k_cache has shape {list(spec.shape)}; supported: at least one page")
    problem = page_size_problem(page_size)
    if problem is not None:
        raise ValueError(f"k_cache has shape {list(spec.shape)}: {problem}")
    if pages >= _MAX_SIZE:
        raise ValueError(f"k_cache has {pages} pages; supported: fewer than {_MAX_SIZE}")
    return DenseCache("u8" if fp8 else DTYPE_NAMES[dtype], pages, page_size, h_kv, map_strides("k_cache", spec, 2, 1, 0))

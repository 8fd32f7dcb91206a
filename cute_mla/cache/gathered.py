"""Caches whose slots kernels gather by index, as they are given: which format a tensor has, and where its pages and rows lie."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..spec.cache_format import FORMATS, FP8_584, FP8_656, LATENT, CacheFormat
from ..spec.cache_rows import FP8_576
from ..tensors import TensorSpec, check_device, check_last_contiguous

GATHER_ALIGNMENT = 16  # bytes: of the address of every row, for the widest load
MOST_SLOTS = (1 << 31) - 1  # that an int32 can name

BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
WIDE = (torch.bfloat16, torch.float16)


class GatheredCache(NamedTuple):
    """The layout of a cache. Strides in bytes. slots: pages * page_size, as far as an index reaches."""

    cache_format: str
    page_size: int
    slots: int
    page_stride: int
    row_stride: int


def columns_of(cache: CacheFormat) -> int:
    """The last dimension of a tensor of this format, in elements."""
    return cache.page_bytes(1) if cache.quantised else cache.d_qk


def dtypes_of(cache: CacheFormat) -> tuple[torch.dtype, ...]:
    """The dtypes that a tensor of this format can have."""
    if cache is FP8_576:
        return (torch.float8_e4m3fn,)
    return BYTES if cache.quantised else WIDE


def supported_formats() -> str:
    """The formats, for messages."""
    shapes = []
    for cache in FORMATS.values():
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes_of(cache))
        shapes.append(f"[pages, page size, 1, {columns_of(cache)}] of {names} with q of {cache.d_qk} columns")
    return "; ".join(shapes)


def gathered_cache(name: str, spec: TensorSpec, q: TensorSpec, is_fp8_kvcache: bool) -> GatheredCache:
    """The layout of a cache for these queries. ValueError if it has none that kernels can read."""
    cache = _format_of(name, spec, q, is_fp8_kvcache)
    check_device(name, spec, q.device)
    check_last_contiguous(name, spec)
    page_stride, row_stride = byte_strides(name, spec, cache)
    pages, page_size = spec.shape[:2]
    return GatheredCache(cache.name, page_size, min(pages * page_size, MOST_SLOTS), page_stride, row_stride)


def byte_strides(name: str, spec: TensorSpec, cache: CacheFormat) -> tuple[int, int]:
    """Bytes from page to page and from row to row of a cache of a format. ValueError unless kernels can read it so."""
    pages, page_size, _, columns = spec.shape
    if pages == 0 or page_size == 0:
        raise ValueError(f"{name} has shape {list(spec.shape)}; supported: at least one page of at least one token")
    token_bytes = columns * spec.dtype.itemsize
    given = spec.stride[1] * spec.dtype.itemsize if page_size > 1 else token_bytes
    if not cache.scales_inside and given != token_bytes:
        raise ValueError(
            f"{name} has shape {list(spec.shape)} and strides {list(spec.stride)}; supported: tokens that follow one another "
            f"without gaps, {token_bytes} bytes along dimension 1 (in this format a page has {page_size} rows of {cache.row_bytes} "
            "bytes, and their scales behind them)"
        )
    row_stride = given if cache.scales_inside else cache.row_bytes
    page_stride = spec.stride[0] * spec.dtype.itemsize if pages > 1 else row_stride  # of one page, any will do
    for dimension, stride in ((0, page_stride), (1, row_stride)):
        if stride % GATHER_ALIGNMENT or stride <= 0:
            raise ValueError(
                f"{name} has shape {list(spec.shape)} and strides {list(spec.stride)}, {stride} bytes along dimension {dimension}; "
                f"supported: positive multiples of {GATHER_ALIGNMENT} bytes"
            )
    return page_stride, row_stride


def _format_of(name: str, spec: TensorSpec, q: TensorSpec, is_fp8_kvcache: bool) -> CacheFormat:
    """The format that shape and dtype tell, and that these queries fit."""
    fits = len(spec.shape) == 4 and spec.shape[2] == 1
    found = [cache for cache in FORMATS.values() if fits and spec.shape[3] == columns_of(cache) and spec.dtype in dtypes_of(cache)]
    if not found or q.shape[-1] != found[0].d_qk:
        raise ValueError(
            f"{name} has shape {list(spec.shape)} and dtype {spec.dtype}, q {q.shape[-1]} columns; "
            f"supported with indices: {supported_formats()}"
        )
    (cache,) = found
    if bool(cache.quantised) != is_fp8_kvcache:
        raise ValueError(
            f"is_fp8_kvcache is {is_fp8_kvcache} with {name} of {spec.dtype} and {spec.shape[3]} columns; supported: "
            f"True for {FP8_656.name} and {FP8_584.name} caches, False for {LATENT.name} ones of bf16 or fp16"
        )
    wanted = torch.bfloat16 if cache.quantised else spec.dtype
    if q.dtype != wanted:
        raise ValueError(f"q has dtype {q.dtype} with {name} of {spec.dtype}; supported with this cache: {wanted}")
    return cache

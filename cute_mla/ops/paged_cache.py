"""Layouts of paged KV caches, as kernels read them: by TMA (dense decode), by index (sparse decode), or key by key (write and gather)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..spec.cache_format import LATENT, CacheFormat, paged_twin
from ..spec.cache_rows import CACHED, FP8_576, KNOWN
from ..spec.mla import D_QK
from ..spec.sparse_decode import DECODED, DECODED_BESIDE, serving_kernels
from ..spec.tensor_map import Swizzle, TensorMap
from .arguments import short_repr
from .limits import page_size_error
from .strides import map_strides
from .tensor_spec import DTYPE_NAMES, TensorSpec, check_device, check_dtype, check_last_contiguous, check_shape, spec_of

GATHER_ALIGNMENT = 16  # bytes: of the address of every row, for the widest load
MAX_SLOTS = (1 << 31) - 1  # slots that an int32 can name

BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
WIDE = (torch.bfloat16, torch.float16)

_NVFP4_BYTES = 352  # of a token in vLLM's nvfp4_ds_mla
_NVFP4 = "no kernel reads NVFP4 records (nvfp4_ds_mla); supported for the same keys: fp8_656, vLLM's --kv-cache-dtype fp8_ds_mla"
_SWIZZLES = {128: Swizzle.B128, 64: Swizzle.B64}  # by the bytes of a row of a box
_ELEMENT_SIZES = {"bf16": 2, "fp16": 2, "u8": 1}
_MAX_MAP_SIZE = 1 << 32  # exclusive: of a dimension of a tensor map


class DenseCache(NamedTuple):
    """Layout of a cache that TMA reads. dtype: of an element, "u8" for e4m3. strides: bytes between KV heads, keys of a page, pages."""

    dtype: str
    pages: int
    page_size: int
    h_kv: int
    d_qk: int
    strides: tuple[int, ...]


def dense_cache(spec: TensorSpec, dtype: torch.dtype, d_qk: int) -> DenseCache:
    """Return the layout of k_cache [pages, page size, h_kv, d_qk] for queries of this dtype. ValueError if kernels cannot read it.

    A cache without pages has a layout, but no tensor map can describe it.
    """
    fp8 = spec.dtype == torch.float8_e4m3fn
    if fp8 and d_qk != D_QK:
        raise ValueError(f"k_cache has dtype {spec.dtype} with q of {d_qk} columns; supported: {dtype}, or q of {D_QK} columns")
    check_shape("k_cache", spec, ("pages", "page size", 1 if fp8 else "h_kv", d_qk), f" of {spec.dtype}" if fp8 else "")
    check_dtype("k_cache", spec, *dict.fromkeys((dtype, torch.float8_e4m3fn)))
    check_last_contiguous("k_cache", spec)
    pages, page_size, h_kv, _ = spec.shape
    error = page_size_error(page_size)
    if error is not None:
        raise ValueError(f"k_cache has shape {list(spec.shape)}: {error}")
    if pages >= _MAX_MAP_SIZE:
        raise ValueError(f"k_cache has {pages} pages; supported: fewer than {_MAX_MAP_SIZE}")
    return DenseCache("u8" if fp8 else DTYPE_NAMES[dtype], pages, page_size, h_kv, d_qk, map_strides("k_cache", spec, 2, 1, 0))


@lru_cache(maxsize=4096)
def dense_tensor_map(cache: DenseCache, address: int, box_keys: int, row_bytes: int = 128) -> TensorMap:
    """Return the tensor map of a cache at an address, with boxes of row_bytes (128 or 64) by box_keys keys of one head and page."""
    return TensorMap(
        dtype=cache.dtype,
        address=address,
        dims=(cache.d_qk, cache.h_kv, cache.page_size, cache.pages),
        strides=cache.strides,
        box=(row_bytes // _ELEMENT_SIZES[cache.dtype], 1, box_keys, 1),
        swizzle=_SWIZZLES[row_bytes],
    )


class GatheredCache(NamedTuple):
    """Layout of a cache that kernels gather from by index. Strides in bytes. slots: pages * page_size, at most MAX_SLOTS."""

    cache_format: str
    page_size: int
    slots: int
    page_stride: int
    row_stride: int


def check_requests(cache_seqlens: torch.Tensor, block_table: torch.Tensor) -> None:
    """Raise ValueError unless these are int32 [batch] and [batch, pages per request] on one device."""
    lengths, table = spec_of("cache_seqlens", cache_seqlens), spec_of("block_table", block_table)
    check_shape("cache_seqlens", lengths, ("batch",))
    check_dtype("cache_seqlens", lengths, torch.int32)
    check_shape("block_table", table, (lengths.shape[0], "pages per request"))
    check_dtype("block_table", table, torch.int32)
    check_device("block_table", table, lengths.device)


class NamedFormat(NamedTuple):
    """The argument that names the format of a cache, and its value; None: dtype and bytes of a token decide."""

    argument: str = "kv_format"
    value: str | None = None


UNNAMED = NamedFormat()


def gathered_cache(
    name: str, spec: TensorSpec, q: TensorSpec, is_fp8_kvcache: bool, named: NamedFormat = UNNAMED, first: str | None = None
) -> GatheredCache:
    """Return the layout of a cache for these queries. first: format of the first cache, if this is a second one.

    ValueError if kernels cannot read it.
    """
    cache = _decoded_format(name, spec, q, is_fp8_kvcache, named, DECODED if first is None else DECODED_BESIDE)
    if first is not None and serving_kernels(DECODED[first], cache) is None:
        beside = ", ".join(known.name for known in DECODED_BESIDE.values() if serving_kernels(DECODED[first], known) is not None)
        raise ValueError(f"{name} has the format {cache.name} beside a k_cache of {first}; supported: {beside}")
    check_device(name, spec, q.device)
    check_last_contiguous(name, spec)
    page_stride, row_stride = _byte_strides(name, spec, cache)
    pages, page_size = spec.shape[:2]
    return GatheredCache(cache.name, page_size, min(pages * page_size, MAX_SLOTS), page_stride, row_stride)


class CacheRows(NamedTuple):
    """Layout of a cache whose keys are written and gathered one by one. Strides in bytes."""

    format: CacheFormat
    pages: int
    page_size: int
    page_stride: int
    row_stride: int


def cache_rows(name: str, spec: TensorSpec, kv_format: str | None = None, *more: torch.dtype) -> CacheRows:
    """Return the layout of a cache of any format. ValueError if the format is not supported.

    kv_format: name of the format, or None. more: dtypes that a latent cache may have besides bf16 and fp16.
    """
    cache = format_of(name, spec, NamedFormat("kv_format", kv_format), CACHED, *more)
    if cache is None:
        supported = "; ".join(dict.fromkeys(map(_shape_text, CACHED.values())))
        raise ValueError(f"{name} has shape {list(spec.shape)} and dtype {spec.dtype}; supported: {supported}")
    check_last_contiguous(name, spec)
    pages, page_size = spec.shape[:2]
    if pages == 0:
        raise ValueError(f"{name} has shape {list(spec.shape)}; supported: at least one page of at least one token")
    page_stride, row_stride = _byte_strides(name, spec, cache)
    if pages * page_size > MAX_SLOTS:
        raise ValueError(f"{name} has shape {list(spec.shape)}, {pages * page_size} slots; supported: to {MAX_SLOTS}")
    return CacheRows(cache, pages, page_size, page_stride, row_stride)


def format_of(name: str, spec: TensorSpec, named: NamedFormat, served: Collection[str], *more: torch.dtype) -> CacheFormat | None:
    """Return the format of a cache: the one named, else the only one that fits. None if no format fits and none is named.

    named: as check_format_name returns it. served: formats that the call has kernels for. more: dtypes that a latent cache may have besides
    bf16 and fp16. ValueError for a name that does not fit, for a format without kernels, and where several formats fit.
    """
    if spec.shape[3:] == (_NVFP4_BYTES,) and spec.dtype in BYTES:
        raise ValueError(f"{name} has {_NVFP4_BYTES} bytes a token: {_NVFP4}")
    fitting = [cache for cache in KNOWN.values() if _fits(spec, cache, more)]
    if named.value is not None:
        known = KNOWN[named.value]
        if known.name in served and known not in fitting:
            raise ValueError(
                f"{name} has shape {list(spec.shape)} and dtype {spec.dtype} with {named.argument} {known.name!r}; "
                f"supported: {_shape_text(known)}"
            )
        fitting = [known]
    if len(fitting) > 1:
        names = ", ".join(repr(cache.name) for cache in fitting)
        raise ValueError(
            f"{name} has {spec.shape[3]} bytes a token, as {len(fitting)} formats have, and {named.argument} is None; supported: {names}"
        )
    if fitting and fitting[0].name not in served:
        raise ValueError(f"{name} has the format {fitting[0].name}, which has no kernels here; supported: {', '.join(served)}")
    return fitting[0] if fitting else None


def _fits(spec: TensorSpec, cache: CacheFormat, more: tuple[torch.dtype, ...]) -> bool:
    """Return whether shape and dtype of a cache are those of a format."""
    allowed = (*dtypes_of(cache), *(() if cache.quantised else more))
    return len(spec.shape) == 4 and spec.shape[2] == 1 and spec.shape[3] == columns_of(cache) and spec.dtype in allowed


def check_format_name(value: Any, served: Collection[str], argument: str = "kv_format") -> str | None:
    """Return the name of a format, or None. ValueError for a value that names no format."""
    if isinstance(value, str) and value.startswith("nvfp4"):
        raise ValueError(f"{argument} is {short_repr(value)}: {_NVFP4}")
    if value is not None and not (isinstance(value, str) and value in KNOWN):
        raise ValueError(f"{argument} is {short_repr(value)}; supported: None, {', '.join(served)}")
    name: str | None = value
    return name


def check_cache_scale(scale: TensorSpec | None, cache: CacheFormat, device: torch.device, name: str = "k_cache") -> None:
    """Raise ValueError unless descale_k is None, or one fp32 element on the device of the argument `name` and the cache is fp8_576."""
    if scale is None:
        return
    if cache is not FP8_576:
        raise ValueError(f"descale_k is given with a {cache.name} cache; supported: with {FP8_576.name}")
    if math.prod(scale.shape) != 1:
        raise ValueError(f"descale_k has shape {list(scale.shape)}; supported: one element, for all heads and requests")
    check_dtype("descale_k", scale, torch.float32)
    check_device("descale_k", scale, device, name)


def columns_of(cache: CacheFormat) -> int:
    """Return the last dimension of a tensor of this format, in elements."""
    return cache.page_bytes(1) if cache.quantised else cache.d_qk


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype with a name of spec.mla.DTYPES."""
    return next(dtype for dtype in WIDE if DTYPE_NAMES[dtype] == name)


def dtypes_of(cache: CacheFormat) -> tuple[torch.dtype, ...]:
    """Return the dtypes that a tensor of this format can have."""
    if cache is FP8_576:
        return (torch.float8_e4m3fn,)
    return BYTES if cache.quantised else WIDE


def _shape_text(cache: CacheFormat) -> str:
    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes_of(cache))
    return f"[pages, page size, 1, {columns_of(cache)}] of {dtypes}"


def _byte_strides(name: str, spec: TensorSpec, cache: CacheFormat) -> tuple[int, int]:
    """Return the bytes from page to page and from row to row of a cache. ValueError unless kernels can read these strides."""
    pages, page_size, _, columns = spec.shape
    if page_size == 0:
        raise ValueError(f"{name} has shape {list(spec.shape)}; supported: pages of at least one token")
    token_bytes = columns * spec.dtype.itemsize
    given = spec.stride[1] * spec.dtype.itemsize if page_size > 1 else token_bytes
    if not cache.scales_inside and given != token_bytes:
        raise ValueError(
            f"{name} has shape {list(spec.shape)} and strides {list(spec.stride)}; supported: tokens that follow one another "
            f"without gaps, {token_bytes} bytes along dimension 1 (in this format a page has {page_size} rows of {cache.row_bytes} "
            "bytes, and their scales behind them)"
        )
    twin = paged_twin(cache)
    if twin is not None and given < cache.row_bytes:  # kernels tell the two orders apart by the stride
        raise ValueError(
            f"{name} has shape {list(spec.shape)} and strides {list(spec.stride)}, {given} bytes along dimension 1; supported for "
            f"{cache.name}: at least {cache.row_bytes} (scales behind all rows of a page are {twin.name})"
        )
    row_stride = given if cache.scales_inside else cache.row_bytes
    page_stride = spec.stride[0] * spec.dtype.itemsize if pages > 1 else row_stride  # arbitrary for a single page
    for dimension, stride in ((0, page_stride), (1, row_stride)):
        if stride % GATHER_ALIGNMENT or stride <= 0:
            raise ValueError(
                f"{name} has shape {list(spec.shape)} and strides {list(spec.stride)}, {stride} bytes along dimension {dimension}; "
                f"supported: positive multiples of {GATHER_ALIGNMENT} bytes"
            )
    return page_stride, row_stride


def _decoded_format(
    name: str, spec: TensorSpec, q: TensorSpec, is_fp8_kvcache: bool, named: NamedFormat, served: Mapping[str, CacheFormat]
) -> CacheFormat:
    """Return the format of a cache for sparse decode, one of `served`. ValueError unless q and is_fp8_kvcache fit the format."""
    cache = format_of(name, spec, named, served)
    if cache is None or q.shape[-1] != cache.d_qk:
        supported = "; ".join(dict.fromkeys(f"{_shape_text(known)} with q of {known.d_qk} columns" for known in served.values()))
        raise ValueError(
            f"{name} has shape {list(spec.shape)} and dtype {spec.dtype}, q {q.shape[-1]} columns; supported with indices: {supported}"
        )
    if bool(cache.quantised) != is_fp8_kvcache:
        quantised = " and ".join(known.name for known in served.values() if known.quantised)
        raise ValueError(
            f"is_fp8_kvcache is {is_fp8_kvcache} with {name} of {spec.dtype} and {spec.shape[3]} columns; supported: "
            f"True for {quantised} caches, False for {LATENT.name} ones of bf16"
        )
    if not cache.quantised:
        check_dtype(name, spec, q.dtype)
    return cache

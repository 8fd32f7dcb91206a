"""cache_write: writes the keys of new tokens to their slots in a paged cache, quantised where the cache is."""

from __future__ import annotations

from typing import NamedTuple

from .abi import Int32, Int64, Pointer, params_of
from .cache_rows import KEYS_PER_BLOCK
from .mla import ceil_div


class CacheWriteArguments(NamedTuple):
    """Launch arguments of cache_write, in ABI order: the one list that host, launch and kernel share."""

    kv_c: Pointer  # dtype [tokens, latent columns]; for formats without rotary columns apart all columns
    k_pe: Pointer  # dtype [tokens, 64]; null for formats without rotary columns apart
    slot_mapping: Pointer  # int64 or int32 [tokens]; a slot outside [0, slots) is skipped
    descale_k: Pointer  # fp32 scalar of fp8_576, or null for 1
    k_cache: Pointer  # [pages, page size, row bytes]
    kv_c_stride_token: Int64  # elements
    k_pe_stride_token: Int64
    slot_stride_token: Int64
    cache_stride_page: Int64  # bytes
    cache_stride_row: Int64
    tokens: Int32
    slots: Int32  # pages * page_size
    page_size: Int32
    wide_slots: Int32  # 1: slot_mapping is int64
    power_of_two: Int32  # 1: fp32 scales are powers of two, as e8m0 scales always are


PARAMS = params_of(CacheWriteArguments)


def grid(tokens: int) -> tuple[int, int, int]:
    """Return the CTAs along x, y and z."""
    return ceil_div(tokens, KEYS_PER_BLOCK), 1, 1

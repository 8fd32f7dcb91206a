"""cache_write: writes the keys of new tokens to their slots in a paged cache, quantised where the cache is."""

from __future__ import annotations

from .abi import Param, int32s, int64s, pointers
from .cache_rows import KEYS_PER_BLOCK
from .mla import ceil_div

PARAMS: tuple[Param, ...] = (
    *pointers(
        "kv_c",  # dtype [tokens, 512 or 448]
        "k_pe",  # dtype [tokens, 64]
        "slot_mapping",  # int64 or int32 [tokens]; a slot outside [0, slots) is skipped
        "descale_k",  # fp32 scalar of fp8_576, or null for 1
        "k_cache",  # [pages, page size, row bytes]
    ),
    *int64s(
        "kv_c_stride_token",  # elements
        "k_pe_stride_token",
        "slot_stride_token",
        "cache_stride_page",  # bytes
        "cache_stride_row",
    ),
    *int32s(
        "tokens",
        "slots",  # pages * page_size
        "page_size",
        "wide_slots",  # 1: slot_mapping is int64
        "power_of_two",  # 1: scales of fp8_656 are powers of two, as those of fp8_584 always are
    ),
)


def grid(tokens: int) -> tuple[int, int, int]:
    """Return the CTAs along x, y and z."""
    return ceil_div(tokens, KEYS_PER_BLOCK), 1, 1

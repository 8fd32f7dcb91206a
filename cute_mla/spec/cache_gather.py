"""cache_gather: keys of several requests out of a paged cache, one behind the other, dequantised where the cache is quantised."""

from __future__ import annotations

from typing import NamedTuple

from .abi import Int32, Int64, Pointer, params_of
from .cache_rows import KEYS_PER_BLOCK
from .mla import ceil_div


class CacheGatherArguments(NamedTuple):
    """Launch arguments of cache_gather, in ABI order: the one list that host, launch and kernel share."""

    k_cache: Pointer  # [pages, page size, row bytes]
    block_table: Pointer  # int32 [batch, table_pages]; an entry that no key needs is not read
    cu_seqlens: Pointer  # int32 [batch + 1]: first row of out of each request, and the end of the last
    starts: Pointer  # int32 [batch]: position in its request of the first key to gather; null: 0
    descale_k: Pointer  # fp32 scalar of fp8_576, or null for 1
    out: Pointer  # dtype [rows, 576 or 512]
    cache_stride_page: Int64  # bytes
    cache_stride_row: Int64
    table_stride_batch: Int64  # elements
    out_stride_row: Int64
    rows: Int32
    batch: Int32
    pages: Int32  # of the cache: other page numbers give rows of zeros
    page_size: Int32
    table_pages: Int32


PARAMS = params_of(CacheGatherArguments)


def grid(rows: int) -> tuple[int, int, int]:
    """Return the CTAs along x, y and z."""
    return ceil_div(rows, KEYS_PER_BLOCK), 1, 1

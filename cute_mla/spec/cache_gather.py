"""cache_gather: keys of several requests out of a paged cache, one behind the other, dequantised where the cache is quantised."""

from __future__ import annotations

from .abi import Param, int32s, int64s, pointers
from .cache_rows import KEYS_PER_BLOCK
from .mla import ceil_div

PARAMS: tuple[Param, ...] = (
    *pointers(
        "k_cache",  # [pages, page size, row bytes]
        "block_table",  # int32 [batch, table_pages]; an entry that no key needs is not read
        "cu_seqlens",  # int32 [batch + 1]: first row of out of each request, and the end of the last
        "starts",  # int32 [batch]: position in its request of the first key to gather; null: 0
        "descale_k",  # fp32 scalar of fp8_576, or null for 1
        "out",  # dtype [rows, 576 or 512]
    ),
    *int64s(
        "cache_stride_page",  # bytes
        "cache_stride_row",
        "table_stride_batch",  # elements
        "out_stride_row",
    ),
    *int32s(
        "rows",
        "batch",
        "pages",  # of the cache: other page numbers give rows of zeros
        "page_size",
        "table_pages",
    ),
)


def grid(rows: int) -> tuple[int, int, int]:
    """Return the CTAs along x, y and z."""
    return ceil_div(rows, KEYS_PER_BLOCK), 1, 1

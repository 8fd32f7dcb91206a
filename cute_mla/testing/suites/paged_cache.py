"""Factor values of the grids of cache_write and cache_gather."""

from __future__ import annotations

TOKENS = (0, 1, 63, 64, 65)
PAGE_SIZES = (1, 16, 61, 64, 256)


def pages_for(page_size: int) -> int:
    """Return the pages of a cache with 512 slots, at least 2."""
    return max(512 // page_size, 2)

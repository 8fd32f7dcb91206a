"""Factor values of the grids of cache_write and cache_gather."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import product

from ...spec.cache_format import CacheFormat
from ...spec.cache_rows import CACHED, key_types
from ..cases.base import DTYPES

TOKENS = (0, 1, 63, 64, 65)
PAGE_SIZES = (1, 16, 61, 64, 256)


def types_and_caches(key_types: Callable[[CacheFormat], Collection[str]]) -> list[tuple[str, str]]:
    """Return every element type of keys with every cache that takes it."""
    return [(dtype, name) for dtype, (name, cache) in product(DTYPES, CACHED.items()) if dtype in key_types(cache)]


TYPES_AND_CACHES = types_and_caches(key_types)


def pages_for(page_size: int) -> int:
    """Return the pages of a cache with 512 slots, at least 2."""
    return max(512 // page_size, 2)


def takes_powers_of_two(cache: CacheFormat) -> bool:
    """Return whether power_of_two changes the scales of a format."""
    return cache.groups > 0 and cache.scale == "fp32"

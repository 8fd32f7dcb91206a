"""Variants of the ops over paged caches, and factor values of their grids."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import product

from ...spec.cache_format import CacheFormat
from ...spec.cache_rows import CACHED, key_types
from ..cases.base import DTYPES
from .cover import Factors, Variant

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


def cache_variants(
    types: Sequence[tuple[str, str]], factors: Factors, of_served: Factors, more: Callable[[CacheFormat], Factors] = lambda cache: {}
) -> Iterator[Variant]:
    """Yield every format of a cache with every dtype, without values that mean nothing to it.

    of_served: factors of a format that kernels of another one serve: they are covered; the addresses are other ones. more: of a format.
    """
    for dtype, name in types:
        cache, own = CACHED[name], dict(factors)
        if not cache.scales_inside:
            own["cache_layout"] = tuple(layout for layout in factors["cache_layout"] if layout != "far_rows")
        own |= {**(of_served if cache.served_as else {}), **more(cache)}
        if name != "fp8_576":
            own["scale_of_cache"] = (None,)
        if "power_of_two" in own and not takes_powers_of_two(cache):
            own["power_of_two"] = (False,)
        yield Variant(f"{dtype} {name}", {"dtype": dtype, "cache": name}, own)

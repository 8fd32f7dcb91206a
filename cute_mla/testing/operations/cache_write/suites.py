"""Suites of cache_write."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ....spec.cache_rows import CACHED
from ...suites.cover import Choice, Factors, covers
from ...suites.entries import OpSuites
from ...suites.paged_cache import PAGE_SIZES, TOKENS, TYPES_AND_CACHES, cache_variants, pages_for, takes_powers_of_two
from .case import CacheWriteCase

# Features of a case, by factor.
_FACTORS: Factors = {
    "tokens": (30, 63, 65),
    "values": ("normal", "nasty"),
    "page_size": (7, 8, 16, 61, 64),
    "cache_layout": ("packed", "layers", "far", "far_rows"),
    "key_layout": ("packed", "projection", "odd", "far"),
    "slot_type": ("int64", "int32", "strided", "far", "far_int32"),
    "scale_of_cache": (None, 0.037),
    "power_of_two": (False, True),
}


def _small(choice: Choice) -> CacheWriteCase | None:
    """Return the case with these features; None if the values are not possible together."""
    if choice["cache_layout"] == "packed" and CACHED[choice["cache"]].page_bytes(1) % 16 and choice["page_size"] % 2:
        return None  # pages begin at multiples of 16 bytes
    return CacheWriteCase(pages=max(128 // choice["page_size"], 3), **choice)


_OF_SERVED: Factors = {"key_layout": ("packed", "odd"), "slot_type": ("int64", "int32"), "page_size": (7, 61, 64)}
VARIANTS = tuple(cache_variants(TYPES_AND_CACHES, _FACTORS, _OF_SERVED))


_MORE: tuple[CacheWriteCase, ...] = (
    # One token, a whole tile of tokens, and no token.
    CacheWriteCase(tokens=1, page_size=1, pages=1),
    CacheWriteCase(cache="fp8_656", tokens=64, values="nasty", key_layout="odd", slot_type="int32"),
    CacheWriteCase(cache="fp8_584", values="nasty", page_size=61, power_of_two=True),
    CacheWriteCase(cache="fp8_656", tokens=0),
)
SMOKE: tuple[CacheWriteCase, ...] = tuple(dict.fromkeys([*_MORE, *covers(VARIANTS, _small)]))


def _grid() -> Iterator[CacheWriteCase]:
    for (dtype, cache), page_size, tokens in product(TYPES_AND_CACHES, PAGE_SIZES, TOKENS):
        yield CacheWriteCase(dtype, cache=cache, page_size=page_size, pages=pages_for(page_size), tokens=tokens, values="nasty")
    for (dtype, cache), seed in product(TYPES_AND_CACHES, range(3)):
        yield CacheWriteCase(dtype, cache=cache, tokens=1000, pages=16, values="nasty", seed=seed)
        if takes_powers_of_two(CACHED[cache]):
            yield CacheWriteCase(dtype, cache=cache, tokens=1000, pages=16, values="nasty", power_of_two=True, seed=seed)


OP_SUITES = OpSuites(VARIANTS, SMOKE, _grid)

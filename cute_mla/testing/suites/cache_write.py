"""Suites of cache_write."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ...spec.cache_rows import CACHED
from ..cases.base import DTYPES
from ..cases.cache_write import CacheWriteCase
from .entries import OpSuites, SimulatorReduction
from .paged_cache import PAGE_SIZES, TOKENS, pages_for

SMOKE: tuple[CacheWriteCase, ...] = (
    # Every format and dtype, with values of every kind.
    CacheWriteCase(values="nasty", key_layout="projection"),
    CacheWriteCase("fp16", values="nasty", page_size=61, slot_type="int32"),
    CacheWriteCase(cache="fp8_576", values="nasty", scale_of_cache=0.037, key_layout="projection"),
    CacheWriteCase("fp16", cache="fp8_576", values="nasty", page_size=7, pages=20, slot_type="strided"),
    CacheWriteCase(cache="fp8_656", values="nasty"),
    CacheWriteCase("fp16", cache="fp8_656", tokens=64, values="nasty", key_layout="odd", slot_type="int32"),
    CacheWriteCase(cache="fp8_656", tokens=63, values="nasty", power_of_two=True, key_layout="projection", slot_type="int32"),
    CacheWriteCase(cache="fp8_584", values="nasty", page_size=16, pages=9, key_layout="projection"),
    CacheWriteCase("fp16", cache="fp8_584", values="nasty", page_size=61, power_of_two=True),
    # Keys that begin at odd elements, pages of one layer out of several, pages far apart.
    CacheWriteCase(tokens=9, key_layout="odd", cache_layout="layers"),
    CacheWriteCase(cache="fp8_576", tokens=9, key_layout="odd", cache_layout="layers", scale_of_cache=3.0),
    CacheWriteCase(cache="fp8_584", tokens=9, key_layout="odd", page_size=5, pages=9, cache_layout="layers"),
    CacheWriteCase(cache="fp8_656", tokens=30, page_size=8, pages=5, cache_layout="far"),
    CacheWriteCase("fp16", tokens=30, page_size=8, pages=5, cache_layout="far"),
    # One token, and no token.
    CacheWriteCase(tokens=1, page_size=1, pages=1),
    CacheWriteCase(cache="fp8_656", tokens=0),
)


def full_cases() -> list[CacheWriteCase]:
    """Return every case of the full suite once."""
    return list(dict.fromkeys([*SMOKE, *_grid()]))


def _grid() -> Iterator[CacheWriteCase]:
    for dtype, cache, page_size, tokens in product(DTYPES, CACHED, PAGE_SIZES, TOKENS):
        yield CacheWriteCase(dtype, cache=cache, page_size=page_size, pages=pages_for(page_size), tokens=tokens, values="nasty")
    for dtype, cache, seed in product(DTYPES, CACHED, range(3)):
        yield CacheWriteCase(dtype, cache=cache, tokens=1000, pages=16, values="nasty", seed=seed)
        if cache == "fp8_656":
            yield CacheWriteCase(dtype, cache=cache, tokens=1000, pages=16, values="nasty", power_of_two=True, seed=seed)


# All cases are small: the simulated device runs the full suite.
OP_SUITES = OpSuites(SMOKE, full_cases, SimulatorReduction(lambda case: True))

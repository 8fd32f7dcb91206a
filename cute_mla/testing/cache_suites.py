"""The suites of cache_write and cache_gather."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ..spec.cache_rows import CACHED
from .cache_cases import CacheGatherCase, CacheWriteCase, PagedCase
from .planned import Bearable

TOKENS = (0, 1, 63, 64, 65)
PAGE_SIZES = (1, 16, 61, 64, 256)
GRID_DTYPES = ("bf16", "fp16")

WRITE_SMOKE: tuple[CacheWriteCase, ...] = (
    # Every format and type, with values of every kind.
    CacheWriteCase(values="nasty", key_layout="projection"),
    CacheWriteCase("fp16", values="nasty", page_size=61, slot_type="int32"),
    CacheWriteCase(cache="fp8_576", values="nasty", scale_of_cache=0.037, key_layout="projection"),
    CacheWriteCase("fp16", cache="fp8_576", values="nasty", page_size=7, pages=20, slot_type="strided"),
    CacheWriteCase(cache="fp8_656", values="nasty"),
    CacheWriteCase("fp16", cache="fp8_656", tokens=64, values="nasty", key_layout="odd", slot_type="int32"),
    CacheWriteCase(cache="fp8_656", tokens=63, values="nasty", power_of_two=True, key_layout="projection", slot_type="int32"),
    CacheWriteCase(cache="fp8_584", values="nasty", page_size=16, pages=9, key_layout="projection"),
    CacheWriteCase("fp16", cache="fp8_584", values="nasty", page_size=61, power_of_two=True),
    # Keys that begin at odd elements, pages of one layer of several, pages far apart.
    CacheWriteCase(tokens=9, key_layout="odd", cache_layout="layers"),
    CacheWriteCase(cache="fp8_576", tokens=9, key_layout="odd", cache_layout="layers", scale_of_cache=3.0),
    CacheWriteCase(cache="fp8_584", tokens=9, key_layout="odd", page_size=5, pages=9, cache_layout="layers"),
    CacheWriteCase(cache="fp8_656", tokens=30, page_size=8, pages=5, cache_layout="far"),
    CacheWriteCase("fp16", tokens=30, page_size=8, pages=5, cache_layout="far"),
    # One token, and none.
    CacheWriteCase(tokens=1, page_size=1, pages=1),
    CacheWriteCase(cache="fp8_656", tokens=0),
)

GATHER_SMOKE: tuple[CacheGatherCase, ...] = (
    # Every format and type; chunks that begin anywhere, requests without keys, rows behind the last.
    CacheGatherCase(lengths=(65, 0, 63), starts=(3, 70, 64)),
    CacheGatherCase("fp16", lengths=(1, 64), page_size=61, outputs="given", rest=5),
    CacheGatherCase(cache="fp8_576", lengths=(65, 3), starts=(60, 0), scale_of_cache=0.37, outputs="odd"),
    CacheGatherCase("fp16", cache="fp8_576", lengths=(40, 0, 0, 9), page_size=7, pages=20),
    CacheGatherCase(cache="fp8_656", lengths=(65, 64), starts=(1, 2), outputs="strided"),
    CacheGatherCase("fp16", cache="fp8_656", lengths=(63, 2), page_size=16, pages=9, outputs="odd", rest=3),
    CacheGatherCase(cache="fp8_584", lengths=(30, 0, 35), starts=(5, 0, 17), page_size=16, pages=9),
    CacheGatherCase("fp16", cache="fp8_584", lengths=(64, 1), page_size=61, outputs="given"),
    # More requests than a warp has lanes, most of them without keys.
    CacheGatherCase(lengths=(*(0,) * 40, 3, *(0,) * 30, 2, *(1,) * 9, 0), page_size=16),
    # Keys that no page holds.
    CacheGatherCase(lengths=(50, 90), page_size=16, pages=12, broken=True),
    CacheGatherCase(cache="fp8_656", lengths=(50, 90), starts=(11, 2), page_size=16, pages=12, broken=True, outputs="given"),
    # Pages of one layer of several, and far apart.
    CacheGatherCase(cache="fp8_584", lengths=(20,), page_size=5, pages=9, cache_layout="layers"),
    CacheGatherCase("fp16", cache="fp8_576", lengths=(20, 7), page_size=8, pages=5, cache_layout="far", scale_of_cache=2.5),
    CacheGatherCase(cache="fp8_656", lengths=(9, 20), page_size=8, pages=5, cache_layout="far"),
    # Rows without requests, requests without rows, and neither.
    CacheGatherCase(cache="fp8_656", lengths=(), rest=3, outputs="given"),
    CacheGatherCase(lengths=(0, 0)),
)


def full_writes() -> list[CacheWriteCase]:
    """Every case of the unreduced suite, once."""
    return list(dict.fromkeys([*WRITE_SMOKE, *_write_grid()]))


def full_gathers() -> list[CacheGatherCase]:
    """Every case of the unreduced suite, once."""
    return list(dict.fromkeys([*GATHER_SMOKE, *_gather_grid()]))


def _write_grid() -> Iterator[CacheWriteCase]:
    for dtype, cache, page_size, tokens in product(GRID_DTYPES, CACHED, PAGE_SIZES, TOKENS):
        yield CacheWriteCase(dtype, cache=cache, page_size=page_size, pages=max(512 // page_size, 2), tokens=tokens, values="nasty")
    for dtype, cache, seed in product(GRID_DTYPES, CACHED, range(3)):
        yield CacheWriteCase(dtype, cache=cache, tokens=1000, pages=16, values="nasty", seed=seed)
        if cache == "fp8_656":
            yield CacheWriteCase(dtype, cache=cache, tokens=1000, pages=16, values="nasty", power_of_two=True, seed=seed)


def _gather_grid() -> Iterator[CacheGatherCase]:
    for dtype, cache, page_size, keys in product(GRID_DTYPES, CACHED, PAGE_SIZES, TOKENS):
        case = CacheGatherCase(dtype, cache=cache, page_size=page_size, pages=max(512 // page_size, 2), lengths=(keys, 3))
        yield case
        yield replace(case, starts=(page_size // 2 + 1, 5), outputs="odd", rest=2)


SIMULATED: Bearable[PagedCase] = Bearable(lambda case: True, lambda case: (), lambda case: "large")

"""Suites of cache_gather."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ...spec.cache_rows import CACHED
from ..cases.base import DTYPES
from ..cases.cache_gather import CacheGatherCase
from .entries import OpSuites, SimulatorReduction
from .paged_cache import PAGE_SIZES, TOKENS, pages_for

SMOKE: tuple[CacheGatherCase, ...] = (
    # Every format and dtype; chunks that begin anywhere, requests without keys, rows behind the last key.
    CacheGatherCase(lengths=(65, 0, 63), starts=(3, 70, 64)),
    CacheGatherCase("fp16", lengths=(1, 64), page_size=61, outputs="given", rest=5),
    CacheGatherCase(cache="fp8_576", lengths=(65, 3), starts=(60, 0), scale_of_cache=0.37, outputs="odd"),
    CacheGatherCase("fp16", cache="fp8_576", lengths=(40, 0, 0, 9), page_size=7, pages=20),
    CacheGatherCase(cache="fp8_656", lengths=(65, 64), starts=(1, 2), outputs="strided"),
    CacheGatherCase("fp16", cache="fp8_656", lengths=(63, 2), page_size=16, pages=9, outputs="odd", rest=3),
    CacheGatherCase(cache="fp8_584", lengths=(30, 0, 35), starts=(5, 0, 17), page_size=16, pages=9),
    CacheGatherCase("fp16", cache="fp8_584", lengths=(64, 1), page_size=61, outputs="given"),
    # More requests than lanes in a warp, most of them without keys.
    CacheGatherCase(lengths=(*(0,) * 40, 3, *(0,) * 30, 2, *(1,) * 9, 0), page_size=16),
    # Keys whose block-table entry names no page.
    CacheGatherCase(lengths=(50, 90), page_size=16, pages=12, broken=True),
    CacheGatherCase(cache="fp8_656", lengths=(50, 90), starts=(11, 2), page_size=16, pages=12, broken=True, outputs="given"),
    # Pages of one layer out of several, and pages far apart.
    CacheGatherCase(cache="fp8_584", lengths=(20,), page_size=5, pages=9, cache_layout="layers"),
    CacheGatherCase("fp16", cache="fp8_576", lengths=(20, 7), page_size=8, pages=5, cache_layout="far", scale_of_cache=2.5),
    CacheGatherCase(cache="fp8_656", lengths=(9, 20), page_size=8, pages=5, cache_layout="far"),
    # Rows without requests, requests without rows, and neither.
    CacheGatherCase(cache="fp8_656", lengths=(), rest=3, outputs="given"),
    CacheGatherCase(lengths=(0, 0)),
)


def full_cases() -> list[CacheGatherCase]:
    """Return every case of the full suite once."""
    return list(dict.fromkeys([*SMOKE, *_grid()]))


def _grid() -> Iterator[CacheGatherCase]:
    for dtype, cache, page_size, keys in product(DTYPES, CACHED, PAGE_SIZES, TOKENS):
        case = CacheGatherCase(dtype, cache=cache, page_size=page_size, pages=pages_for(page_size), lengths=(keys, 3))
        yield case
        yield replace(case, starts=(page_size // 2 + 1, 5), outputs="odd", rest=2)


# All cases are small: the simulated device runs the full suite.
OP_SUITES = OpSuites(SMOKE, full_cases, SimulatorReduction(lambda case: True))

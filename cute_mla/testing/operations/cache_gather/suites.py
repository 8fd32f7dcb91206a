"""Suites of cache_gather."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ....spec.cache_rows import CACHED
from ...suites.cover import Choice, Factors, covers
from ...suites.entries import OpSuites
from ...suites.paged_cache import PAGE_SIZES, TOKENS, TYPES_AND_CACHES, cache_variants, pages_for
from .case import CacheGatherCase

# Features of a case, by factor.
_FACTORS: Factors = {
    "lengths": (  # keys of each request, positions of the first ones
        ((65, 0, 63), None),
        ((20, 40, 1), (3, 70, 64)),  # chunks that begin anywhere; requests without keys
        ((0, 30, 5), (5, 0, 17)),
        ((50, 90), (0, 64)),
    ),
    "page_size": (7, 8, 16, 61, 64),
    "cache_layout": ("packed", "layers", "far", "far_rows"),
    "outputs": ("allocated", "given", "strided", "odd", "far_tokens"),
    "rest": (0, 3, -2),
    "far_table": (False, True),
    "broken": (False, True),  # keys whose block-table entry names no page
    "scale_of_cache": (None, 0.37),
}


def _small(choice: Choice) -> CacheGatherCase | None:
    """Return the case with these features; None if the values are not possible together."""
    rest = {name: value for name, value in choice.items() if name != "lengths"}
    (lengths, starts), page_size = choice["lengths"], choice["page_size"]
    if choice["broken"] and choice["far_table"]:
        return None
    if choice["cache_layout"] == "packed" and CACHED[choice["cache"]].page_bytes(1) % 16 and page_size % 2:
        return None  # pages begin at multiples of 16 bytes
    pages = max(512 // page_size, 5)
    case = CacheGatherCase(lengths=lengths, starts=starts, pages=pages, **rest)
    return None if case.broken and not case.finding_kinds else case  # keys enough to use an entry that names no page


_OF_SERVED: Factors = {"lengths": (((0, 30, 5), (5, 0, 17)),), "outputs": ("allocated", "odd"), "page_size": (7, 61, 64)}
VARIANTS = tuple(cache_variants(TYPES_AND_CACHES, _FACTORS, _OF_SERVED))


_MORE: tuple[CacheGatherCase, ...] = (
    # More requests than lanes in a warp, most of them without keys. Then one request. The rows behind the keys would be a page's that no
    # block table names: whoever takes them for the last request's writes zeros there.
    CacheGatherCase(lengths=(*(0,) * 40, 3, *(0,) * 20, 2, 0, 1, 16), page_size=16, rest=2, outputs="given"),
    CacheGatherCase("fp16", lengths=(64,), rest=3, outputs="given"),
    CacheGatherCase(cache="fp8_656", lengths=(50, 90), starts=(11, 2), page_size=16, pages=12, broken=True, outputs="given"),
    # Rows without requests, requests without rows.
    CacheGatherCase(cache="fp8_656", lengths=(), rest=3, outputs="given"),
    CacheGatherCase(lengths=(0, 0)),
)
SMOKE: tuple[CacheGatherCase, ...] = tuple(dict.fromkeys([*_MORE, *covers(VARIANTS, _small)]))


def _grid() -> Iterator[CacheGatherCase]:
    for (dtype, cache), page_size, keys in product(TYPES_AND_CACHES, PAGE_SIZES, TOKENS):
        case = CacheGatherCase(dtype, cache=cache, page_size=page_size, pages=pages_for(page_size), lengths=(keys, 3))
        yield case
        yield replace(case, starts=(page_size // 2 + 1, 5), outputs="odd", rest=2)


OP_SUITES = OpSuites(VARIANTS, SMOKE, _grid)

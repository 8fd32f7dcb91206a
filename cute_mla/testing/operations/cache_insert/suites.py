"""Suites of cache_insert."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import get_args

from ....spec.cache_format import CacheFormat
from ....spec.cache_insert import key_types, rotates
from ....spec.cache_rows import CACHED
from ...suites.cover import Choice, Factors, covers
from ...suites.entries import OpSuites
from ...suites.paged_cache import PAGE_SIZES, TOKENS, cache_variants, pages_for, types_and_caches
from .case import CacheInsertCase, KeptKeys, PositionType, TableLayout

_TYPES_AND_CACHES = types_and_caches(key_types)
_FEW_HEADS, _MANY_HEADS = 5, 13
_FEW_TOKENS = 13
# Features of a case, by factor.
_FACTORS: Factors = {
    "tokens": (_FEW_TOKENS, 33),
    "values": ("normal", "nasty"),
    "page_size": (8, 24, 64),
    "cache_layout": ("packed", "far", "far_rows"),
    "key_layout": ("packed", "projection", "odd", "far"),
    "slot_type": ("int64", "int32", "strided", "far"),
    "scale_of_cache": (None, 0.037),
    "power_of_two": (False, True),
    "heads": (0, _FEW_HEADS, 11, _MANY_HEADS, 18),  # each of the four passes of a warp lacks some heads of one number
    "queries": ("packed", "sliced", "odd_far_heads", "far_heads", "far_tokens"),
    "table": get_args(TableLayout),
    "position_type": get_args(PositionType),
    "kept": get_args(KeptKeys),
    "eps": (1e-6, 0.5),
}


def _small(choice: Choice) -> CacheInsertCase | None:
    """Return the case with these features; None if they show little together.

    A layout needs queries, and so do far positions. Where the last head lies far, either the stride of heads does not fit in 32 bits, in
    bytes, or each pass of a warp has a head that does not. Elements one by one take long. Scales that are powers of two round
    differently at values that only "nasty" has.
    """
    heads, queries = choice["heads"], choice["queries"]
    if heads == 0 and (queries != "packed" or choice["position_type"] == "far"):
        return None
    if choice["power_of_two"] and choice["values"] != "nasty":
        return None
    if (queries == "far_heads" and heads > _FEW_HEADS) or (queries == "odd_far_heads" and heads < _MANY_HEADS):
        return None
    if queries == "odd_far_heads" and choice["tokens"] > _FEW_TOKENS:
        return None
    return CacheInsertCase(pages=max(64 // choice["page_size"], 3), **choice)


_PLAIN: Factors = {"queries": ("packed",), "position_type": ("int64",), "table": ("packed",)}
_OF_SERVED: Factors = {**_PLAIN, "key_layout": ("packed",), "slot_type": ("int64",), "kept": ("none",)}


def _without_queries(cache: CacheFormat) -> Factors:
    return {} if rotates(cache) else {**_PLAIN, "heads": (0,)}


VARIANTS = tuple(cache_variants(_TYPES_AND_CACHES, _FACTORS, _OF_SERVED, _without_queries))


_MORE: tuple[CacheInsertCase, ...] = (
    # One token; none; a table without positions; so many heads that the queries of a token fill two CTAs.
    CacheInsertCase(tokens=1, page_size=1, pages=1, heads=1, kept="packed"),
    CacheInsertCase(cache="fp8_656", tokens=0),
    CacheInsertCase(cache="v41", tokens=5, table_rows=0, kept="packed"),
    CacheInsertCase(cache="fp8_656", tokens=3, heads=128, queries="sliced"),
)
SMOKE: tuple[CacheInsertCase, ...] = tuple(dict.fromkeys([*_MORE, *covers(VARIANTS, _small)]))


def _grid() -> Iterator[CacheInsertCase]:
    for (dtype, cache), page_size, tokens in product(_TYPES_AND_CACHES, PAGE_SIZES, TOKENS):
        heads = 2 if rotates(CACHED[cache]) else 0
        yield CacheInsertCase(
            dtype, cache=cache, page_size=page_size, pages=pages_for(page_size), tokens=tokens, values="nasty", heads=heads, kept="packed"
        )


OP_SUITES = OpSuites(VARIANTS, SMOKE, _grid)

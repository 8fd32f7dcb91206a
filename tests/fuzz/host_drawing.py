"""Strategies of right calls of functions that have no record of an op."""

from __future__ import annotations

from hypothesis import strategies as st

from cute_mla.spec.cache_rows import KNOWN
from tests.fuzz.calls import CacheCase, PlanCase, RowsCase

SIZES = st.sampled_from((0, 1, 2, 15, 16, 63, 64, 65, 100, 128, 129))  # around tiles, and none
HEADS = st.sampled_from((1, 2, 3, 7, 16, 33, 63, 64, 65, 127, 128)) | st.integers(1, 128)
SEEDS = st.integers(0, 99)


@st.composite
def plan_cases(draw: st.DrawFn) -> PlanCase:
    """Draw plans that are made at once."""
    h_kv = draw(st.integers(1, 4))
    topk = draw(st.none() | SIZES)
    size = st.sampled_from((-(1 << 31), -1, 0, 1, 64, 65, 1000, 70_000)) | st.integers(0, 5000)
    return PlanCase(
        lengths=tuple(draw(st.lists(size, max_size=9))),
        s_q=draw(st.integers(1, 5)),
        h_kv=h_kv if topk is None else 1,
        group=draw(st.integers(1, 128 // h_kv)),
        topk=topk,
    )


@st.composite
def cache_cases(draw: st.DrawFn) -> CacheCase:
    """Draw caches of every format."""
    return CacheCase(
        cache_format=draw(st.sampled_from(tuple(KNOWN))),
        pages=draw(st.integers(0, 3)),
        page_size=draw(st.integers(0, 5)),
        padding=draw(st.sampled_from((0, 1, 16, 100))),
        power_of_two=draw(st.booleans()),
        given=draw(st.booleans()),
        seed=draw(SEEDS),
    )


def rows_cases() -> st.SearchStrategy[RowsCase]:
    """Draw rows of an indexer's scores."""
    leading = st.lists(st.integers(0, 3), max_size=3)
    shape = st.builds(lambda sizes, topk: (*sizes, topk), leading, st.sampled_from((1, 2, 3, 63, 64, 65, 300)) | st.integers(1, 40))
    return st.builds(RowsCase, shape, st.sampled_from((0.0, 0.3, 0.9, 1.0)), st.sampled_from((0.1, 3.0, 60.0)), st.booleans(), SEEDS)

"""Suites of topk_indices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import get_args

from ....spec.topk_indices import BLOCKS_PER_SM, CLUSTERS, LEAST_SHARED, MAX_STREAMED_TOPK, NARROW, RESIDENT, STREAM_TILE, WIDE
from ...suites.cover import Choice, Factors, Variant, covers
from ...suites.entries import OpSuites
from .case import LogitLayout, LogitValues, TopkIndicesCase

_SHARED = RESIDENT // WIDE  # numbers of a row that a CTA takes alone, however few the rows are
_FEW_SMS = 1  # SMs of a device that every row keeps busy

_OF_SIZES = ("twins", "scarce", "sparse", "runs", "filling")  # values that show something in rows of certain sizes alone: those of _EDGES
STREAM = "stream"  # in place of the number of CTAs that share a row
# Columns of "runs" and "few", of "twins" and "crowded", of "sparse", and of "scarce", by variant. The last warp of a row has 257, 513 or 7
# numbers, or a multiple of 256, as ends of loops want it; in a cluster of two, warps have more numbers than they keep.
_EDGES = {
    1: (15 * 544 + 513, 15 * 288 + 256, 15 * 288 + 7, 4577),
    2: (31 * 1312 + 513, 31 * 1312 + 768, 31 * 1312 + 1031, 17376),
    4: (63 * 544 + 513, 63 * 288 + 256, 63 * 288 + 7, 18308),
    8: (127 * 288 + 257, 127 * 288 + 256, 127 * 288 + 7, RESIDENT),
}

# Features of a case, by factor.
_FACTORS: Factors = {
    "values": tuple(values for values in get_args(LogitValues) if values not in _OF_SIZES),
    "lengths": ("full", "edges", "about_topk", "short", "empty"),
    "layout": get_args(LogitLayout),
    "outputs": ("allocated", "given", "strided", "odd", "far_requests"),
    "topk": (1, 63, 64, 65, 300),
}
_COLUMNS: dict[int | str, tuple[int, ...]] = {NARROW: (33, 700, 1025), WIDE: (_SHARED + 1, 2600, 4097)}
_LONG_COLUMNS = (RESIDENT + 1, RESIDENT + 700)  # of rows that 2 or 4 CTAs share, or one reads once


def _small(choice: Choice) -> TopkIndicesCase:
    """Return the case with these features."""
    cluster, rest = choice["cluster"], {name: value for name, value in choice.items() if name != "cluster"}
    if cluster == STREAM:
        rows = 3 if choice["lengths"] in ("edges", "about_topk", "short") else 2
        return TopkIndicesCase(rows=rows, sm_count=_FEW_SMS, **rest)
    shares = LEAST_SHARED <= cluster < WIDE
    edges = 15 if cluster == NARROW else 3  # of which a cluster has the first, since its rows cost most
    rows = {"edges": edges, "about_topk": 3, "short": 3}.get(choice["lengths"], 2)
    sm_count = rows * cluster // BLOCKS_PER_SM if shares else None  # on which rows have just this variant
    return TopkIndicesCase(rows=rows, sm_count=sm_count, **rest)


VARIANTS = tuple(
    Variant(f"cluster{cluster}", {"cluster": cluster}, {**_FACTORS, "columns": _COLUMNS.get(cluster, _LONG_COLUMNS)})
    for cluster in (*CLUSTERS, STREAM)
)

_MORE: tuple[TopkIndicesCase, ...] = (
    # The indexer's topk over as many numbers as one CTA keeps, over one more, and over few.
    TopkIndicesCase(rows=1, columns=RESIDENT, topk=2048, sm_count=_FEW_SMS),
    TopkIndicesCase(rows=1, columns=RESIDENT + 1, topk=2048, values="narrow"),
    TopkIndicesCase(rows=2, columns=2049, topk=2048, values="plateau"),
    TopkIndicesCase(rows=1, columns=5000, topk=4096, values="specials", sm_count=_FEW_SMS),
    # More positions than numbers; no positions, no numbers, no rows.
    TopkIndicesCase(rows=2, columns=40, topk=600),
    TopkIndicesCase(rows=2, columns=40, topk=0),
    TopkIndicesCase(rows=2, columns=0, topk=5),
    TopkIndicesCase(rows=0, columns=40, topk=5),
)


def _edges(cluster: int) -> Iterator[TopkIndicesCase]:
    """Yield rows whose numbers meet the ends of loops and lists of a variant, and rows that are shorter than topk."""
    few_sms = {NARROW: _FEW_SMS, WIDE: None}
    sm_count = few_sms.get(cluster, cluster // BLOCKS_PER_SM)  # on which one row has just this variant
    runs, twins, sparse, scarce = _EDGES[cluster]
    several = few_sms.get(cluster, cluster)  # for two rows
    yield TopkIndicesCase(
        rows=2,
        columns=runs,
        topk=512 * cluster,
        values="runs",
        lengths="last",
        layout="far_rows",
        outputs="far_requests",
        sm_count=several,
    )
    yield TopkIndicesCase(rows=1, columns=runs, topk=512 * cluster, values="few", sm_count=sm_count)
    yield TopkIndicesCase(rows=1, columns=scarce, topk=scarce // 5, values="scarce", sm_count=sm_count)
    yield TopkIndicesCase(rows=1, columns=sparse, topk=sparse // 64, values="sparse", sm_count=sm_count)
    for values in ("twins", "crowded"):
        yield TopkIndicesCase(rows=1, columns=twins, topk=64 * cluster, values=values, sm_count=sm_count)
    yield TopkIndicesCase(rows=2, columns=scarce, topk=600 * cluster, lengths="short", outputs="strided", sm_count=several)


def _streamed() -> Iterator[TopkIndicesCase]:
    """Yield rows that are read once: lists that are almost, just and more than full, numbers that all pass, and a topk that fills half."""
    for topk in (99, 100, 101):
        yield TopkIndicesCase(rows=2, columns=4 * STREAM_TILE + 1, topk=topk, values="filling", sm_count=_FEW_SMS)
    case = TopkIndicesCase(rows=2, columns=4 * STREAM_TILE + 700, topk=MAX_STREAMED_TOPK, sm_count=_FEW_SMS)
    yield from (case, replace(case, values="rising"), replace(case, values="scarce", topk=1900), replace(case, values="nan", topk=2000))
    yield replace(case, topk=MAX_STREAMED_TOPK + 1)  # one more than a row that is read once may have


# More numbers than a cluster keeps.
_LONG: tuple[TopkIndicesCase, ...] = tuple(
    TopkIndicesCase(rows=1, columns=RESIDENT * WIDE + 700, topk=2048, values=values) for values in ("random", "few")
)
SMOKE: tuple[TopkIndicesCase, ...] = tuple(
    dict.fromkeys([*_MORE, _LONG[0], *covers(VARIANTS, _small), *(case for c in CLUSTERS for case in _edges(c)), *_streamed()])
)


def _grid() -> Iterator[TopkIndicesCase]:
    """Yield every kind of values over sizes, in both variants."""
    for values, columns, topk in product(get_args(LogitValues), (257, 3000, 8192), (1, 512, 2047, 2048)):
        yield TopkIndicesCase(rows=2, columns=columns, topk=topk, values=values)
        yield TopkIndicesCase(rows=2, columns=columns, topk=topk, values=values, sm_count=_FEW_SMS)


OP_SUITES = OpSuites(VARIANTS, SMOKE, lambda: [*_LONG, *_grid()])

"""Suites of indexer_topk."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ....spec.mqa_logits import PAGE_SIZES
from ....spec.topk_indices import BLOCKS_PER_SM, CLUSTERS, NARROW, RESIDENT
from ...suites.cover import Choice, Factors, Variant, covers
from ...suites.entries import OpSuites
from ..topk_indices.case import LogitValues
from .case import IndexerTopkCase

_FEW_SMS = 1
_LISTS: tuple[LogitValues, ...] = ("runs", "few", "scarce")
_CROWDS: tuple[LogitValues, ...] = ("twins", "crowded", "sparse")
_CROWDED = {1: (64, 4576), 2: (128, 17376), 4: (256, 18400), 8: (200, 4096)}  # topk and keys of crowded rows, by CTAs that share one

_SHARED: Factors = {
    "values": ("exact", "plateau"),
    "keys": (65, 300, 520),
    "outputs": ("allocated", "given", "strided", "odd", "far_requests"),
    "heads": (1, 32, 33, 64),
    "topk": (1, 64, 100, 257),
}
_ROWS: Factors = {
    **_SHARED,
    "tokens": (1, 4, 6),
    "windows": ("causal", "random", "sequences", "edges", "empty"),
    "columns": (None, 40, 210, 1000),
}
_PAGES: Factors = {
    **_SHARED,
    "requests": (1, 3),
    "tokens": (1, 2, 3),
    "page_size": PAGE_SIZES,
    "lengths": ("full", "edges", "random", "empty"),
    "per_token": (False, True),
    "slots": (False, True),
    "layout": ("packed", "strided", "far_keys", "aliased"),
    "broken": (False, True),
}


def _small(choice: Choice) -> IndexerTopkCase | None:
    """Return the case with these features; None if the values are not possible together."""
    case = IndexerTopkCase(**choice)
    if case.requests * case.tokens < 2 and case.outputs == "far_requests":
        return None
    if case.layout == "aliased" and case.requests < 2:
        return None
    if case.broken and (case.lengths == "empty" or case.keys <= 2 * choice["page_size"] or not (case.is_scored or case.slots)):
        return None
    return case


VARIANTS = (Variant("pages", {}, _PAGES), Variant("rows", {}, _ROWS))


def _many_columns() -> Iterator[IndexerTopkCase]:
    """Yield few keys in many columns, for every variant of the selection: keys of a row; of requests, with lengths of either kind.

    With lengths of requests, all keys are chosen.
    """
    for cluster, stream in (*((cluster, False) for cluster in CLUSTERS), (NARROW, True)):
        columns = 300 if cluster == NARROW and not stream else RESIDENT + 30
        sm_count = _FEW_SMS if stream else 2 * cluster
        yield IndexerTopkCase(tokens=4, keys=columns, windows="near", heads=1, sm_count=sm_count)
        for slots, per_token in product((False, True), (False, True)):
            yield IndexerTopkCase(
                requests=2,
                tokens=2,
                keys=columns,
                page_size=64 if per_token else 16,
                lengths="near",
                per_token=per_token,
                heads=1,
                topk=64 if per_token else 600 * cluster,
                slots=slots,
                layout="far_table",
                outputs="far_requests",
                sm_count=sm_count,
            )


def _patterns() -> Iterator[IndexerTopkCase]:
    """Yield numbers that meet the ends of loops and lists of every variant with slots."""
    for cluster, keys in ((1, 4577), (2, 17_121), (4, 18_401), (8, 33_953)):
        for patterns, topk, columns in ((_LISTS, 512 * cluster, keys), (_CROWDS, *_CROWDED[cluster])):
            rows = len(patterns)
            yield IndexerTopkCase(
                tokens=rows,
                keys=columns,
                page_size=128,
                heads=32,
                topk=topk,
                slots=True,
                patterns=patterns,
                sm_count=-(-rows * cluster // BLOCKS_PER_SM),
            )


_MORE: tuple[IndexerTopkCase, ...] = (
    # One CTA has the whole row; a row whose keys are all chosen.
    IndexerTopkCase(tokens=3, keys=2300, heads=32, topk=2048, sm_count=_FEW_SMS),
    IndexerTopkCase(requests=2, tokens=1, keys=2048, page_size=128, heads=32, topk=2048, slots=True),
    *_patterns(),
    *_many_columns(),
    # No tokens, no keys, none to choose.
    IndexerTopkCase(tokens=0),
    IndexerTopkCase(keys=0),
    IndexerTopkCase(requests=2, keys=0, page_size=64, slots=True),
    IndexerTopkCase(topk=0, page_size=64),
)
SMOKE: tuple[IndexerTopkCase, ...] = tuple(dict.fromkeys([*_MORE, *covers(VARIANTS, _small)]))
# More keys than a cluster keeps.
_LONG: tuple[IndexerTopkCase, ...] = tuple(
    IndexerTopkCase(
        tokens=2,
        keys=cluster * (RESIDENT + 5000),
        page_size=128,
        heads=32,
        topk=512 * cluster,
        slots=True,
        patterns=("runs", "sparse"),
        sm_count=cluster,
    )
    for cluster in CLUSTERS
    if cluster > NARROW
)

OP_SUITES = OpSuites(VARIANTS, SMOKE, lambda: _LONG)

"""Suites of topk_indices."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import get_args

from ...spec.topk_indices import BLOCKS_PER_SM, CLUSTERS, LEAST_SHARED, NARROW, RESIDENT, WIDE
from ..cases.topk_indices import LogitLayout, LogitValues, RowLengths, TopkIndicesCase
from .cover import Choice, Factors, cover
from .entries import OpSuites, SimulatorReduction

_SHARED = RESIDENT // WIDE  # numbers of a row that a CTA takes alone, however few the rows are
_FEW_SMS = 1  # SMs of a device that every row keeps busy

# Features of a case, by factor.
_FACTORS: Factors = {
    "values": get_args(LogitValues),
    "lengths": get_args(RowLengths),
    "layout": get_args(LogitLayout),
    "outputs": ("allocated", "given", "strided", "odd", "far_requests"),
    "topk": (1, 63, 64, 65, 300),
}
_COLUMNS = {NARROW: (33, 700, 1025), WIDE: (_SHARED + 1, 2600, 4097)}
_LONG_COLUMNS = (RESIDENT + 1, RESIDENT + 700)  # of rows that 2 or 4 CTAs share


def _small(cluster: int, choice: Choice) -> TopkIndicesCase | None:
    """Return the case with these features; None if the values are not possible together."""
    shares = LEAST_SHARED <= cluster < WIDE
    edges = 15 if cluster == NARROW else 3 if shares else 8  # of which a cluster has the first, since its rows cost most
    rows = {"edges": edges, "about_topk": 3, "short": 3}.get(choice["lengths"], 2)
    sm_count = rows * cluster // BLOCKS_PER_SM if shares else None  # on which rows have just this variant
    return TopkIndicesCase(rows=rows, sm_count=sm_count, **choice)


def _covers() -> Iterator[TopkIndicesCase]:
    """Yield cases with every feature of every variant."""
    seen: set[object] = set()
    for cluster in CLUSTERS:
        yield from cover(f"cluster{cluster}", {**_FACTORS, "columns": _COLUMNS.get(cluster, _LONG_COLUMNS)}, partial(_small, cluster), seen)


_MORE: tuple[TopkIndicesCase, ...] = (
    # The indexer's topk over as many numbers as one CTA keeps, over one more, and over few.
    TopkIndicesCase(rows=1, columns=RESIDENT, topk=2048, sm_count=_FEW_SMS),
    TopkIndicesCase(rows=1, columns=RESIDENT + 1, topk=2048, values="narrow"),
    TopkIndicesCase(rows=2, columns=2049, topk=2048, values="plateau"),
    TopkIndicesCase(rows=1, columns=5000, topk=4096, values="specials", sm_count=_FEW_SMS),
    # More positions than numbers; no positions, no numbers, no rows.
    TopkIndicesCase(rows=2, columns=40, topk=100),
    TopkIndicesCase(rows=2, columns=40, topk=0),
    TopkIndicesCase(rows=2, columns=0, topk=5),
    TopkIndicesCase(rows=0, columns=40, topk=5),
)
# More numbers than a cluster keeps.
_LONG: tuple[TopkIndicesCase, ...] = tuple(
    TopkIndicesCase(rows=1, columns=RESIDENT * WIDE + 700, topk=2048, values=values) for values in ("random", "few")
)
SMOKE: tuple[TopkIndicesCase, ...] = tuple(dict.fromkeys([*_MORE, _LONG[0], *_covers()]))


def _grid() -> Iterator[TopkIndicesCase]:
    """Yield every kind of values over sizes, in both variants."""
    for values, columns, topk in product(get_args(LogitValues), (257, 3000, 8192), (1, 512, 2047, 2048)):
        yield TopkIndicesCase(rows=2, columns=columns, topk=topk, values=values)
        yield TopkIndicesCase(rows=2, columns=columns, topk=topk, values=values, sm_count=_FEW_SMS)


def full_cases() -> list[TopkIndicesCase]:
    """Return every case of the full suite once."""
    return list(dict.fromkeys([*SMOKE, *_LONG, *_grid()]))


# All cases are small: the simulated device runs the full suite.
OP_SUITES = OpSuites(SMOKE, full_cases, SimulatorReduction(lambda case: True))

"""Suites of index_write."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, get_args

from ....spec.index_write import Rope, Rows, ScaleFormat
from ....spec.mqa_logits import PAGE_SIZES
from ...suites.cover import Choice, Factors, Variant, covers
from ...suites.entries import OpSuites
from .case import IndexCacheLayout, IndexWriteCase, IntegerType, TableLayout

# Features of a case, by factor.
_FACTORS: Factors = {
    "rope": get_args(Rope),
    "hadamard": (False, True),
    "values": ("normal", "nasty"),
    "positions": (True, False),
    "integers": get_args(IntegerType),
    "table": get_args(TableLayout),
}
_OF_ROWS: dict[Rows, Factors] = {
    "keys": {
        "tokens": (30, 63, 64, 65),
        "page_size": PAGE_SIZES,
        "scale_format": get_args(ScaleFormat),
        "layout": ("packed", "projection", "odd", "far"),
        "cache_layout": get_args(IndexCacheLayout),
    },
    "queries": {
        "tokens": (2, 9),
        "heads": (2, 3, 17, 32, 64),
        "layout": ("packed", "projection", "odd", "far", "far_heads"),
        "outputs": ("allocated", "given", "strided", "odd", "far_tokens", "far_heads"),
        "wide_weights": (True, False),
    },
}


def _small(choice: Choice) -> IndexWriteCase:
    """Return the case with these features."""
    more: dict[str, Any] = {"pages": max(128 // choice["page_size"], 3)} if choice["rows"] == "keys" else {"table_rows": 8}
    return IndexWriteCase(**more, **choice)


VARIANTS = tuple(Variant(rows, {"rows": rows}, {**_FACTORS, **factors}) for rows, factors in _OF_ROWS.items())

_MORE: tuple[IndexWriteCase, ...] = (
    # One key; none; a table without positions, so that every row is NaN; one head of one token; no token.
    IndexWriteCase(tokens=1, page_size=16, pages=1),
    IndexWriteCase(tokens=0),
    IndexWriteCase(tokens=5, table_rows=0),
    IndexWriteCase(rows="queries", tokens=1, heads=1),
    IndexWriteCase(rows="queries", tokens=0, heads=4),
    # Where scales begin and end, with positions and slots that lie far.
    IndexWriteCase(tokens=30, page_size=16, values="limits", integers="far"),
    IndexWriteCase(tokens=30, page_size=16, values="tiny", integers="far_int32"),
    IndexWriteCase(rows="queries", tokens=30, heads=1, values="limits", integers="far"),
    IndexWriteCase(rows="queries", tokens=30, heads=1, values="tiny", integers="far_int32"),
    # Every kind of row in every form.
    *(IndexWriteCase(tokens=65, values="nasty", rope=rope, hadamard=hadamard) for rope, hadamard in product(get_args(Rope), (False, True))),
)
SMOKE: tuple[IndexWriteCase, ...] = tuple(dict.fromkeys([*_MORE, *covers(VARIANTS, _small)]))


def _grid() -> Iterator[IndexWriteCase]:
    """Yield every form over sizes, with many rows of all kinds."""
    for rope, hadamard, seed in product(get_args(Rope), (False, True), range(2)):
        form: dict[str, Any] = {"rope": rope, "hadamard": hadamard, "values": "nasty", "seed": seed}
        for scale_format, page_size in product(get_args(ScaleFormat), PAGE_SIZES):
            yield IndexWriteCase(tokens=500, page_size=page_size, pages=1024 // page_size, scale_format=scale_format, **form)
        for heads in (1, 8, 32, 63, 64):
            yield IndexWriteCase(rows="queries", tokens=9, heads=heads, **form)


OP_SUITES = OpSuites(VARIANTS, SMOKE, _grid)

"""Suites of indexer_topk."""

from __future__ import annotations

from collections.abc import Iterator

from ...spec.mqa_logits import PAGE_SIZES
from ...spec.topk_indices import RESIDENT
from ..cases.indexer_topk import IndexerTopkCase
from .cover import Choice, Factors, cover
from .entries import OpSuites, SimulatorReduction

_FEW_SMS = 1

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


def _covers() -> Iterator[IndexerTopkCase]:
    """Yield cases with every feature of both functions."""
    seen: set[object] = set()
    yield from cover("pages", _PAGES, _small, seen)
    yield from cover("rows", _ROWS, _small, seen)


_MORE: tuple[IndexerTopkCase, ...] = (
    # A cluster shares a row; one CTA has the whole row; a row whose keys are all chosen.
    IndexerTopkCase(requests=2, tokens=1, keys=2200, page_size=128, heads=32, topk=2048, slots=True),
    IndexerTopkCase(tokens=3, keys=2300, heads=32, topk=2048, sm_count=_FEW_SMS),
    IndexerTopkCase(requests=2, tokens=1, keys=2048, page_size=128, heads=32, topk=2048, slots=True),
    # Two CTAs share a row, and four.
    *(
        IndexerTopkCase(requests=2, tokens=1, keys=RESIDENT + 100, page_size=128, heads=8, topk=2048, slots=True, sm_count=sm_count)
        for sm_count in (2, 4)
    ),
    # No tokens, no keys, none to choose.
    IndexerTopkCase(tokens=0),
    IndexerTopkCase(keys=0),
    IndexerTopkCase(requests=2, keys=0, page_size=64, slots=True),
    IndexerTopkCase(topk=0, page_size=64),
)
SMOKE: tuple[IndexerTopkCase, ...] = tuple(dict.fromkeys([*_MORE, *_covers()]))

# All cases are small: the simulated device runs the full suite, which is the smoke suite.
OP_SUITES = OpSuites(SMOKE, lambda: list(SMOKE), SimulatorReduction(lambda case: True))

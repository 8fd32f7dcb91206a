"""Suites of indexer_backward."""

from __future__ import annotations

from collections.abc import Iterator

from ....spec.indexer_backward import closed_variants
from ...suites.cover import Choice, Factors, Variant, covers
from ...suites.entries import OpSuites
from ..head_sums.suites import CHOSEN_KEYS, is_possible
from .case import IndexerBackwardCase

# Features of a small case, by factor.
_FACTORS: Factors = {
    **CHOSEN_KEYS,
    "h_q": (1, 3, 17, 33, 64),
    "dk": ("bf16", "fp32", "added"),
    "chunked": (False, True),
    "transposed": (False, True),
}


def _small(choice: Choice) -> IndexerBackwardCase | None:
    """Return the small case with these features; None if the values are not possible together."""
    if not is_possible(choice):
        return None
    rest = {name: value for name, value in choice.items() if name not in ("tokens", "rows")}
    (form, batch, s_q, lengths), (s_kv, topk) = choice["tokens"], choice["rows"]
    return IndexerBackwardCase(form=form, batch=batch, s_q=s_q, lengths=lengths, s_kv=s_kv, topk=topk, sm_count=2, **rest)


VARIANTS = tuple(Variant(config.name, {}, _FACTORS) for config in closed_variants())

# Cases whose size is what they test: no tokens, slots or rows, one of everything, and tokens of no, one and many tiles.
_LARGE: tuple[IndexerBackwardCase, ...] = (
    IndexerBackwardCase(batch=0, form="batched"),
    IndexerBackwardCase(s_kv=0, topk=3, indices="none", h_q=3, outputs="given"),
    IndexerBackwardCase(s_q=2, topk=0, s_kv=5, h_q=3, outputs="given", dk="fp32"),
    IndexerBackwardCase(h_q=1, s_kv=1, topk=1, sm_count=1),
    IndexerBackwardCase(s_q=2, h_q=8, s_kv=90, topk=70, indices="none", outputs="given"),
    IndexerBackwardCase(s_q=7, h_q=48, s_kv=300, topk=330, lengths=(330, 0, 1, 64, 0, 65, 129), indices="mixed", sm_count=1),
)

SMOKE: tuple[IndexerBackwardCase, ...] = tuple(dict.fromkeys([*_LARGE, *covers(VARIANTS, _small)]))


def corner_cases() -> Iterator[IndexerBackwardCase]:
    """Yield the calls of models, of few tokens, and many more indices than rows."""
    for h_q in (8, 64):
        yield IndexerBackwardCase(s_q=2, h_q=h_q, s_kv=1800, topk=1024, sm_count=4)
        yield IndexerBackwardCase(s_q=3, h_q=h_q, s_kv=32, topk=600, indices="mixed", lengths="drawn", sm_count=4)


OP_SUITES = OpSuites(VARIANTS, SMOKE, corner_cases)

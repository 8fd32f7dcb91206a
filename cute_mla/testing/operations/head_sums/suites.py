"""Suites of head_sums."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ....spec.head_sums import INDEX_COLUMNS, closed_variants
from ...cases.far import FAR_DIMENSIONS
from ...suites.cover import SPREAD_SCALE, Choice, Factors, Variant, covers, lacks_far_rows
from ...suites.entries import OpSuites
from .case import HeadSumsCase

_MINUS_INF = float("-inf")
_RAGGED = ("ragged", 3, 2, "drawn")
_TILES = (140, 130)
# Features of a small case, by factor, as those of sparse prefill.
CHOSEN_KEYS: Factors = {
    "tokens": (("single", 1, 5, "edges"), ("batched", 2, 2, None), _RAGGED, ("clipped", 3, 2, "zeros")),
    "rows": ((100, 65), _TILES),
    "indices": ("valid", "mixed"),
    "kv_layout": ("packed", "padded_rows", "layers", "far"),
    "index_layout": ("packed", "odd", "far_requests", "far_tokens"),
    "q_layout": ("packed", "sliced", "even", "heads_first", *FAR_DIMENSIONS),
    "saved": ("given", "strided", *FAR_DIMENSIONS),
    "outputs": ("allocated", "given"),
    "h_q": (3, 17, 64),
}
_PROBS: Factors = {
    **CHOSEN_KEYS,
    "h_q": (3, 17, 64, 65, 128),
    "sinks": ("none", "drawn", "infinite"),
    "values": (("normal", SPREAD_SCALE), ("peaks", 0.1)),
    "holes": (False, True),
    "empty_lse": (None, _MINUS_INF),
}
_LAYOUTS = ("q_layout", "saved", "index_layout")


def is_possible(choice: Choice) -> bool:
    """Return whether the features of a small case are possible together."""
    form, batch, _, _ = choice["tokens"]
    layouts = tuple(choice[name] for name in _LAYOUTS)
    if (batch < 2 and "far_requests" in layouts) or lacks_far_rows(layouts, choice["h_q"]):
        return False
    return form not in ("ragged", "clipped") or choice["indices"] != "valid"  # only invalid indices tell where the rows of a request end


def _small(choice: Choice) -> HeadSumsCase | None:
    """Return the small case with these features; None if the values are not possible together."""
    if not is_possible(choice):
        return None
    rest = {name: value for name, value in choice.items() if name not in ("tokens", "rows", "values")}
    values, scale = choice.get("values", ("normal", None))
    (form, batch, s_q, lengths), (s_kv, topk) = choice["tokens"], choice["rows"]
    return HeadSumsCase(
        form=form, batch=batch, s_q=s_q, lengths=lengths, s_kv=s_kv, topk=topk, values=values, softmax_scale=scale, sm_count=2, **rest
    )


VARIANTS = tuple(
    Variant(config.name, {"d_qk": config.columns}, CHOSEN_KEYS if config.kind == "scores" else _PROBS) for config in closed_variants()
)

# Cases whose size is what they test: no tokens, slots or rows, one of everything, no index that names a key, and many tiles of keys.
_LARGE: tuple[HeadSumsCase, ...] = tuple(
    HeadSumsCase(d_qk=d_qk, **shape)
    for d_qk in (576, INDEX_COLUMNS)
    for shape in (
        {"batch": 0, "form": "batched"},
        {"s_kv": 0, "topk": 3, "indices": "none", "h_q": 3, "outputs": "given"},
        {"s_q": 2, "topk": 0, "s_kv": 5, "h_q": 3, "outputs": "given"},
        {"h_q": 1, "s_kv": 1, "topk": 1},
        {"s_q": 2, "h_q": 8, "s_kv": 90, "topk": 70, "indices": "none"},
        {"s_q": 7, "h_q": 33, "s_kv": 300, "topk": 330, "lengths": (330, 0, 1, 64, 0, 65, 129), "indices": "mixed"},
    )
)

SMOKE: tuple[HeadSumsCase, ...] = tuple(dict.fromkeys([*_LARGE, *covers(VARIANTS, _small)]))


def corner_cases() -> Iterator[HeadSumsCase]:
    """Yield the calls of models, of few tokens, and every topk about a tile."""
    for config, heads in product(closed_variants(), (8, 64)):
        yield HeadSumsCase(s_q=2, h_q=heads, d_qk=config.columns, s_kv=1800, topk=1024)
        for topk in (63, 64, 65):
            yield HeadSumsCase(s_q=3, h_q=heads, d_qk=config.columns, s_kv=100, topk=topk, indices="mixed", lengths="drawn")


OP_SUITES = OpSuites(VARIANTS, SMOKE, corner_cases)

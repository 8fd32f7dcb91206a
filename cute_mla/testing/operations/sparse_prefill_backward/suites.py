"""Suites of the backward pass of sparse prefill."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ....spec.dense_decode import TILE_ROWS
from ....spec.mla import ceil_div
from ....spec.sparse_prefill import HEAD_DIMS
from ...cases.far import FAR_DIMENSIONS
from ...suites.cover import SPREAD_SCALE, Choice, Factors, Variant, covers, lacks_far_rows
from ...suites.entries import OpSuites
from .case import SparsePrefillBackwardCase

_MINUS_INF = float("-inf")
_RAGGED = ("ragged", 3, 2, "drawn")
_TILES = (140, 130)
# Features of a small case, by factor, as those of the forward pass.
_FACTORS: Factors = {
    "tokens": (("single", 1, 5, "edges"), ("batched", 2, 2, None), _RAGGED, ("clipped", 3, 2, "zeros")),
    "rows": ((100, 65), _TILES),
    "indices": ("valid", "mixed"),
    "sinks": ("none", "drawn", "infinite"),
    "values": (("normal", SPREAD_SCALE), ("peaks", 0.1)),
    "kv_layout": ("packed", "padded_rows", "layers", "far"),
    "index_layout": ("packed", "odd", "far_requests", "far_tokens"),
    "q_layout": ("packed", "sliced", "even", "heads_first", *FAR_DIMENSIONS),
    "dout_layout": ("packed", "sliced", "even", "heads_first", *FAR_DIMENSIONS),
    "saved": ("given", "strided", *FAR_DIMENSIONS),
    "outputs": ("allocated", "given", "strided", *FAR_DIMENSIONS),
    "dkv": ("bf16", "fp32", "added"),
    "dlse": (False, True),
    "chunked": (False, True),
    "holes": (False, True),
    "empty_lse": (None, _MINUS_INF),
    "groups": (1, 3),  # of CTAs, each of which takes every so many tokens
}
_LAYOUTS = ("q_layout", "dout_layout", "saved", "outputs", "index_layout")


def _small(choice: Choice) -> SparsePrefillBackwardCase | None:
    """Return the small case with these features; None if the values are not possible together."""
    rest = {name: value for name, value in choice.items() if name not in ("tokens", "rows", "groups", "values")}
    values, scale = choice["values"]
    (form, batch, s_q, lengths), (s_kv, topk) = choice["tokens"], choice["rows"]
    layouts = tuple(choice[name] for name in _LAYOUTS)
    if (batch < 2 and "far_requests" in layouts) or lacks_far_rows(layouts, choice["h_q"]):
        return None
    if form in ("ragged", "clipped") and choice["indices"] == "valid":
        return None  # only invalid indices tell where the rows of a request end
    return SparsePrefillBackwardCase(
        form=form, batch=batch, s_q=s_q, lengths=lengths, s_kv=s_kv, topk=topk, values=values, softmax_scale=scale,
        sm_count=choice["groups"] * ceil_div(choice["h_q"], TILE_ROWS), **rest,
    )  # fmt: skip


VARIANTS = tuple(
    Variant(f"{d_qk} {two}", {"d_qk": d_qk}, {**_FACTORS, "h_q": (68, 96, 128) if two else (3, 12, 64)})
    for d_qk, two in product(HEAD_DIMS, (False, True))
)

# Cases whose size is what they test: none of tokens, rows or indices, one of everything, and tokens of no, one and many tiles on one CTA.
_LARGE: tuple[SparsePrefillBackwardCase, ...] = (
    SparsePrefillBackwardCase(batch=0, form="batched"),
    SparsePrefillBackwardCase(s_kv=0, topk=3, indices="none", sinks="drawn", h_q=3, outputs="given"),
    SparsePrefillBackwardCase(s_q=2, topk=0, s_kv=5, h_q=3, outputs="given", dkv="fp32", sinks="drawn"),
    SparsePrefillBackwardCase(h_q=1, s_kv=1, topk=1, sm_count=1),
    *(
        SparsePrefillBackwardCase(
            s_q=len(lengths), h_q=h_q, d_qk=d_qk, s_kv=300, topk=330, lengths=lengths, indices="mixed", sinks="drawn", sm_count=sms,
        )
        for d_qk, h_q, sms, lengths in ((576, 48, 1, (330, 0, 1, 64, 0, 65, 129)), (512, 100, 2, (330, 0, 65, 1)))
    ),
    SparsePrefillBackwardCase(s_q=2, h_q=8, s_kv=90, topk=70, indices="none", sinks="infinite", outputs="strided", sm_count=2),
)  # fmt: skip

SMOKE: tuple[SparsePrefillBackwardCase, ...] = tuple(dict.fromkeys([*_LARGE, *covers(VARIANTS, _small)]))


def corner_cases() -> Iterator[SparsePrefillBackwardCase]:
    """Yield the calls of models, of few tokens, and many more indices than rows."""
    for d_qk, h_q in product(HEAD_DIMS, (8, 64, 128)):
        yield SparsePrefillBackwardCase(s_q=2, h_q=h_q, d_qk=d_qk, s_kv=1800, topk=1024, sinks="drawn", sm_count=4)
        yield SparsePrefillBackwardCase(s_q=3, h_q=h_q, d_qk=d_qk, s_kv=32, topk=600, indices="mixed", lengths="drawn", sm_count=4)


OP_SUITES = OpSuites(VARIANTS, SMOKE, corner_cases)

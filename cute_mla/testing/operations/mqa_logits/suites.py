"""Suites of mqa_logits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, get_args

from ....spec.mqa_logits import HEAD_TILES, PAGE_SIZES, closed_variants
from ...suites.cover import Choice, Factors, Variant, covers
from ...suites.entries import OpSuites
from .case import KeyWindows, LogitsLayout, LogitsValues, MqaLogitsCase

_FEW_SMS = 1  # SMs of a device whose CTA takes all work items

# Features of a case, by factor. modes: whether logits are cleaned, and whether columns are relative, fewer than the keys or more.
_SHARED: Factors = {
    "values": get_args(LogitsValues),
    "keys": (1, 64, 65, 129, 300, 700),
    "outputs": ("allocated", "given", "strided", "odd", "far_requests"),
    "mode": ("clean", "unclean", "other_columns"),
    "sm_count": (None, _FEW_SMS),
}
_ROWS: Factors = {
    **_SHARED,
    "tokens": (1, 3, 4, 5, 9),
    "windows": ("causal", "whole", "random", "sequences", "edges", "empty"),
    "layout": ("packed", "strided", "far_q", "far_keys", "far_weights"),
}
_PAGES: Factors = {
    **_SHARED,
    "requests": (1, 2, 5),
    "tokens": (1, 2, 3, 5),
    "page_size": PAGE_SIZES,
    "lengths": ("full", "edges", "random", "empty"),
    "per_token": (False, True),
    "layout": get_args(LogitsLayout),
    "broken": (False, True),
}
_OF_CHUNKS: tuple[KeyWindows, ...] = ("causal", "edges", "near")  # all tiles of two chunks are scored, of one, or some of both
_OF_COLUMNS: tuple[tuple[int, KeyWindows], ...] = ((700, "near"), (300, "whole"))  # keys, of which a token sees more than 200
_WHOLE_ITEMS = ((8, 32), (4, 64))  # tokens of a work item, and heads
_HEADS = {32: (1, 8, 31, 32), 64: (33, 48, 63, 64)}


def _small(choice: Choice) -> MqaLogitsCase | None:
    """Return the case with these features; None if the values are not possible together."""
    drawn = dict(choice)
    mode, paged, rows = drawn.pop("mode"), "page_size" in choice, drawn["tokens"] * drawn.get("requests", 1)
    if drawn["outputs"] != "allocated" and drawn["values"] == "nan_keys":
        return None
    if rows < 2 and (drawn["outputs"] == "far_requests" or drawn["layout"] in ("far_q", "far_weights")):
        return None
    if drawn["layout"] in ("far_table", "aliased") and drawn["requests"] < 2:
        return None
    if drawn["layout"] == "far_keys" and drawn["keys"] < 2:
        return None
    if drawn.get("broken") and (drawn["lengths"] == "empty" or drawn["keys"] <= 2 * drawn["page_size"] or drawn["values"] == "normal"):
        return None
    if mode == "other_columns":
        drawn["columns"] = drawn["keys"] + 37 if paged else drawn["keys"] // 2 + 1
    drawn["clean"] = mode == "clean" or (mode == "other_columns" and paged)
    return MqaLogitsCase(**drawn)


VARIANTS = tuple(
    Variant(config.name, {}, {**(_PAGES if config.paged else _ROWS), "heads": _HEADS[config.head_tile]}) for config in closed_variants()
)


def _items() -> Iterator[MqaLogitsCase]:
    """Yield items by the numbers of their tokens and tiles, and more items than a CTA looks at together."""
    for tokens, heads in _WHOLE_ITEMS:
        # One row block, whole, over tiles whose pages are looked up in turns.
        yield MqaLogitsCase(requests=2, tokens=tokens // 2, keys=700, heads=heads, page_size=16, layout="far_table", sm_count=_FEW_SMS)
        # Tokens that see no key of a request that others see; every row of a tile on a far page.
        yield MqaLogitsCase(requests=5, tokens=tokens, keys=257, heads=heads, page_size=64, lengths="near", layout="far_keys")
        # Every number of tokens, and keys that end in every part of a tile.
        for few in range(1, tokens):
            yield MqaLogitsCase(tokens=tokens + few, keys=33 + 32 * few, heads=heads, windows="near", clean=False)
            yield MqaLogitsCase(tokens=few, keys=65, heads=heads, page_size=32, clean=False)
        # The last item of 33 of the first of two CTAs; more items than there is room for, all with columns to fill.
        shape: dict[str, Any] = {"keys": 65, "heads": heads, "sm_count": 2}
        yield MqaLogitsCase(tokens=64 * tokens + 1, windows="last", clean=False, **shape)
        yield MqaLogitsCase(requests=65, tokens=1, page_size=32, lengths="last", clean=False, **shape)
        yield MqaLogitsCase(tokens=18 * tokens, windows="random", **shape)
        # Chunks of which all tiles are scored, all are filled, or some; few columns to fill, in all numbers of a lane; far ones.
        for windows in _OF_CHUNKS:
            yield MqaLogitsCase(tokens=4, keys=700, heads=heads, windows=windows, outputs="far_requests")
        for keys in (150, 200, 250):
            yield MqaLogitsCase(tokens=4, keys=keys, heads=heads, windows="edges")
        # Fewer columns than a token sees keys, which lie behind as many or are the first.
        for keys, windows in _OF_COLUMNS:
            yield MqaLogitsCase(tokens=tokens, keys=keys, columns=200, heads=heads, windows=windows, clean=False)


_MORE: tuple[MqaLogitsCase, ...] = (
    # A prefill's windows over several row blocks and chunks, all of which one CTA takes; and items of which many see nothing.
    MqaLogitsCase(tokens=10, keys=1200, sm_count=_FEW_SMS, values="normal"),
    MqaLogitsCase(tokens=14, keys=400, heads=32, windows="edges", values="normal"),
    MqaLogitsCase(tokens=12, keys=1300, heads=32, windows="sequences", clean=False, outputs="given", sm_count=2),
    # Tokens that see none of an item's first tiles, whose columns are filled.
    MqaLogitsCase(tokens=12, keys=1300, windows="sequences", outputs="given", sm_count=_FEW_SMS),
    # A table that holds fewer keys than there are columns, and fewer columns than keys.
    MqaLogitsCase(requests=7, tokens=2, keys=100, page_size=64, columns=700, lengths="edges", heads=8, outputs="given"),
    MqaLogitsCase(requests=2, tokens=3, keys=300, page_size=16, columns=131, lengths="edges", outputs="given"),
    # Every token of a work item far, by weights and by logits, also the first one.
    *(
        MqaLogitsCase(tokens=2 * tokens, keys=65, heads=heads, windows="whole", layout="far_weights", outputs="far_requests")
        for tokens, heads in _WHOLE_ITEMS
    ),
    *(
        MqaLogitsCase(
            requests=2, tokens=tokens, keys=65, columns=300, heads=heads, page_size=32, layout="far_weights", outputs="far_requests"
        )
        for tokens, heads in _WHOLE_ITEMS
    ),
    # Tokens with lengths of their own, of which some see more keys than there are columns; items of them and one token more.
    *(
        MqaLogitsCase(
            requests=5,
            tokens=tokens + 1,
            keys=1100,
            columns=1000,
            heads=heads,
            page_size=64,
            lengths="edges",
            per_token=True,
            layout="far_table",
            outputs="strided",
            sm_count=_FEW_SMS,
        )
        for tokens, heads in _WHOLE_ITEMS
    ),
    *_items(),
    # No tokens, no keys, no columns.
    MqaLogitsCase(tokens=0),
    MqaLogitsCase(keys=0),
    MqaLogitsCase(keys=0, columns=70, clean=False, outputs="given"),
    MqaLogitsCase(requests=2, tokens=2, keys=0, page_size=64, columns=70, outputs="given"),
    MqaLogitsCase(requests=0, page_size=64),
)
SMOKE: tuple[MqaLogitsCase, ...] = tuple(dict.fromkeys([*_MORE, *covers(VARIANTS, _small)]))


def _grid() -> Iterator[MqaLogitsCase]:
    """Yield every number of heads, and lengths about the borders of tiles and pages, in all variants."""
    for heads in range(1, max(HEAD_TILES) + 1):
        yield MqaLogitsCase(heads=heads, tokens=3, keys=70)
        yield MqaLogitsCase(heads=heads, requests=2, tokens=2, keys=70, page_size=64)
    for keys, tokens in product((63, 127, 128, 255, 256, 257, 511, 513), (1, 2, 6)):
        yield MqaLogitsCase(tokens=tokens, keys=keys, heads=32, windows="edges", clean=False, outputs="given")
        yield MqaLogitsCase(tokens=tokens, keys=keys, requests=3, page_size=32, lengths="edges", values="normal")
    for tokens, per_token in product(range(1, 9), (False, True)):
        yield MqaLogitsCase(tokens=tokens, keys=200, requests=4, heads=32, page_size=64, lengths="edges", per_token=per_token)


OP_SUITES = OpSuites(VARIANTS, SMOKE, _grid)

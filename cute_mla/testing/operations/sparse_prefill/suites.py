"""Suites of sparse prefill."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from itertools import chain, count, product

from ....spec.dense_decode import TILE_ROWS
from ....spec.mla import ceil_div
from ....spec.sparse_prefill import HEAD_DIMS
from ....spec.split_plan import TILE_KEYS
from ...cases.base import Outputs
from ...cases.far import FAR_DIMENSIONS
from ...cases.tensors import ORDERED
from ...suites.cover import Choice, Factors, Variant, cover, lacks_far_rows, ramps
from ...suites.entries import OpSuites, SimulatorReduction
from .case import SparsePrefillCase

GRID_KEYS = ((128, 128), (256, 256), (512, 512), (592, 128), (1840, 256), (1592, 384), (1521, 512), (95, 128), (153, 256), (114, 384))
GRID_S_Q = (1, 62, 213)
GRID_H_Q = (64, 128)
MOSTLY_INVALID = ((32, 2048), (64, 8192))  # (s_kv, topk)
HEADS = (1, 3, 16, 48, 64, 96, 128)
TOPKS = (1, 63, 65, 2048)
# indexer_topk of the small cases of a variant in turn, topk at most: not asked for, between two tiles, and others. On Blackwell tiles
# before the bound, at it and behind it have code of their own. A thread compares each of its keys with the bound by an instruction of its
# own, so that the others advance by a step that meets many of them. Of mixed indices the first two tiles tell most.
INDEXER_TOPKS = (0, TILE_KEYS)
_OF_MIXED = (TILE_KEYS - 1,)
_BOUND_STEP = 11
# Numbers of indices, and of those of lse_indexer, where scores grow from tile to tile: all but one key of a tile lie before the bound. Of
# needles, which grow up to the third tile, each of the tiles lies elsewhere. Steps show nothing in the first tile, so there are two before.
_ORDERED_TOPKS = {"needles": (3 * TILE_KEYS, 2 * TILE_KEYS - 1), "steps": (4 * TILE_KEYS, 3 * TILE_KEYS - 1)}
SHORT_TILES = 128  # the simulated device runs cases of the grid with at most this many tiles whole

_MINUS_INF = float("-inf")

_RAGGED = ("ragged", 3, 2, "drawn")  # rows of the request's own: some requests have none, and some indices are valid only for a neighbour
_TILES = (140, 130)
# Features of a small case, by factor. With a small sm_count each group of CTAs processes many tokens.
_FACTORS: Factors = {
    "tokens": (  # form, requests, query tokens of each, numbers of indices that count
        ("single", 1, 7, "edges"),  # around a tile, beyond topk, negative; tokens with and without keys in sequence
        ("batched", 2, 2, None),
        _RAGGED,
        ("clipped", 3, 2, "zeros"),
    ),
    "rows": ((100, 65), _TILES),  # s_kv and topk
    "indices": ("valid", "mixed"),
    "sinks": ("none", "drawn", "infinite"),
    "values": ramps(),
    "kv_layout": ("packed", "padded_rows", "layers", "far"),
    "index_layout": ("packed", "odd", "far_requests", "far_tokens"),
    "q_layout": ("packed", "sliced", "heads_first", *FAR_DIMENSIONS),
    "outputs": ("allocated", "given", "strided", *FAR_DIMENSIONS),
    "empty_lse": (None, _MINUS_INF),
    "groups": (1, 3),  # of CTAs, each of which takes every so many tokens
}


def _settle(choice: Choice) -> Choice:
    """Return a choice with requests, groups and rows enough for what it has.

    The third of several requests lies far, of which a group takes some tokens first and others later. Masks and ordered values need tiles
    that are whole.
    """
    settled = dict(choice)
    if "far_requests" in (choice["q_layout"], choice["outputs"], choice["index_layout"]):
        settled["groups"] = 3
        if choice["tokens"][1] < 3:
            settled["tokens"] = _RAGGED
    if settled["tokens"][1] >= 3:
        settled["indices"] = "mixed"
    if settled["indices"] == "mixed" or choice["values"][0] in ORDERED:
        settled["rows"] = _TILES
    return settled


def _small(choice: Choice) -> SparsePrefillCase | None:
    """Return the small case with these features; None if the values are not possible together."""
    rest = {name: value for name, value in choice.items() if name not in ("tokens", "rows", "groups", "values")}
    values, scale = choice["values"]
    (form, batch, s_q, lengths), (s_kv, topk) = choice["tokens"], choice["rows"]
    layouts = (choice["q_layout"], choice["outputs"], choice["index_layout"])
    if batch < 3 and "far_requests" in layouts:
        return None
    if lacks_far_rows(layouts, choice["h_q"]):
        return None
    if form in ("ragged", "clipped") and choice["indices"] == "valid":
        return None  # only invalid indices tell where the rows of a request end
    if values in ORDERED and lengths not in ("edges", None):
        return None
    if values == "needles" and (lengths is not None or choice["indices"] != "valid" or choice["h_q"] < TILE_KEYS):
        return None  # each row has another needle
    if values in _ORDERED_TOPKS:
        s_kv = topk = _ORDERED_TOPKS[values][0]
    return SparsePrefillCase(
        form=form, batch=batch, s_q=s_q, lengths=lengths, s_kv=s_kv, topk=topk, values=values, softmax_scale=scale,
        sm_count=choice["groups"] * ceil_div(choice["h_q"], TILE_ROWS), **rest,
    )  # fmt: skip


def _variants() -> Iterator[Variant]:
    """Yield numbers of columns with heads in one CTA and in two."""
    for d_qk, two in product(HEAD_DIMS, (False, True)):
        factors: Factors = {**_FACTORS, "h_q": (68, 92, 96, 128) if two else (3, 12, 64)}
        if two:
            factors = {**factors, "q_layout": ("packed", *FAR_DIMENSIONS), "outputs": ("given", *FAR_DIMENSIONS)}
        yield Variant(f"{d_qk} {two}", {"d_qk": d_qk}, factors)


VARIANTS = tuple(_variants())


def _covers() -> Iterator[SparsePrefillCase]:
    """Yield small cases with every feature of every variant."""
    seen: set[object] = set()
    others = (1 + index % (2 * TILE_KEYS) for index in count(step=_BOUND_STEP))
    for variant, (d_qk, two) in zip(VARIANTS, product(HEAD_DIMS, (False, True)), strict=True):
        covered = cover(variant, _small, seen, _settle)
        bounds, of_mixed = chain(INDEXER_TOPKS, others), chain(_OF_MIXED, others)
        for case in covered:
            bound = next(of_mixed if case.indices == "mixed" else bounds)
            yield replace(case, indexer_topk=min(_ORDERED_TOPKS.get(case.values, (0, bound))[1], case.topk))
        yield SparsePrefillCase(  # a case of its own, since tokens without keys hide all other features
            d_qk=d_qk, s_q=2, h_q=66 if two else 7, s_kv=64, topk=70, indices="none", sinks="infinite",
            outputs="strided", empty_lse=_MINUS_INF, sm_count=2, indexer_topk=60,
        )  # fmt: skip


_FOUR_BYTE_ROWS: tuple[tuple[int, int, Outputs], ...] = ((576, 68, "even"), (576, 5, "given"), (512, 128, "given"), (512, 64, "even"))

# Cases whose size or values are what they test.
_LARGE: tuple[SparsePrefillCase, ...] = (
    # The heads of DeepSeek-V3.2.
    SparsePrefillCase(h_q=128, s_kv=1521, topk=512, sm_count=2),
    # Tokens of no, one and many tiles in sequence on one group of CTAs, of either kernel on Blackwell.
    *(
        SparsePrefillCase(
            s_q=len(lengths), h_q=h_q, s_kv=300, topk=400, lengths=lengths, indices="mixed", sinks="drawn", sm_count=sms, indexer_topk=130,
        )
        for h_q, sms, lengths in ((48, 1, (400, 0, 1, 400, 64, 0, 0, 65, 300, 400, 7, 129)), (68, 2, (400, 0, 1, 64, 0, 0, 65, 7, 129)))
    ),
    SparsePrefillCase(s_q=5, h_q=128, d_qk=512, s_kv=95, topk=128, lengths="zeros", sinks="drawn", outputs="strided", sm_count=4),
    SparsePrefillCase(s_q=2, h_q=1, d_qk=512, s_kv=40, topk=1, q_layout="sliced"),
    # Rows at multiples of 4 bytes, which Hopper takes, in every structure of kernel, over tokens of no, one and many tiles.
    *(
        SparsePrefillCase(
            s_q=5, h_q=h_q, d_qk=d_qk, s_kv=150, topk=140, lengths=(130, 64, 0, 140, 1), indices="mixed", q_layout="even",
            outputs=outputs, sm_count=2,
        )
        for d_qk, h_q, outputs in _FOUR_BYTE_ROWS
    ),
    SparsePrefillCase(s_q=2, h_q=8, s_kv=70, topk=63, sm_count=4),
    SparsePrefillCase(s_q=2, h_q=8, d_qk=512, s_kv=70, topk=64, q_layout="sliced", sm_count=4),
    SparsePrefillCase(batch=0, form="batched", h_q=64),
    # Mostly invalid indices.
    SparsePrefillCase(
        s_q=2, h_q=64, s_kv=32, topk=2048, lengths="drawn", empty_lse=_MINUS_INF, index_layout="odd", sm_count=2,
        indexer_topk=200,
    ),
    # The running maximum moves in every tile of a long loop, never after the first tile, or jumps at a few keys.
    SparsePrefillCase(h_q=128, s_kv=600, topk=384, values="rising", sm_count=2, indexer_topk=300),
    SparsePrefillCase(
        s_q=2, h_q=16, d_qk=512, s_kv=700, topk=600, values="falling", softmax_scale=0.1, sm_count=1, indexer_topk=600,
    ),
    SparsePrefillCase(h_q=128, s_kv=2000, topk=384, values="amplified", softmax_scale=64.0, sm_count=2, indexer_topk=320),
)  # fmt: skip

SMOKE: tuple[SparsePrefillCase, ...] = tuple(dict.fromkeys([*_LARGE, *_covers()]))


def grid() -> Iterator[SparsePrefillCase]:
    """Yield FlashMLA's sparse-prefill grid, plain and with all options."""
    for d_qk, h_q, s_q, (s_kv, topk) in product(HEAD_DIMS, GRID_H_Q, GRID_S_Q, GRID_KEYS):
        plain = SparsePrefillCase(s_q=s_q, h_q=h_q, d_qk=d_qk, s_kv=s_kv, topk=topk)
        yield plain
        yield _with_all_options(plain)


def _with_all_options(case: SparsePrefillCase) -> SparsePrefillCase:
    return replace(case, lengths="drawn", indices="mixed", sinks="infinite", indexer_topk=case.topk // 2 + 5)


def corner_cases() -> Iterator[SparsePrefillCase]:
    """Yield many more indices than rows, FlashMLA's amplified rows, and numbers of heads and indices that FlashMLA rejects."""
    for d_qk in HEAD_DIMS:
        case = SparsePrefillCase(d_qk=d_qk)
        yield from (replace(case, s_q=2, h_q=h_q, s_kv=s_kv, topk=topk) for (s_kv, topk), h_q in product(MOSTLY_INVALID, GRID_H_Q))
        yield replace(case, s_q=6, s_kv=100, topk=130, indices="none", sinks="infinite", form="batched")
        yield replace(case, s_q=8, s_kv=100, topk=130, lengths="zeros")
        yield replace(case, batch=5, form="ragged", s_q=3, s_kv=200, topk=130, indices="mixed", lengths="drawn", sinks="drawn")
        yield from (replace(case, s_q=3, h_q=h_q, s_kv=100, topk=65, indices="mixed", sinks="drawn") for h_q in HEADS)
        yield from (replace(case, s_q=2, s_kv=2046, topk=topk) for topk in TOPKS)
        for h_q in GRID_H_Q:
            long = replace(case, s_q=2, h_q=h_q, s_kv=4096, topk=2048)
            yield replace(long, values="amplified", softmax_scale=64.0)
            yield replace(long, values="rising")


# Long cases of 4,096 keys, with one and with several tokens per group of CTAs.
_LONG = (
    SparsePrefillCase(s_q=2, h_q=128, s_kv=8192, topk=4096, sm_count=2),
    SparsePrefillCase(s_q=2, h_q=64, d_qk=512, s_kv=8192, topk=4096),
    SparsePrefillCase(s_q=3, h_q=16, s_kv=6000, topk=4096, indices="mixed", sinks="drawn", sm_count=1),
)


_ALWAYS_WHOLE = frozenset({*SMOKE, *corner_cases(), *_LONG})


def _is_short(case: SparsePrefillCase) -> bool:
    return case.s_q == 1 or case.tiles <= SHORT_TILES


def _factors(case: SparsePrefillCase) -> tuple[Hashable, ...]:
    return case.d_qk, case.h_q, case.s_q, (case.s_kv, case.topk), case.indices


OP_SUITES = OpSuites(
    VARIANTS, SMOKE, lambda: [*corner_cases(), *_LONG, *grid()], SimulatorReduction(_ALWAYS_WHOLE.__contains__, _factors, _is_short)
)

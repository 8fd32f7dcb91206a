"""Suites of dense prefill."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, product
from typing import TypeVar

from ....spec.dense_prefill import HEAD_DIMS, head_dtypes
from ....spec.masked_prefill import DTYPE as MASKED_DTYPE
from ....spec.masked_prefill import HEAD_DIMS as MASKED_HEAD_DIMS
from ...cases.base import DTYPES
from ...cases.tensors import CLIFF_SCALE, ORDERED
from ...suites.cover import SPREAD_SCALE, STEPS_SCALE, Choice, Factors, Variant, cover, ramps
from ...suites.entries import OpSuites, SimulatorReduction
from .case import DensePrefillCase

GRID_LENGTHS = (1, 17, 64, 127, 128, 129, 257, 1000)
GRID_KV_HEADS = (1, 5)
GRID_GROUPS = (1, 4, 8)
# Half of the grid has as many keys as query tokens. In the other half the i-th length goes with this number of keys.
OTHER_KEYS = (64, 1, 300, 17, 129, 128, 65, 257)
SHORT_TILES = 100  # the simulated device runs cases of the grid with at most this many tiles whole

C = TypeVar("C", bound=DensePrefillCase)
KINDS = tuple((dtype, d_qk) for dtype in DTYPES for d_qk in HEAD_DIMS if dtype in head_dtypes(d_qk))

_MINUS_INF = float("-inf")

_KEY_TILE = 128  # keys of a tile of the kernels
# Several tiles, of rows of every warp, with needles at all of their keys, also in the last item of a CTA; too costly with many heads.
_LONG = ((1, 64), (0, 9), (128, 280))
# Neither query tokens nor keys, none of either, rows that attend to nothing; and more rows than one tile has.
_BEYOND_A_TILE = ((0, 0), (0, 70), (64, 0), (1, 1), (130, 52))
# The same of one CTA for results whose tokens or heads lie far, which are those behind the middle: a block without keys, and three with
# keys, since a CTA's last item, the one before it and all others are written by code of their own, which has its own for 8 of 16 rows.
_FAR_BLOCKS = {
    "far_tokens": ((130, 52), (0, 70), (17, 9), (0, 0), (18, 40), (64, 0), (19, 20)),
    "far_heads": ((17, 9), (0, 0), (18, 40), (64, 0), (19, 20)),
}
_MANY_HEADS = ((17, 17), (3, 9), (40, 150))
# Features of a small case, by factor. With a small sm_count each CTA processes many tiles.
_FACTORS: Factors = {
    "lengths": (
        ((9, 129), (65, 109)),  # prompts, and chunks of prompts behind a cached context
        _BEYOND_A_TILE,
        _LONG,
        _MANY_HEADS,
    ),
    "heads": ((1, 1), (1, 2), (2, 2)),  # KV heads, and query heads per KV head
    "causal": (False, True),
    "values": ramps(STEPS_SCALE / 2),  # two steps a key tile
    "ends": ("margins", "clipped"),
    "neighbours": ("finite", "nan"),
    "kv_layout": ("packed", "padded", "kvpacked", "heads_first", "far_tokens", "far_heads"),
    "q_layout": ("packed", "sliced", "heads_first", "far_tokens", "far_heads"),
    "outputs": ("allocated", "given", "strided", "far_tokens", "far_heads"),
    "empty_lse": (None, _MINUS_INF),
    "sm_count": (1, 2, 3, 5),
}


# Masks, in variants that have them.
_MASKS: Factors = {"mask": ("random", "blocks", "single", "edges"), "mask_layout": ("packed", "padded", "far_tokens")}


def _settle(choice: Choice) -> Choice:
    """Return a choice in which results that lie far are of one CTA, and of one head unless heads lie far."""
    if choice["outputs"] not in _FAR_BLOCKS:
        return choice
    heads = (1, 2) if "far_heads" in (choice["q_layout"], choice["outputs"]) else (1, 1)
    return {**choice, "lengths": _FAR_BLOCKS[choice["outputs"]], "heads": heads, "sm_count": 1}


def _small(choice: Choice) -> DensePrefillCase | None:
    """Return the small case with these features; None if the values are not possible together."""
    rest = {name: value for name, value in choice.items() if name not in ("heads", "values")}
    values, scale = choice["values"]
    h_kv, group = choice["heads"]
    masked = choice["causal"] and any(s_q > s_k > 0 for s_q, s_k in choice["lengths"][1::2])
    if "mask" in choice and choice["neighbours"] == "nan" and any(s_q > 0 for s_q, _ in choice["lengths"][1::2]):
        return None  # values of a sequence's own keys, seen or hidden, are finite
    if choice["neighbours"] == "nan" and masked:
        return None
    if "far_heads" in (choice["q_layout"], choice["outputs"]) and h_kv * group == 1:
        return None
    if choice["q_layout"] in _FAR_BLOCKS and choice["lengths"] not in (_BEYOND_A_TILE, *_FAR_BLOCKS.values()):
        return None
    if (choice["kv_layout"] == "far_heads" and h_kv == 1) or (h_kv > 1 and choice["lengths"] != _MANY_HEADS):
        return None
    if group > 1 and choice["lengths"] == _LONG:
        return None
    if values in ORDERED and (choice["lengths"][-1][1] <= _KEY_TILE or (values == "needles" and choice["lengths"] != _LONG)):
        return None
    return DensePrefillCase(values=values, softmax_scale=scale, h_kv=h_kv, group=group, **rest)


def _variants() -> Iterator[Variant]:
    """Yield every type with every number of columns, and once more where there are masks."""
    for dtype, d_qk in KINDS:
        fields = {"dtype": dtype, "d_qk": d_qk}
        yield Variant(f"{dtype} {d_qk}", fields, _FACTORS)
        if dtype == MASKED_DTYPE and d_qk in MASKED_HEAD_DIMS:
            yield Variant(f"masked {d_qk}", fields, {**_FACTORS, **_MASKS})


VARIANTS = tuple(_variants())


def _covers() -> Iterator[DensePrefillCase]:
    """Yield small cases with every feature of every variant."""
    seen: set[object] = set()
    variants = iter(VARIANTS)
    for dtype, d_qk in KINDS:
        yield from cover(next(variants), _small, seen, _settle)
        if dtype == MASKED_DTYPE and d_qk in MASKED_HEAD_DIMS:
            yield from cover(next(variants), _small, seen, _settle)
            # Of two parts of an item only the first has a visible tile.
            yield DensePrefillCase(dtype, d_qk=d_qk, lengths=((1, 4200), (0, 9), (2, 40)), mask="gaps", sm_count=1)
            yield replace(_staircase(dtype, d_qk), mask="random", sm_count=2)  # eight items at a time, of three blocks
            if d_qk == MASKED_HEAD_DIMS[0]:  # rows of V are cleared alike for all
                yield replace(_ends(dtype, d_qk), mask="single")
        yield _staircase(dtype, d_qk)
        if dtype == "bf16":  # rows are cleared alike in both types
            yield _ends(dtype, d_qk)


def _ends(dtype: str, d_qk: int) -> DensePrefillCase:
    """Return a case of sequences that end at every fourth key of a tile, each in front of keys and values full of NaN.

    A warp of Hopper's clears four rows at a time behind the last value. The first sequence has keys alone, and ends at row 0. The next with
    rows has three blocks of them on Blackwell, where 2 CTAs take eight items at a time, which begin and end at any of the three.
    """
    others = ((1, keys) for keys in range(5, _KEY_TILE, 4))
    lengths = tuple(chain.from_iterable((own, (0, 3)) for own in ((0, 9), (520, 1), *others)))
    return DensePrefillCase(dtype, d_qk=d_qk, lengths=lengths, neighbours="nan", sm_count=2)


def _staircase(dtype: str, d_qk: int) -> DensePrefillCase:
    """Return a causal case whose rows see every number of the keys of a tile. The last that a row sees outweighs all others.

    The first sequence has blocks of rows that see nothing, three or five of them, so that later rounds of items begin at any block. The
    second has more rows than one tile, with more key tiles. The next with rows shifts the numbers by half of the 16 rows that a warp of
    Hopper's tensor cores has; in the last but one only rows behind a tile see something.

    On Hopper a warp sums the blocks of sequences, one a lane, up to 12 for 3 CTAs. The first 17 have 12, and the last is sorted alone.
    Those with rows have the lanes where a step of the sum begins, 1, 3, 7 and 15: a sum that is too great in one of them alone loses its
    rows.
    """
    nothing = (0, 0)
    lengths = ((520, 1), (192, 192), nothing, (128, 136), *[nothing] * 3, (1, 1), *[nothing] * 7, (3, 1), (130, 1), (1, 1))
    return DensePrefillCase(dtype, d_qk=d_qk, lengths=lengths, causal=True, values="cliff", softmax_scale=CLIFF_SCALE, sm_count=3)


# Cases whose size is what they test.
_LARGE: tuple[DensePrefillCase, ...] = (
    DensePrefillCase(
        d_qk=128, lengths=((128, 128), (127, 127)), softmax_scale=SPREAD_SCALE, causal=True, kv_layout="heads_first", sm_count=2
    ),
    DensePrefillCase(d_qk=128, lengths=((63, 0), (17, 0)), causal=True),
    DensePrefillCase("fp16", lengths=((257, 257), (64, 65)), values="rising", causal=True, outputs="given", sm_count=2),
    DensePrefillCase("fp16", d_qk=128, lengths=((63, 257), (1, 128), (1, 127), (1, 65), (1, 63)), softmax_scale=SPREAD_SCALE, sm_count=2),
    # Neighbours full of NaN, behind the keys of a sequence and before them.
    DensePrefillCase(lengths=((65, 127), (64, 64), (129, 17), (0, 130)), neighbours="nan", outputs="strided", causal=True, sm_count=1),
    # All keys of a long loop on one CTA: the running maximum moves in every tile, or never after the first tile.
    DensePrefillCase(lengths=((1, 700), (1, 17), (64, 17), (1, 1)), values="falling", sm_count=1),
    DensePrefillCase("fp16", lengths=((65, 63), (0, 9), (1, 17)), h_kv=3, causal=True, q_layout="sliced", outputs="strided", sm_count=1),
    DensePrefillCase(lengths=()),
)

SMOKE: tuple[DensePrefillCase, ...] = tuple(dict.fromkeys([*_LARGE, *_covers()]))


def lengths_grid(case: type[C], kinds: Iterable[tuple[str, int]]) -> Iterator[C]:
    """Yield every length with as many and with other numbers of keys, causal and full, over numbers of heads. kinds: dtypes and columns."""
    heads = tuple(product(GRID_KV_HEADS, GRID_GROUPS))
    for (dtype, d_qk), causal, (h_kv, group), (s_q, other) in product(
        kinds, (True, False), heads, zip(GRID_LENGTHS, OTHER_KEYS, strict=True)
    ):
        for s_k in (s_q, other):
            yield case(dtype, d_qk=d_qk, lengths=((s_q, s_k),), h_kv=h_kv, group=group, causal=causal)


# All lengths in one call.
TOGETHER = tuple(zip((*GRID_LENGTHS, 0), (*OTHER_KEYS, 64), strict=True))


def corner_cases() -> Iterator[DensePrefillCase]:
    """Yield all lengths in one call, and long sequences, in every variant."""
    for (dtype, d_qk), causal in product(KINDS, (True, False)):
        case = DensePrefillCase(dtype, d_qk=d_qk, lengths=TOGETHER, causal=causal, outputs="strided")
        yield case
        yield DensePrefillCase(dtype, d_qk=d_qk, lengths=TOGETHER, causal=causal, q_layout="sliced", outputs="given", sm_count=3)
        yield DensePrefillCase(dtype, d_qk=d_qk, lengths=((257, 2300), (1, 4096)), causal=causal, values="rising", sm_count=2)
        if dtype == MASKED_DTYPE and d_qk in MASKED_HEAD_DIMS:
            for mask in ("random", "edges"):
                yield replace(case, mask=mask, mask_layout="padded" if causal else "packed")
            # Parts without a visible tile in front of others, behind them and between.
            yield DensePrefillCase(dtype, d_qk=d_qk, lengths=((258, 8200), (1, 30)), causal=causal, mask="gaps", sm_count=1)


_ALWAYS_WHOLE = frozenset({*SMOKE, *corner_cases()})


def _is_short(case: DensePrefillCase) -> bool:
    return case.tiles <= SHORT_TILES


def _factors(case: DensePrefillCase) -> tuple[Hashable, ...]:
    return case.dtype, case.d_qk, case.causal, case.h_kv, case.group, case.mask, case.lengths


OP_SUITES = OpSuites(
    VARIANTS,
    SMOKE,
    lambda: [*corner_cases(), *lengths_grid(DensePrefillCase, KINDS)],
    SimulatorReduction(_ALWAYS_WHOLE.__contains__, _factors, _is_short),
)

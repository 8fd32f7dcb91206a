"""Suites of the backward pass of dense prefill."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from itertools import chain, product

from ....spec.dense_prefill import HEAD_DIMS
from ...cases.tensors import CLIFF_SCALE, ORDERED
from ...suites.cover import STEPS_SCALE, Choice, Factors, Variant, cover
from ...suites.entries import OpSuites, SimulatorReduction
from ..dense_prefill.suites import SHORT_TILES, TOGETHER, lengths_grid
from .case import DensePrefillBackwardCase

_MINUS_INF = float("-inf")
_KEY_TILE = 128  # keys of a tile of the kernels
# More rows than one item of dq, more keys than one item of dk and dv, and neither of them a multiple of a tile.
_LONG = ((129, 200), (3, 9))
# More rows than one item has, first, since the statistics of a CTA's first item have code of their own, for 64 rows at a time; one row;
# neither query tokens nor keys, and none of either.
_BEYOND_A_TILE = ((190, 52), (1, 1), (0, 0), (0, 70), (64, 0))
_SORTED = ((1, 1), (63, 63), (64, 65), (65, 64), (520, 3), (2, 270))
_MANY_HEADS = ((17, 17), (3, 9), (40, 150))
# 16 powers of two from key to key: with more, lse is so great that its rounding shows in P.
_CLIFF_SCALE = CLIFF_SCALE * 16 / 130
_FAR = ("far_tokens", "far_heads")
# Features of a small case, by factor. With a small sm_count each CTA processes many items.
_FACTORS: Factors = {
    "lengths": (((9, 129), (65, 63)), _BEYOND_A_TILE, _LONG, _MANY_HEADS),
    "heads": ((1, 1), (1, 2), (2, 2)),  # KV heads, and query heads per KV head
    "causal": (False, True),
    "values": (("normal", None), ("opposed", 0.03), ("steps", STEPS_SCALE / 2), ("peaks", 0.1)),
    "ends": ("margins", "clipped"),
    "neighbours": ("finite", "nan"),
    "kv_layout": ("packed", "padded", "kvpacked", "heads_first", *_FAR),
    "q_layout": ("packed", "sliced", "heads_first", *_FAR),
    "dout_layout": ("packed", "sliced", "heads_first", *_FAR),
    "saved": ("given", "strided", *_FAR),
    "outputs": ("allocated", "given", "strided", "odd", *_FAR),
    "empty_lse": (None, _MINUS_INF),
    "sm_count": (1, 2, 3, 5),
}
_LAYOUTS = ("q_layout", "dout_layout", "saved", "outputs")


def _small(choice: Choice) -> DensePrefillBackwardCase | None:
    """Return the small case with these features; None if the values are not possible together."""
    rest = {name: value for name, value in choice.items() if name not in ("heads", "values")}
    values, scale = choice["values"]
    h_kv, group = choice["heads"]
    lengths = choice["lengths"]
    layouts = {choice[name] for name in _LAYOUTS}
    masked = choice["causal"] and any(s_q > s_k > 0 for s_q, s_k in lengths[1::2])
    if choice["neighbours"] == "nan" and masked:
        return None
    if "far_heads" in layouts and h_kv * group == 1:
        return None
    if layouts & set(_FAR) and lengths != _BEYOND_A_TILE:
        return None
    if "far_heads" in (choice["kv_layout"], choice["outputs"]) and h_kv == 1:
        return None
    if h_kv > 1 and lengths not in (_MANY_HEADS, _BEYOND_A_TILE):
        return None
    if group > 1 and lengths == _LONG:
        return None
    if values in ORDERED and max(s_k for _, s_k in lengths) <= _KEY_TILE:
        return None
    return DensePrefillBackwardCase(values=values, softmax_scale=scale, h_kv=h_kv, group=group, **rest)


VARIANTS = tuple(Variant(f"{d_qk} backward", {"d_qk": d_qk}, _FACTORS) for d_qk in HEAD_DIMS)


def _covers() -> Iterator[DensePrefillBackwardCase]:
    """Yield small cases with every feature of every variant."""
    seen: set[object] = set()
    for variant, d_qk in zip(VARIANTS, HEAD_DIMS, strict=True):
        yield from cover(variant, _small, seen)
        yield from _staircases(d_qk)
        yield _ends(d_qk)
        yield _left_out(d_qk)


def _staircases(d_qk: int) -> Iterator[DensePrefillBackwardCase]:
    """Yield causal cases whose rows see every number of the keys of a tile, and whose keys are seen by every number of rows.

    First with scores of which the last that a row sees outweighs all others, so that dv shows the mask, then with scores alike, of which
    each counts in dq and dk. In the second case the numbers of keys and of rows differ by 0, 8, 16 and 24, since comparisons with the
    diagonal are made for 32 keys at a time.

    The first case has blocks of rows that see nothing, and sequences of three or five blocks of rows or keys. Items are sorted
    four rounds at a time: the eight of 2 CTAs begin and end at any of the blocks, and the last ones are sorted alone. Of most sequences
    every block has results, mostly zeros, which cost no product. A warp of Hopper's sums the blocks of sequences, one a lane, up to eight:
    in the last lanes, behind empty ones, are sequences that no longer fit, and the last sequence is sorted alone.
    """
    rows, keys, nothing = (520, 0), (0, 520), (0, 0)
    many = ((192, 192), rows, (128, 136), (520, 1), keys, (3, 1), rows, (1, 520), keys, (1, 1), *[nothing] * 24, (3, 1), rows, (520, 1))
    case = DensePrefillBackwardCase(d_qk=d_qk, lengths=many, causal=True, sm_count=2)
    yield replace(case, values="cliff", softmax_scale=_CLIFF_SCALE, outputs="given")  # allocated ones are 0 before the call
    yield replace(case, lengths=((192, 192), (128, 136), (40, 56), (40, 64)))


def _ends(d_qk: int) -> DensePrefillBackwardCase:
    """Return a case of sequences that end at every fourth row and key of a tile, each in front of a row and a key full of NaN.

    A warp of Hopper's clears four rows at a time behind the last key or query. The row and the key are of sequences of their own, which
    have nothing else, since such a sequence costs no product. The first sequence has rows alone, and ends at key 0.
    """
    lengths = chain.from_iterable(((end, end), (1, 0), (0, 0), (0, 1)) for end in range(1, _KEY_TILE, 4))
    return DensePrefillBackwardCase(d_qk=d_qk, lengths=((9, 0), (0, 0), *lengths), neighbours="nan", sm_count=3)


def _left_out(d_qk: int) -> DensePrefillBackwardCase:
    """Return a call that says that sequences are shorter than they are. The first has keys alone, and ends at row 0."""
    lengths = ((0, 9), (150, 130), (9, 40), (70, 60))
    return DensePrefillBackwardCase(d_qk=d_qk, lengths=lengths, longest=128, sm_count=2)


# Cases whose size is what they test.
_LARGE: tuple[DensePrefillBackwardCase, ...] = (
    # A CTA sorts the items of four blocks at a time. On Hopper those of dq are of four sequences, of one with five, and of one with one;
    # all others are counted by three blocks of keys, or five of rows, of every sequence.
    DensePrefillBackwardCase(lengths=_SORTED, causal=True, sm_count=1),
    DensePrefillBackwardCase(d_qk=128, lengths=((63, 0), (17, 0)), causal=True),
    DensePrefillBackwardCase(lengths=((9, 0), (3, 0))),
    DensePrefillBackwardCase(lengths=((0, 17), (0, 130))),
    # Neighbours full of NaN, behind the tokens of a sequence and before them.
    DensePrefillBackwardCase(
        lengths=((65, 127), (64, 64), (129, 17), (0, 130)), neighbours="nan", outputs="strided", causal=True, sm_count=1
    ),
    DensePrefillBackwardCase(d_qk=128, lengths=((50, 70), (9, 9), (17, 3)), neighbours="nan", outputs="given", sm_count=1),
    DensePrefillBackwardCase(lengths=((65, 63), (0, 9), (1, 17)), h_kv=3, causal=True, q_layout="sliced", outputs="odd", sm_count=1),
    DensePrefillBackwardCase(lengths=()),
    # Rows whose lse is infinite, among others.
    DensePrefillBackwardCase(lengths=((70, 140), (9, 30)), group=2, causal=True, holes=True, empty_lse=_MINUS_INF, sm_count=2),
    DensePrefillBackwardCase(d_qk=128, lengths=((70, 90),), holes=True, sm_count=1),
    # The call says that sequences are shorter than they are. Tiles of dk and dv end at the last row that counts, within a tile.
    DensePrefillBackwardCase(lengths=((300, 210), (60, 70), (129, 200)), causal=True, longest=128, outputs="given", sm_count=2),
    DensePrefillBackwardCase(d_qk=128, lengths=((9, 40),), longest=0),
)

SMOKE: tuple[DensePrefillBackwardCase, ...] = tuple(dict.fromkeys([*_LARGE, *_covers()]))


def corner_cases() -> Iterator[DensePrefillBackwardCase]:
    """Yield all lengths in one call, in every variant, and long sequences."""
    for d_qk, causal in product(HEAD_DIMS, (True, False)):
        case = DensePrefillBackwardCase(d_qk=d_qk, lengths=TOGETHER, causal=causal, outputs="strided")
        yield case
        yield replace(case, q_layout="sliced", outputs="odd", sm_count=3)
        yield replace(case, lengths=((257, 1100), (1024, 129)), outputs="allocated", sm_count=2)


_ALWAYS_WHOLE = frozenset({*SMOKE, *corner_cases()})


def _is_short(case: DensePrefillBackwardCase) -> bool:
    return case.tiles <= SHORT_TILES


def _factors(case: DensePrefillBackwardCase) -> tuple[Hashable, ...]:
    return case.d_qk, case.causal, case.h_kv, case.group, case.lengths


OP_SUITES = OpSuites(
    VARIANTS,
    SMOKE,
    lambda: [*corner_cases(), *lengths_grid(DensePrefillBackwardCase, product(("bf16",), HEAD_DIMS))],
    SimulatorReduction(_ALWAYS_WHOLE.__contains__, _factors, _is_short),
)

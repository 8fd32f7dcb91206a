"""Suites of dense prefill."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import partial
from itertools import product

from ...spec.dense_prefill import HEAD_DIMS
from ..cases.base import DTYPES
from ..cases.dense_prefill import BLOCK, DensePrefillCase
from .cover import RAMPS, Choice, Factors, cover
from .entries import OpSuites, SimulatorReduction

GRID_LENGTHS = (1, 17, 64, 127, 128, 129, 257, 1000)
GRID_KV_HEADS = (1, 5)
GRID_GROUPS = (1, 4, 8)
# Half of the grid has as many keys as query tokens. In the other half the i-th length goes with this number of keys.
OTHER_KEYS = (64, 1, 300, 17, 129, 128, 65, 257)
SHORT_TILES = 100  # the simulated device runs cases of the grid with at most this many tiles whole

_MINUS_INF = float("-inf")

# Features of a small case, by factor. With a small sm_count each CTA processes many tiles.
_FACTORS: Factors = {
    "lengths": (
        ((65, 65), (17, 129)),  # prompts, and chunks of prompts behind a cached context
        ((0, 0), (130, 20), (0, 70), (1, 1), (64, 0)),  # no query tokens, no keys, neither, and rows that attend to nothing
        ((3, 300), (1, 64)),  # several tiles
        ((127, 63), (17, 17)),
    ),
    "heads": ((1, 1), (2, 2)),  # KV heads, and query heads per KV head
    "causal": (False, True),
    "values": RAMPS,
    "ends": ("margins", "clipped"),
    "neighbours": ("finite", "nan"),
    "kv_layout": ("packed", "padded", "kvpacked", "heads_first", "far_tokens", "far_heads"),
    "q_layout": ("packed", "sliced", "heads_first", "far_tokens", "far_heads"),
    "outputs": ("allocated", "given", "strided", "far_tokens", "far_heads"),
    "empty_lse": (None, _MINUS_INF),
    "sm_count": (1, 3),
}


def _small(dtype: str, d_qk: int, choice: Choice) -> DensePrefillCase | None:
    """Return the small case with these features; None if the values are not possible together."""
    rest = {name: choice[name] for name in _FACTORS if name not in ("heads", "values")}
    values, scale = choice["values"]
    h_kv, group = choice["heads"]
    masked = choice["causal"] and any(s_q > s_k > 0 for s_q, s_k in choice["lengths"][1::2])
    if (choice["elements"] and "odd" not in (choice["q_layout"], choice["outputs"])) or (choice["neighbours"] == "nan" and masked):
        return None
    if "far_heads" in (choice["q_layout"], choice["outputs"]) and h_kv * group == 1:
        return None
    if choice["kv_layout"] == "far_heads" and h_kv == 1:
        return None
    if values == "rising" and choice["lengths"][0][1] < 4 * BLOCK:
        return None
    return DensePrefillCase(dtype, d_qk=d_qk, values=values, softmax_scale=scale, h_kv=h_kv, group=group, **rest)


def _covers() -> Iterator[DensePrefillCase]:
    """Yield small cases with every feature of every variant."""
    seen: set[object] = set()
    for dtype, d_qk, elements in product(DTYPES, HEAD_DIMS, (False, True)):
        factors: Factors = {**_FACTORS, "elements": (elements,)}
        if elements:
            layouts = {"q_layout": ("odd", "far_tokens", "far_heads"), "outputs": ("odd", "strided", "far_tokens", "far_heads")}
            factors = {**factors, **layouts}
        yield from cover(f"{dtype} {d_qk} {elements}", factors, partial(_small, dtype, d_qk), seen)


# Cases whose size is what they test.
_LARGE: tuple[DensePrefillCase, ...] = (
    DensePrefillCase(d_qk=128, lengths=((128, 128), (127, 127)), h_kv=2, causal=True, kv_layout="heads_first", sm_count=2),
    DensePrefillCase(d_qk=128, lengths=((63, 0), (17, 0)), causal=True),
    DensePrefillCase("fp16", lengths=((257, 257), (64, 127)), causal=True, outputs="given", sm_count=2),
    DensePrefillCase("fp16", d_qk=128, lengths=((63, 257), (1, 129), (1, 128), (1, 127)), sm_count=2),
    # Neighbours full of NaN, behind the keys of a sequence and before them.
    DensePrefillCase(
        lengths=((65, 127), (64, 64), (129, 17), (0, 130), (1, 1)), neighbours="nan", outputs="strided", causal=True, sm_count=1
    ),
    # All keys of a long loop on one CTA: the running maximum moves in every tile, or never after the first tile.
    DensePrefillCase(lengths=((64, 1000), (1, 700)), values="falling", group=2, sm_count=1),
    DensePrefillCase("fp16", d_qk=128, lengths=((129, 600),), values="rising", causal=True, softmax_scale=0.3, sm_count=1),
    DensePrefillCase("fp16", lengths=((65, 63), (0, 9), (1, 17)), h_kv=3, q_layout="even", outputs="strided", sm_count=1),
    DensePrefillCase(lengths=()),
)

SMOKE: tuple[DensePrefillCase, ...] = tuple(dict.fromkeys([*_LARGE, *_covers()]))


def grid() -> Iterator[DensePrefillCase]:
    """Yield every length with as many and with other numbers of keys, causal and full, over numbers of heads, in every variant with TMA."""
    heads = tuple(product(GRID_KV_HEADS, GRID_GROUPS))
    for dtype, d_qk, causal, (h_kv, group), (s_q, other) in product(
        DTYPES, HEAD_DIMS, (True, False), heads, zip(GRID_LENGTHS, OTHER_KEYS, strict=True)
    ):
        for s_k in (s_q, other):
            yield DensePrefillCase(dtype, d_qk=d_qk, lengths=((s_q, s_k),), h_kv=h_kv, group=group, causal=causal)


# All lengths in one call.
TOGETHER = tuple(zip((*GRID_LENGTHS, 0), (*OTHER_KEYS, 64), strict=True))


def corner_cases() -> Iterator[DensePrefillCase]:
    """Yield all lengths in one call, and long sequences, in every variant."""
    for dtype, d_qk, causal in product(DTYPES, HEAD_DIMS, (True, False)):
        case = DensePrefillCase(dtype, d_qk=d_qk, lengths=TOGETHER, causal=causal, outputs="strided")
        yield case
        yield DensePrefillCase(dtype, d_qk=d_qk, lengths=TOGETHER, causal=causal, q_layout="odd", outputs="odd", sm_count=3)
        yield DensePrefillCase(dtype, d_qk=d_qk, lengths=((257, 2300), (1, 4096)), causal=causal, values="rising", sm_count=2)


def full_cases() -> list[DensePrefillCase]:
    """Return every case of the full suite once."""
    return list(dict.fromkeys([*SMOKE, *corner_cases(), *grid()]))


_ALWAYS_WHOLE = frozenset({*SMOKE, *corner_cases()})


def _runs_whole(case: DensePrefillCase) -> bool:
    return case.tiles <= SHORT_TILES or case in _ALWAYS_WHOLE


def _factors(case: DensePrefillCase) -> tuple[Hashable, ...]:
    return case.dtype, case.d_qk, case.causal, case.h_kv, case.group, case.lengths


OP_SUITES = OpSuites(SMOKE, full_cases, SimulatorReduction(_runs_whole, _factors))

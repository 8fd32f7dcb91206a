"""Suites of dense prefill."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import product

from ...spec.dense_prefill import HEAD_DIMS
from ..cases.base import DTYPES
from ..cases.dense_prefill import DensePrefillCase
from .entries import OpSuites, SimulatorReduction

GRID_LENGTHS = (1, 17, 64, 127, 128, 129, 257, 1000)
GRID_KV_HEADS = (1, 5)
GRID_GROUPS = (1, 4, 8)
# Half of the grid has as many keys as query tokens. In the other half the i-th length goes with this number of keys.
OTHER_KEYS = (64, 1, 300, 17, 129, 128, 65, 257)
SHORT_TILES = 100  # the simulated device runs cases of the grid with at most this many tiles whole

_MINUS_INF = float("-inf")

# With a small sm_count each CTA processes many tiles.
SMOKE: tuple[DensePrefillCase, ...] = (
    # Calls of serving engines: prompts, and chunks of prompts behind a cached context, causal.
    DensePrefillCase(lengths=((129, 129), (64, 200)), h_kv=2, causal=True, outputs="given"),
    DensePrefillCase("fp16", d_qk=128, lengths=((65, 65), (17, 257)), group=4, causal=True, kv_layout="kvpacked", outputs="given"),
    # Chunks of a context that all queries attend to.
    DensePrefillCase("fp16", lengths=((127, 257), (64, 63)), h_kv=2, kv_layout="kvpacked", outputs="strided", empty_lse=_MINUS_INF),
    DensePrefillCase(d_qk=128, lengths=((128, 128), (128, 128)), h_kv=3, kv_layout="heads_first", sm_count=2),
    # Sequences without query tokens, without keys, without either, and with rows that attend to nothing; many tiles on one CTA.
    DensePrefillCase(
        lengths=((0, 0), (130, 20), (0, 70), (1, 1), (64, 0), (17, 63), (0, 0), (129, 128), (1, 257), (0, 65)), group=2, causal=True,
        outputs="given", sm_count=1,
    ),
    DensePrefillCase(
        "fp16", d_qk=128, lengths=((64, 0), (200, 65), (0, 127), (3, 257), (0, 0), (127, 1)), group=3, causal=True,
        empty_lse=_MINUS_INF, outputs="strided", sm_count=2,
    ),
    DensePrefillCase("fp16", lengths=((1, 0), (0, 300), (65, 0), (0, 0)), group=5, outputs="given", empty_lse=_MINUS_INF, sm_count=3),
    DensePrefillCase(d_qk=128, lengths=((63, 0), (17, 0)), causal=True),
    # Every width of access to Q and out, with every dtype and both numbers of columns.
    DensePrefillCase(lengths=((65, 129), (1, 64), (63, 17)), h_kv=2, q_layout="odd", outputs="odd", causal=True, sm_count=2),
    DensePrefillCase("fp16", lengths=((129, 127), (0, 9), (17, 130), (1, 17)), group=2, q_layout="even", outputs="strided", sm_count=1),
    DensePrefillCase(d_qk=128, lengths=((257, 128), (17, 64)), q_layout="heads_first", outputs="odd", kv_layout="padded", sm_count=1),
    DensePrefillCase(
        "fp16", d_qk=128, lengths=((40, 65), (130, 140)), h_kv=2, group=2, causal=True, q_layout="odd", kv_layout="padded", sm_count=3,
    ),
    DensePrefillCase("fp16", lengths=((130, 65), (17, 20)), h_kv=3, q_layout="sliced", outputs="given", kv_layout="heads_first"),
    # Neighbours full of NaN, behind the keys of a sequence and before them; offsets that the kernel clips.
    DensePrefillCase(
        lengths=((65, 127), (64, 64), (129, 17), (0, 130), (1, 1)), group=2, neighbours="nan", outputs="strided", causal=True, sm_count=1,
    ),
    DensePrefillCase("fp16", d_qk=128, lengths=((130, 1), (17, 129), (64, 63)), neighbours="nan", outputs="given", sm_count=2),
    DensePrefillCase(d_qk=128, lengths=((65, 100), (0, 64), (20, 30)), h_kv=2, ends="clipped", causal=True, outputs="strided"),
    # The running maximum moves in every tile of a long loop, never after the first tile, or jumps at a few keys.
    DensePrefillCase(lengths=((64, 1000), (1, 700)), values="falling", group=2, sm_count=1),
    DensePrefillCase("fp16", d_qk=128, lengths=((257, 600),), values="rising", causal=True, softmax_scale=0.3, sm_count=1),
    DensePrefillCase(d_qk=128, lengths=((129, 700), (65, 300)), h_kv=2, values="peaks", sm_count=2),
    DensePrefillCase(lengths=()),
)  # fmt: skip


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

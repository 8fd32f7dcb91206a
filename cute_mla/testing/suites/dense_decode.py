"""Suites of dense decode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ...spec.dense_decode import FP8, FP8_CACHE, LATENT
from ...spec.split_plan import INVARIANT_SPLIT_TILES, TILE_KEYS
from ..cases.base import DTYPES
from ..cases.dense_decode import DenseDecodeCase
from .entries import OpSuites, SimulatorReduction

GRID_BATCH = (1, 2, 6, 64)
GRID_S_Q = (1, 2, 4)
GRID_S_K = (20, 140, 4096)
GRID_H_Q = (1, 3, 9, 63, 64, 126, 128)
GRID_H_KV = (1, 2, 3, 8)
GRID_TYPES = (*((dtype, LATENT) for dtype in DTYPES), *((dtype, FP8_CACHE) for dtype in DTYPES), ("bf16", FP8))

_TWO_SPLITS = INVARIANT_SPLIT_TILES * TILE_KEYS + TILE_KEYS  # keys of a request that a batch-invariant call splits in two


def with_fp8(case: DenseDecodeCase, operands: str) -> DenseDecodeCase:
    """Return the case with e4m3 operands. The caller passes out of an fp16 case, since the call would allocate bf16."""
    given = operands == FP8 and case.dtype != "bf16" and case.outputs == "allocated"
    return replace(case, operands=operands, outputs="given" if given else case.outputs)


_SMOKE_16_BITS: tuple[DenseDecodeCase, ...] = (
    # A single request split over all SMs: many splits, and clusters of two CTAs.
    DenseDecodeCase(s_k=4096, h_q=128),
    # Many short requests, with a precomputed plan.
    DenseDecodeCase("fp16", batch=64, s_k=20, h_q=64, varlen=True, metadata="tensors"),
    # Several KV heads, few and many query heads per KV head, every page size, several query tokens.
    DenseDecodeCase(batch=6, s_q=2, s_k=140, h_q=63, h_kv=3, page_size=16, varlen=True, causal=True),
    DenseDecodeCase("fp16", batch=2, s_q=4, s_k=140, h_q=126, h_kv=2, page_size=32, causal=True),
    DenseDecodeCase(batch=6, s_q=4, s_k=20, h_q=1, page_size=128, varlen=True, causal=True, zero_lengths=True),
    DenseDecodeCase("fp16", batch=2, s_k=140, h_q=3, h_kv=3, cache_layout="heads_first", outputs="odd"),
    DenseDecodeCase(batch=2, s_q=2, s_k=140, h_q=9, causal=True, q_layout="odd", outputs="strided"),
    DenseDecodeCase(batch=2, s_q=4, s_k=140, h_q=64, h_kv=8, causal=True, cache_layout="layers", metadata="tensors"),
    DenseDecodeCase("fp16", batch=2, s_q=3, s_k=140, h_q=128, h_kv=8, page_size=16, cache_layout="padded_rows", outputs="given"),
    # A request that a batch-invariant call splits, beside one that it does not split, on a device with another number of SMs.
    DenseDecodeCase(batch=2, lengths=(_TWO_SPLITS + 17, 100), page_size=128, batch_invariant=True, metadata="tensors", sm_count=78),
    # Requests and rows without keys, and lengths around a tile; one CTA processes all of them.
    DenseDecodeCase(
        "fp16", batch=6, s_q=4, lengths=(1, 0, 3, 63, 64, 65), causal=True, empty_lse=float("-inf"), outputs="given", sm_count=1
    ),
    DenseDecodeCase(batch=0, h_q=64),
    # The running maximum moves in every tile of a long loop, never after the first tile, or jumps at a few keys.
    DenseDecodeCase(batch=2, s_k=1100, h_q=64, values="rising", sm_count=2),
    DenseDecodeCase("fp16", s_k=1100, values="falling", sm_count=3),
    DenseDecodeCase(batch=2, s_q=2, s_k=300, h_q=128, values="peaks", softmax_scale=0.1, q_layout="even"),
    # Pages beyond 2^31 elements.
    DenseDecodeCase(batch=2, s_k=200, varlen=True, cache_layout="far"),
    # Decode batches of serving engines: TP8, multi-token prediction without TP, and one long request among short ones.
    DenseDecodeCase(batch=8, s_k=700, varlen=True, q_layout="sliced", cache_layout="layers", outputs="given"),
    DenseDecodeCase(batch=4, s_q=2, s_k=300, h_q=128, varlen=True, causal=True, q_layout="heads_first"),
    DenseDecodeCase("fp16", batch=4, s_q=4, lengths=(464, 4511, 173, 169), page_size=32, causal=True, metadata="tensors"),
)


# Variants and small pages that the cases above with one KV head leave out.
_MORE_FP8 = (
    DenseDecodeCase("fp16", batch=2, s_k=300, h_q=128, varlen=True, outputs="given"),
    DenseDecodeCase("fp16", batch=2, s_q=2, s_k=140, h_q=9, page_size=16, causal=True, q_layout="odd", outputs="odd"),
)
_WITH_FP8 = (*(case for case in _SMOKE_16_BITS if case.h_kv == 1), *_MORE_FP8)

SMOKE = (*_SMOKE_16_BITS, *(with_fp8(case, operands) for operands in (FP8_CACHE, FP8) for case in _WITH_FP8))


def _heads() -> Iterator[tuple[int, int]]:
    return ((h_q, h_kv) for h_q, h_kv in product(GRID_H_Q, GRID_H_KV) if h_q % h_kv == 0)


def grid(dtype: str, operands: str = LATENT) -> list[DenseDecodeCase]:
    """Return FlashMLA's dense-decode grid; with an e4m3 cache, its cases with one KV head."""
    factors = product(GRID_BATCH, GRID_S_Q, GRID_S_K, _heads(), (False, True), (False, True))
    cases = [
        DenseDecodeCase(dtype, batch=batch, s_q=s_q, s_k=s_k, h_q=h_q, h_kv=h_kv, varlen=varlen, causal=causal)
        for batch, s_q, s_k, (h_q, h_kv), varlen, causal in factors
    ]
    return cases if operands == LATENT else [with_fp8(case, operands) for case in cases if case.h_kv == 1]


def zero_length_cases() -> list[DenseDecodeCase]:
    """Return FlashMLA's large case with about half of the requests empty, and small cases like it."""
    large = [
        DenseDecodeCase(d, batch=128, s_q=2, s_k=4096, h_q=128, varlen=True, causal=c, zero_lengths=True) for d, c in _types_and_masks()
    ]
    small = [
        DenseDecodeCase(d, batch=batch, s_q=2, s_k=140, h_q=h_q, varlen=True, causal=c, zero_lengths=True)
        for batch, h_q, (d, c) in product((1, 6), (9, 128), _types_and_masks())
    ]
    return small + large


def _types_and_masks() -> Iterator[tuple[str, bool]]:
    return product(DTYPES, (False, True))


def full_cases() -> list[DenseDecodeCase]:
    """Return every case of the full suite once."""
    return list(dict.fromkeys([*SMOKE, *(case for types in GRID_TYPES for case in grid(*types)), *zero_length_cases()]))


def _runs_whole(case: DenseDecodeCase) -> bool:
    in_bf16_grid = case.dtype == "bf16" and case.batch <= 6 and case.s_k <= 140
    return case in _ALWAYS_WHOLE or (in_bf16_grid and case.batch > 0)


# The smoke cases, and a few cases of 4,096 keys: one and several row tiles, one and several KV heads, an odd number of heads.
_ALWAYS_WHOLE = frozenset(
    {
        *SMOKE,
        DenseDecodeCase(s_k=4096, h_q=64),
        DenseDecodeCase(s_q=2, s_k=4096, h_q=128, causal=True),
        DenseDecodeCase("fp16", s_k=4096, h_q=128),
        DenseDecodeCase("fp16", s_q=4, s_k=4096, h_q=9, h_kv=3, causal=True),
        DenseDecodeCase(batch=2, s_q=4, s_k=4096, h_q=63, varlen=True, causal=True),
        DenseDecodeCase(s_k=4096, h_q=64, h_kv=8, varlen=True),
        *(DenseDecodeCase(s_k=4096, h_q=h_q, operands=operands) for h_q in (16, 128) for operands in (FP8_CACHE, FP8)),
    }
)


def _factors(case: DenseDecodeCase) -> tuple[str | int | bool | tuple[int, int], ...]:
    heads = (case.h_q, case.h_kv)
    return case.dtype, case.operands, case.batch, case.s_q, case.s_k, heads, case.varlen, case.causal, case.zero_lengths


OP_SUITES = OpSuites(SMOKE, full_cases, SimulatorReduction(_runs_whole, _factors, lambda case: "fp16" if case.dtype == "fp16" else "large"))

"""Suites of sparse decode."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from itertools import product

from ...spec.sparse_decode import QUERY_AND_CACHE
from ...spec.split_plan import INVARIANT_SPLIT_TILES, TILE_KEYS
from ..cases.sparse_decode import Pool, SparseDecodeCase
from .entries import OpSuites, SimulatorReduction

GRID_BATCH = (4, 74, 321)
GRID_S_Q = (1, 3)
GRID_H_Q = (64, 128)
GRID_POOLS = tuple(
    Pool(s_k, topk, page_size)
    for s_k, topk, page_sizes in ((512, 64, (2, 64, 69)), (1024, 576, (2, 61)), (2046, 2048, (2, 64, 576)))
    for page_size in page_sizes
)
HEADS = (1, 3, 8, 16, 48, 64, 96, 128)
TOPKS = (1, 63, 65, 2048)

_SPLIT_KEYS = INVARIANT_SPLIT_TILES * TILE_KEYS  # keys after which a batch-invariant call splits a request

# Cases whose tokens may have a single key use scales that are powers of two: see _exact_scales.
SMOKE: tuple[SparseDecodeCase, ...] = (
    # A single token split over all SMs: many splits.
    SparseDecodeCase(h_q=128, main=Pool(4096, 2048), sinks="drawn"),
    # DeepSeek-V4's two caches, one of all tokens and one of compressed tokens, with a precomputed plan.
    SparseDecodeCase(
        cache="fp8_584", batch=2, s_q=3, h_q=64, main=Pool(512, 64, 64, "drawn"), extra=Pool(1024, 576, 61, "drawn"),
        indices="mixed", sinks="drawn", metadata="tensors",
    ),
    SparseDecodeCase(
        cache="fp8_584", batch=6, s_q=2, h_q=16, main=Pool(256, 128, 576, "zeros"), extra=Pool(512, 200, 2, "zeros"),
        cache_layout="layers", outputs="given",
    ),
    # Every format with every width of access, lengths around a tile, and invalid indices of every kind.
    SparseDecodeCase(
        cache="latent", batch=7, s_q=2, h_q=48, main=Pool(200, 65, 69, "edges"), indices="mixed", sinks="infinite",
        outputs="strided",
    ),
    SparseDecodeCase("fp16", cache="latent", batch=5, h_q=96, main=Pool(128, 63, 61), indices="mixed", q_layout="odd", outputs="given"),
    # Pairs of CTAs that convert a tile together.
    SparseDecodeCase("fp16", cache="latent", batch=3, h_q=128, main=Pool(128, 100, 61)),
    SparseDecodeCase(
        cache="latent", batch=2, s_q=2, h_q=80, main=Pool(300, 200), extra=Pool(100, 70, 1), indices="mixed", sinks="drawn"
    ),
    SparseDecodeCase(batch=3, s_q=2, h_q=1, main=Pool(40, 1, 1), power_of_two=True, sinks="drawn", outputs="odd"),
    SparseDecodeCase(
        cache="fp8_584", batch=5, s_q=2, h_q=3, main=Pool(200, 130, 2), indices="mixed", cache_layout="tight", index_layout="odd",
        outputs="odd",
    ),
    SparseDecodeCase(batch=4, s_q=3, h_q=96, main=Pool(300, 65, 64), cache_layout="padded_rows", index_layout="odd", sinks="infinite"),
    # Tokens without a single key.
    SparseDecodeCase(
        cache="latent", batch=2, s_q=2, h_q=8, main=Pool(100, 65), extra=Pool(64, 70, 1), indices="none", sinks="drawn",
        q_layout="odd", empty_lse=float("-inf"),
    ),
    SparseDecodeCase(cache="fp8_584", batch=0, h_q=64),
    # A request that a batch-invariant call splits inside its second cache, beside one that it does not split.
    SparseDecodeCase(
        batch=2, main=Pool(5000, _SPLIT_KEYS // 2 + 4, 64, (_SPLIT_KEYS // 2 + 4, 37)),
        extra=Pool(5000, _SPLIT_KEYS // 2 + 77, 69, (_SPLIT_KEYS // 2 + 77, 63)),
        batch_invariant=True, metadata="tensors", sinks="drawn", sm_count=78,
    ),
    # Lengths of both caches at their edges; one CTA processes all requests.
    SparseDecodeCase(
        batch=7, h_q=48, main=Pool(200, 130, 64, "edges"), extra=Pool(100, 70, 61, "edges"), power_of_two=True, indices="mixed",
        sinks="drawn", outputs="given", empty_lse=float("-inf"), sm_count=1,
    ),
    # The running maximum moves in every tile of a long loop, never after the first tile, or jumps at a few keys.
    SparseDecodeCase(batch=2, h_q=64, main=Pool(1100, 1100), values="rising", sm_count=2),
    SparseDecodeCase("fp16", cache="latent", main=Pool(1100, 1100), values="falling", sm_count=3),
    SparseDecodeCase(cache="fp8_584", batch=2, s_q=2, h_q=128, main=Pool(700, 300), values="peaks", softmax_scale=0.1, q_layout="even"),
    # Scales that need fp32, scales of all magnitudes, and pages beyond 2^32 bytes.
    SparseDecodeCase(main=Pool(600, 576, 576), values="coherent"),
    SparseDecodeCase(batch=2, h_q=8, main=Pool(512, 200, 61), values="spread", cache_layout="far", q_layout="sliced"),
    # A decode batch of a serving engine: TP8 with multi-token prediction, scales as FlashMLA's quantiser makes them.
    SparseDecodeCase(
        batch=6, s_q=2, main=Pool(700, 448, 64, "zeros"), power_of_two=True, cache_layout="layers", q_layout="heads_first",
        outputs="given", metadata="tensors",
    ),
)  # fmt: skip


def grid() -> Iterator[SparseDecodeCase]:
    """Yield FlashMLA's sparse-decode grid: every pair of caches and every single cache, plain and with all options.

    The 16-bit cache, which FlashMLA does not support, has the part of the grid with one cache.
    """
    shapes = list(product(GRID_BATCH, GRID_S_Q, GRID_H_Q))
    for (dtype, cache), (batch, s_q, h_q), main in product(QUERY_AND_CACHE, shapes, GRID_POOLS):
        for extra in (None,) if cache == "latent" else (None, *GRID_POOLS):
            plain = SparseDecodeCase(dtype, cache=cache, batch=batch, s_q=s_q, h_q=h_q, main=main, extra=extra)
            yield plain
            yield _with_all_options(plain)


def _with_all_options(case: SparseDecodeCase) -> SparseDecodeCase:
    extra = None if case.extra is None else case.extra._replace(lengths="drawn")
    case = replace(case, main=case.main._replace(lengths="drawn"), extra=extra, indices="mixed", sinks="infinite")
    return _exact_scales(case)


def _exact_scales(case: SparseDecodeCase) -> SparseDecodeCase:
    """Return the case with power-of-two scales of fp8_656, for cases whose tokens may have a single key.

    The lse of such a token is a score near 0. FlashMLA's bound for lse is almost purely relative; it holds if value times scale is exact in
    bf16, which the scales of FlashMLA's quantiser ensure.
    """
    return replace(case, power_of_two=case.cache == "fp8_656")


def corner_cases() -> Iterator[SparseDecodeCase]:
    """Yield FlashMLA's corner cases, and numbers of heads and indices that FlashMLA rejects, in every format."""
    for dtype, cache in QUERY_AND_CACHE:
        case = SparseDecodeCase(dtype, cache=cache, batch=4, s_q=2, h_q=64, main=Pool(512, 128, 64))
        extra = Pool(300, 70, 61)
        yield from (replace(case, indices="none", extra=second, sinks=sinks) for second in (None, extra) for sinks in ("none", "infinite"))
        zeros, extra_zeros = case.main._replace(lengths="zeros"), extra._replace(lengths="zeros")
        yield from (_exact_scales(replace(case, main=zeros, extra=second)) for second in (None, extra_zeros))
        yield replace(case, extra=extra, cache_layout="layers", q_layout="sliced", index_layout="odd", outputs="strided")
        yield from (replace(case, h_q=h_q, main=Pool(100, 65), indices="mixed", sinks="drawn") for h_q in HEADS)
        yield from (replace(case, h_q=16, main=Pool(2046, topk, 2)) for topk in TOPKS if topk > 1)
        yield _exact_scales(replace(case, h_q=16, main=Pool(2046, 1, 2)))


# Long cases of 4,096 keys: in one and in two caches, with one and with several query tokens.
_LONG = (
    SparseDecodeCase(h_q=128, main=Pool(8192, 4096)),
    SparseDecodeCase(cache="fp8_584", s_q=2, h_q=64, main=Pool(8192, 4096)),
    SparseDecodeCase(s_q=2, h_q=128, main=Pool(4096, 2048), extra=Pool(2046, 2048, 576)),
    SparseDecodeCase(cache="fp8_584", h_q=128, main=Pool(4096, 2048), extra=Pool(2046, 2048, 61)),
    SparseDecodeCase("fp16", cache="latent", s_q=3, h_q=16, main=Pool(8192, 4096)),
)


def full_cases() -> list[SparseDecodeCase]:
    """Return every case of the full suite once."""
    return list(dict.fromkeys([*SMOKE, *corner_cases(), *_LONG, *grid()]))


_ALWAYS_WHOLE = frozenset({*SMOKE, *corner_cases(), *_LONG})


def _runs_whole(case: SparseDecodeCase) -> bool:
    short = case.batch <= 6 and all(pool.topk <= 64 for pool in case.pools)
    return short or case in _ALWAYS_WHOLE


def _factors(case: SparseDecodeCase) -> tuple[Hashable, ...]:
    kind, main = (case.dtype, case.cache), case.main._replace(lengths=None)
    extra = None if case.extra is None else case.extra._replace(lengths=None)
    return kind, case.batch, case.s_q, case.h_q, main, extra, case.sinks


OP_SUITES = OpSuites(SMOKE, full_cases, SimulatorReduction(_runs_whole, _factors))

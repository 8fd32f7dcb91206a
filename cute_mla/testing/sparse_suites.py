"""The suites of sparse decode."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from itertools import product

from ..spec.sparse_decode import QUERY_AND_CACHE
from ..spec.split_plan import INVARIANT_SPLIT_TILES, TILE_KEYS
from .planned import Bearable
from .sparse_cases import Pool, SparseCase

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

_CUT = INVARIANT_SPLIT_TILES * TILE_KEYS  # keys after which a batch-invariant call cuts a request

# Tokens that may have a single key have scales that are powers of two: see _of_few_keys.
SMOKE: tuple[SparseCase, ...] = (
    # A single token cut among all SMs: many splits.
    SparseCase(h_q=128, main=Pool(4096, 2048), sinks="drawn"),
    # DeepSeek-V4's two caches, of all tokens and of compressed ones; with a plan made beforehand.
    SparseCase(
        cache="fp8_584", batch=2, s_q=3, h_q=64, main=Pool(512, 64, 64, "drawn"), extra=Pool(1024, 576, 61, "drawn"),
        indices="mixed", sinks="drawn", metadata="tensors",
    ),
    SparseCase(
        cache="fp8_584", batch=6, s_q=2, h_q=16, main=Pool(256, 128, 576, "zeros"), extra=Pool(512, 200, 2, "zeros"),
        cache_layout="layers", outputs="given",
    ),
    # Every format with every width of access; lengths around a tile; invalid indices of every kind.
    SparseCase(
        cache="latent", batch=7, s_q=2, h_q=48, main=Pool(200, 65, 69, "edges"), indices="mixed", sinks="infinite",
        outputs="strided",
    ),
    SparseCase("fp16", cache="latent", batch=5, h_q=96, main=Pool(128, 63, 61), indices="mixed", q_layout="odd", outputs="given"),
    # Pairs of CTAs that convert a tile together.
    SparseCase("fp16", cache="latent", batch=3, h_q=128, main=Pool(128, 100, 61)),
    SparseCase(
        cache="latent", batch=2, s_q=2, h_q=80, main=Pool(300, 200), extra=Pool(100, 70, 1), indices="mixed", sinks="drawn"
    ),
    SparseCase(batch=3, s_q=2, h_q=1, main=Pool(40, 1, 1), power_of_two=True, sinks="drawn", outputs="odd"),
    SparseCase(
        cache="fp8_584", batch=5, s_q=2, h_q=3, main=Pool(200, 130, 2), indices="mixed", cache_layout="tight", index_layout="odd",
        outputs="odd",
    ),
    SparseCase(batch=4, s_q=3, h_q=96, main=Pool(300, 65, 64), cache_layout="padded_rows", index_layout="odd", sinks="infinite"),
    # Tokens without a single key.
    SparseCase(
        cache="latent", batch=2, s_q=2, h_q=8, main=Pool(100, 65), extra=Pool(64, 70, 1), indices="none", sinks="drawn",
        q_layout="odd", empty_lse=float("-inf"),
    ),
    SparseCase(cache="fp8_584", batch=0, h_q=64),
    # A request that a batch-invariant call cuts, inside its second cache, beside one that it does not.
    SparseCase(
        batch=2, main=Pool(5000, _CUT // 2 + 4, 64, (_CUT // 2 + 4, 37)), extra=Pool(5000, _CUT // 2 + 77, 69, (_CUT // 2 + 77, 63)),
        batch_invariant=True, metadata="tensors", sinks="drawn", sm_count=78,
    ),
    # Lengths of both caches at their edges, all requests walked by one CTA.
    SparseCase(
        batch=7, h_q=48, main=Pool(200, 130, 64, "edges"), extra=Pool(100, 70, 61, "edges"), power_of_two=True, indices="mixed",
        sinks="drawn", outputs="given", empty_lse=float("-inf"), sm_count=1,
    ),
    # The running maximum moves in every tile of a long loop, never after the first, or by far at a few keys.
    SparseCase(batch=2, h_q=64, main=Pool(1100, 1100), values="rising", sm_count=2),
    SparseCase("fp16", cache="latent", main=Pool(1100, 1100), values="falling", sm_count=3),
    SparseCase(cache="fp8_584", batch=2, s_q=2, h_q=128, main=Pool(700, 300), values="peaks", softmax_scale=0.1, q_layout="even"),
    # Scales that a narrower type than fp32 would spoil, and scales of all sizes; pages beyond 2^32 bytes.
    SparseCase(main=Pool(600, 576, 576), values="coherent"),
    SparseCase(batch=2, h_q=8, main=Pool(512, 200, 61), values="spread", cache_layout="far", q_layout="sliced"),
    # A decode batch as engines make it: TP8 with multi-token prediction, scales as FlashMLA's quantiser makes them.
    SparseCase(
        batch=6, s_q=2, main=Pool(700, 448, 64, "zeros"), power_of_two=True, cache_layout="layers", q_layout="heads_first",
        outputs="given", metadata="tensors",
    ),
)  # fmt: skip


def grid() -> Iterator[SparseCase]:
    """FlashMLA's sparse-decode grid: of every two caches and of each alone, plain and with all options; then without a second
    cache for the latent formats, which it does not have."""
    shapes = list(product(GRID_BATCH, GRID_S_Q, GRID_H_Q))
    for (dtype, cache), (batch, s_q, h_q), main in product(QUERY_AND_CACHE, shapes, GRID_POOLS):
        for extra in (None,) if cache == "latent" else (None, *GRID_POOLS):
            plain = SparseCase(dtype, cache=cache, batch=batch, s_q=s_q, h_q=h_q, main=main, extra=extra)
            yield plain
            yield _with_all_options(plain)


def _with_all_options(case: SparseCase) -> SparseCase:
    extra = None if case.extra is None else case.extra._replace(lengths="drawn")
    case = replace(case, main=case.main._replace(lengths="drawn"), extra=extra, indices="mixed", sinks="infinite")
    return _of_few_keys(case)


def _of_few_keys(case: SparseCase) -> SparseCase:
    """A case whose tokens may have a single key each, the lse of which is a score near 0: FlashMLA's bound for it, all but
    relative, holds where value times scale is exact in bf16, as it always is with the scales of FlashMLA's quantiser."""
    return replace(case, power_of_two=case.cache == "fp8_656")


def corner_cases() -> Iterator[SparseCase]:
    """FlashMLA's corners, and numbers of heads and indices that it does not take, in every format."""
    for dtype, cache in QUERY_AND_CACHE:
        case = SparseCase(dtype, cache=cache, batch=4, s_q=2, h_q=64, main=Pool(512, 128, 64))
        extra = Pool(300, 70, 61)
        yield from (replace(case, indices="none", extra=second, sinks=sinks) for second in (None, extra) for sinks in ("none", "infinite"))
        zeros, extra_zeros = case.main._replace(lengths="zeros"), extra._replace(lengths="zeros")
        yield from (_of_few_keys(replace(case, main=zeros, extra=second)) for second in (None, extra_zeros))
        yield replace(case, extra=extra, cache_layout="layers", q_layout="sliced", index_layout="odd", outputs="strided")
        yield from (replace(case, h_q=h_q, main=Pool(100, 65), indices="mixed", sinks="drawn") for h_q in HEADS)
        yield from (replace(case, h_q=16, main=Pool(2046, topk, 2)) for topk in TOPKS if topk > 1)
        yield _of_few_keys(replace(case, h_q=16, main=Pool(2046, 1, 2)))


# A few of 4,096 keys: in one cache and in two, of one query token and of several.
_LONG = (
    SparseCase(h_q=128, main=Pool(8192, 4096)),
    SparseCase(cache="fp8_584", s_q=2, h_q=64, main=Pool(8192, 4096)),
    SparseCase(s_q=2, h_q=128, main=Pool(4096, 2048), extra=Pool(2046, 2048, 576)),
    SparseCase(cache="fp8_584", h_q=128, main=Pool(4096, 2048), extra=Pool(2046, 2048, 61)),
    SparseCase("fp16", cache="latent", s_q=3, h_q=16, main=Pool(8192, 4096)),
)


def full_cases() -> list[SparseCase]:
    """Every case of the unreduced suite, once."""
    return list(dict.fromkeys([*SMOKE, *corner_cases(), *_LONG, *grid()]))


_ALWAYS_WHOLE = frozenset(
    {
        *SMOKE,
        *corner_cases(),
        *_LONG,
    }
)


def _runs_whole(case: SparseCase) -> bool:
    short = case.batch <= 6 and all(pool.topk <= 64 for pool in case.pools)
    return short or case in _ALWAYS_WHOLE


def _factors(case: SparseCase) -> tuple[Hashable, ...]:
    kind, main = (case.dtype, case.cache), case.main._replace(lengths=None)
    extra = None if case.extra is None else case.extra._replace(lengths=None)
    return kind, case.batch, case.s_q, case.h_q, main, extra, case.sinks


SIMULATED: Bearable[SparseCase] = Bearable(_runs_whole, _factors, lambda case: "large")

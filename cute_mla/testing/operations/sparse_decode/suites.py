"""Suites of sparse decode."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from itertools import product

from ....spec.cache_format import FORMATS
from ....spec.sparse_decode import FEW_HEADS_CACHES, KERNELS, QUERY_AND_CACHE
from ....spec.split_plan import INVARIANT_SPLIT_TILES, TILE_KEYS
from ...cases.far import FAR_DIMENSIONS
from ...cases.tensors import ORDERED
from ...suites.cover import SPREAD_SCALE, Choice, Factors, Variant, cover, lacks_far_rows, ramps
from ...suites.entries import OpSuites, SimulatorReduction
from .case import ROWS_APART, Pool, SparseDecodeCase

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

_MINUS_INF = float("-inf")

# Features of a small case, by factor. pools: requests, the first and the second cache.
_FACTORS: Factors = {
    "pools": (  # requests, query tokens of each, pairs of SMs for each token, the first and the second cache
        (2, 2, 2, Pool(140, 130, 62), None),
        (2, 1, 4, Pool(400, 330, 16, (330, 3)), None),  # several tiles, cut into splits
        (7, 1, 1, Pool(80, 66, 64, "edges"), Pool(30, 20, 2, "edges")),  # lengths around a tile, beyond topk, negative
        (2, 2, 1, Pool(64, 40, 1, (40, 31)), Pool(300, 24, 576, (0, 20))),  # the last request, which may lie far, has keys in both
    ),
    "indices": ("valid", "mixed"),
    "sinks": ("none", "drawn", "infinite"),
    "values": (*ramps(), ("outliers", SPREAD_SCALE)),
    "cache_layout": ("packed", "layers", "padded_rows", "far", "far_rows"),
    "index_layout": ("packed", "odd", "far_requests", "far_tokens"),
    "q_layout": ("packed", "sliced", "heads_first", *FAR_DIMENSIONS),
    "outputs": ("allocated", "given", "strided", *FAR_DIMENSIONS),
    "metadata": ("object", "tensors", "stale"),
    "batch_invariant": (False, True),
    "empty_lse": (None, _MINUS_INF),
}
_PAGES_OF_584 = ("packed", "layers", "tight", "far")

# Caches of two formats: tiles of the first one alone, of both, and of the second one alone
_TWO_FORMATS = (
    (2, 2, 2, Pool(140, 130, 62), Pool(150, 140, 16)),
    (2, 1, 4, Pool(200, 150, 64, (150, 64)), Pool(400, 330, 61, (330, 3))),
    *_FACTORS["pools"][2:],
)

# By the name of the kernels: formats of the first and of the second cache, one of the latter for every case that has one
_CACHES: dict[str, tuple[tuple[str, str], ...]] = {
    "v41": (("v41", ""), ("v41_paged", ""), ("v41", "v41_paged"), ("v41_paged", "v41")),
    "v41_fp4": (("v41", "v41_fp4"), ("v41_paged", "v41_fp4")),
}
_CALLS = (*((dtype, cache, "") for dtype, cache in QUERY_AND_CACHE), ("bf16", "v41", "v41_fp4"))  # of the full suite
_FP32_SCALES = ("fp8_656", "nope_528")


def _small(choice: Choice) -> SparseDecodeCase | None:
    """Return the small case with these features; None if the values are not possible together."""
    rest = {name: value for name, value in choice.items() if name not in ("kernels", "caches", "pools", "values")}
    values, scale = choice["values"]
    batch, s_q, sms, main, extra = choice["pools"]
    cache, extra_cache = choice.get("caches", (choice["kernels"], ""))
    if extra_cache and extra is None:
        return None
    if choice["cache_layout"] in ROWS_APART and not any(FORMATS[name or cache].scales_inside for name in (cache, extra_cache)):
        return None
    layouts = (choice["q_layout"], choice["outputs"], choice["index_layout"])
    if s_q == 1 and "far_tokens" in layouts:
        return None
    if choice["index_layout"] in FAR_DIMENSIONS and extra is None:
        return None  # of both caches
    if lacks_far_rows(layouts, choice["h_q"]):
        return None
    if choice["cache_layout"] in ("far_rows", "tight") and main.page_size == 1:
        return None
    if values in ORDERED and main.topk <= 2 * TILE_KEYS:
        return None
    if choice["batch_invariant"] and sms > 2:
        return None  # nothing would be cut
    many = choice["indices"] == "valid" and main.lengths is None  # no token has few keys: see _exact_scales
    return SparseDecodeCase(
        cache=cache, extra_cache=extra_cache, batch=batch, s_q=s_q, main=main, extra=extra, values=values, softmax_scale=scale,
        power_of_two=cache in _FP32_SCALES and not many, sm_count=2 * sms * s_q, **rest,
    )  # fmt: skip


_HEADS_OF = {"few": (3, 8, 16), "one": (3, 12, 64), "two": (68, 92, 96, 128)}  # by kind of kernel
_MORE_THAN_FEW = (17, 40, 64)


def _kinds() -> Iterator[tuple[str, str, str]]:
    """Yield dtype and caches of all kernels with few heads, with heads in one CTA and in two."""
    for dtype, kernels in KERNELS:
        yield from ((dtype, kernels, kind) for kind in _HEADS_OF if kind != "few" or kernels in FEW_HEADS_CACHES)


def _variants() -> Iterator[Variant]:
    """Yield all kernels."""
    for dtype, kernels, kind in _kinds():
        two = kind == "two"
        caches = _CACHES.get(kernels, ((kernels, ""),))
        factors: Factors = {**_FACTORS, "h_q": _MORE_THAN_FEW if kind == "one" and kernels in FEW_HEADS_CACHES else _HEADS_OF[kind]}
        if len(caches) > 1:
            factors = {**factors, "caches": caches}
        if kernels == "fp8_584":
            factors = {**factors, "cache_layout": _PAGES_OF_584}
        if kernels == "v41_fp4":
            factors = {**factors, "pools": _TWO_FORMATS}
        if two:
            factors = {**factors, "q_layout": ("packed", *FAR_DIMENSIONS), "outputs": ("given", "strided", "far_heads")}
        yield Variant(f"{dtype} {kernels} {kind}", {"dtype": dtype, "kernels": kernels}, factors)


VARIANTS = tuple(_variants())


def _covers() -> Iterator[SparseDecodeCase]:
    """Yield small cases with every feature of every variant."""
    seen: set[object] = set()
    for variant, (dtype, kernels, kind) in zip(VARIANTS, _kinds(), strict=True):
        yield from cover(variant, _small, seen)
        h_q = 66 if kind == "two" else 23 if kind == "one" and kernels in FEW_HEADS_CACHES else 7
        caches = _CACHES.get(kernels, ((kernels, ""),))
        cache, extra_cache = caches[-1]
        yield SparseDecodeCase(  # a case of its own, since tokens without keys hide all other features
            dtype, cache=cache, extra_cache=extra_cache, batch=2, h_q=h_q, main=Pool(100, 65), extra=Pool(64, 70, 2),
            indices="none", sinks="infinite", empty_lse=_MINUS_INF, sm_count=2,
        )  # fmt: skip
        # rows at multiples of 4 bytes, which Hopper takes, of requests that are cut
        yield SparseDecodeCase(
            dtype, cache=cache, extra_cache=extra_cache, batch=2, h_q=h_q, main=Pool(300, 130), extra=Pool(64, 70, 2),
            sinks="drawn", q_layout="even", outputs="even", sm_count=12, power_of_two=cache in _FP32_SCALES,
        )  # fmt: skip
        if kind != "two":
            other, extra_other = caches[min(1, len(caches) - 1)]
            yield SparseDecodeCase(  # requests with different numbers of query tokens, each with a number of indices of its own
                dtype, cache=other, extra_cache=extra_other, batch=5, tokens=(2, 0, 3), h_q=h_q,
                main=Pool(140, 130, 62, (130, 0, 3, 70, 500)), extra=Pool(64, 70, 2, "drawn"), sinks="drawn",
                index_layout="odd", outputs="far_tokens", metadata="object", sm_count=12, power_of_two=other in _FP32_SCALES,
            )  # fmt: skip
        yield SparseDecodeCase(  # results are undefined, but the call keeps to its operands
            dtype, cache=cache, extra_cache=extra_cache, batch=2, h_q=h_q, main=Pool(100, 66, 64, (66, 3)),
            extra=Pool(64, 70, 2) if extra_cache else None, metadata="overwritten", outputs="given", sm_count=12,
        )  # fmt: skip


# Cases whose size or values are what they test. Cases whose tokens may have a single key use scales that are powers of two: _exact_scales.
_LARGE: tuple[SparseDecodeCase, ...] = (
    # One split a key tile: more than 32 splits, which combine merges in several rounds, with a sink.
    SparseDecodeCase(main=Pool(2600, 40 * TILE_KEYS - 3), sinks="drawn"),
    # DeepSeek-V4's two caches, one of all tokens and one of compressed tokens, with a precomputed plan.
    SparseDecodeCase(
        cache="fp8_584", s_q=3, h_q=64, main=Pool(512, 64, 64, "drawn"), extra=Pool(1024, 576, 61, "drawn"), indices="mixed", sinks="drawn",
        metadata="tensors", sm_count=12,
    ),
    SparseDecodeCase(batch=3, s_q=2, h_q=1, main=Pool(40, 1, 1), power_of_two=True, sinks="drawn", outputs="strided", sm_count=8),
    SparseDecodeCase(cache="latent", batch=4, h_q=48, main=Pool(100, 63, 69), index_layout="odd", q_layout="sliced", sm_count=8),
    SparseDecodeCase(cache="fp8_584", batch=0, h_q=64),
    # A request that a batch-invariant call splits inside its second cache, beside one that it does not split.
    SparseDecodeCase(
        batch=2, main=Pool(5000, _SPLIT_KEYS // 2 + 4, 64, (_SPLIT_KEYS // 2 + 4, 37)),
        extra=Pool(5000, _SPLIT_KEYS // 2 + 77, 69, (_SPLIT_KEYS // 2 + 77, 63)),
        batch_invariant=True, metadata="tensors", sinks="drawn", sm_count=144,
    ),
    # The same for query tokens of two requests, behind which there are tokens of none. Two CTAs take the heads of a token. The second split
    # has one key, and is the beginning of a part of the plan.
    SparseDecodeCase(
        batch=3, tokens=(1, 2), h_q=66, main=Pool(9000, _SPLIT_KEYS + 1, 64, (_SPLIT_KEYS + 1, 40, 70)), batch_invariant=True,
        outputs="given", power_of_two=True, sm_count=16,
    ),
    # The same without topk_length, over a 16-bit cache.
    SparseDecodeCase(
        cache="latent", h_q=66, main=Pool(9000, _SPLIT_KEYS + TILE_KEYS + 1), batch_invariant=True, metadata="tensors",
        outputs="given", sm_count=40,
    ),
    # The running maximum moves in every tile of a long loop, or never after the first tile.
    SparseDecodeCase(h_q=64, main=Pool(2048, 2048), values="rising", sm_count=2),
    SparseDecodeCase(cache="latent", main=Pool(1100, 1100), values="falling", sm_count=1),
    # Scales that need fp32, and scales of all magnitudes.
    SparseDecodeCase(main=Pool(600, 576, 576), values="coherent", sm_count=8),
    SparseDecodeCase(h_q=8, main=Pool(512, 200, 61), values="spread", sm_count=4),
    # A decode batch of a serving engine: TP8 with multi-token prediction, scales as FlashMLA's quantiser makes them.
    SparseDecodeCase(
        batch=4, s_q=2, main=Pool(700, 448, 64, "zeros"), power_of_two=True, cache_layout="layers", q_layout="heads_first",
        outputs="given", metadata="tensors", sm_count=12,
    ),
)  # fmt: skip


def _pairs() -> Iterator[SparseDecodeCase]:
    """Yield cases of two CTAs a tile, over caches of 528 and of 656 bytes.

    A request that a batch-invariant call splits where a part of the plan begins, and requests without keys in one cache or in both, whose
    results lie far.
    """
    long = Pool(5000, _SPLIT_KEYS + 77, 64, (_SPLIT_KEYS + 77, 37))
    yield SparseDecodeCase(cache="v41", batch=2, h_q=128, main=long, batch_invariant=True, metadata="tensors", sm_count=44)
    for cache in ("v41", "nope_528", "fp8_656"):
        main, extra = Pool(200, 70, 64, (0, 70, -3)), Pool(90, 65, 61, (0, 0, 65))
        yield SparseDecodeCase(cache=cache, batch=3, h_q=128, main=main, extra=extra, outputs="far_requests", sm_count=2)


SMOKE: tuple[SparseDecodeCase, ...] = tuple(dict.fromkeys([*_LARGE, *_pairs(), *_covers()]))


def grid() -> Iterator[SparseDecodeCase]:
    """Yield FlashMLA's sparse-decode grid: every pair of caches and every single cache, plain and with all options.

    The 16-bit cache, which FlashMLA does not support, has the part of the grid with one cache; two formats have that with two.
    """
    shapes = list(product(GRID_BATCH, GRID_S_Q, GRID_H_Q))
    for (dtype, cache, extra_cache), (batch, s_q, h_q), main in product(_CALLS, shapes, GRID_POOLS):
        seconds = GRID_POOLS if extra_cache else (None,) if cache == "latent" else (None, *GRID_POOLS)
        for extra in seconds:
            plain = SparseDecodeCase(dtype, cache=cache, extra_cache=extra_cache, batch=batch, s_q=s_q, h_q=h_q, main=main, extra=extra)
            yield plain
            yield _with_all_options(plain)


def _with_all_options(case: SparseDecodeCase) -> SparseDecodeCase:
    extra = None if case.extra is None else case.extra._replace(lengths="drawn")
    case = replace(case, main=case.main._replace(lengths="drawn"), extra=extra, indices="mixed", sinks="infinite")
    return _exact_scales(case)


def _exact_scales(case: SparseDecodeCase) -> SparseDecodeCase:
    """Return the case with power-of-two scales where they are fp32, for cases whose tokens may have a single key.

    The lse of such a token is a score near 0. FlashMLA's bound for lse is almost purely relative; it holds if value times scale is exact in
    bf16, which the scales of FlashMLA's quantiser ensure.
    """
    return replace(case, power_of_two=case.cache in _FP32_SCALES)


def corner_cases() -> Iterator[SparseDecodeCase]:
    """Yield FlashMLA's corner cases, and numbers of heads and indices that FlashMLA rejects, in every format."""
    for dtype, cache, extra_cache in _CALLS:
        extra = Pool(300, 70, 61)
        alone = SparseDecodeCase(dtype, cache=cache, batch=4, s_q=2, h_q=64, main=Pool(512, 128, 64))
        case = replace(alone, extra=extra, extra_cache=extra_cache)
        cases = (case,) if extra_cache else (alone, case)
        yield from (replace(each, indices="none", sinks=sinks) for each in cases for sinks in ("none", "infinite"))
        zeros, extra_zeros = case.main._replace(lengths="zeros"), extra._replace(lengths="zeros")
        yield from (_exact_scales(replace(each, main=zeros, extra=each.extra and extra_zeros)) for each in cases)
        yield replace(case, cache_layout="layers", q_layout="sliced", index_layout="odd", outputs="strided")
        least = cases[0]
        yield from (replace(least, h_q=h_q, main=Pool(100, 65), indices="mixed", sinks="drawn") for h_q in HEADS)
        yield from (replace(least, h_q=16, main=Pool(2046, topk, 2)) for topk in TOPKS if topk > 1)
        yield _exact_scales(replace(least, h_q=16, main=Pool(2046, 1, 2)))


# Long cases of 4,096 keys: in one and in two caches, with one and with several query tokens.
_LONG = (
    SparseDecodeCase(h_q=128, main=Pool(8192, 4096)),
    SparseDecodeCase(cache="fp8_584", s_q=2, h_q=64, main=Pool(8192, 4096)),
    SparseDecodeCase(s_q=2, h_q=128, main=Pool(4096, 2048), extra=Pool(2046, 2048, 576)),
    SparseDecodeCase(cache="fp8_584", h_q=128, main=Pool(4096, 2048), extra=Pool(2046, 2048, 61)),
    SparseDecodeCase(cache="latent", s_q=3, h_q=16, main=Pool(8192, 4096)),
)


_ALWAYS_WHOLE = frozenset({*SMOKE, *corner_cases(), *_LONG})


def _is_short(case: SparseDecodeCase) -> bool:
    return case.batch <= 6 and all(pool.topk <= 64 for pool in case.pools)


def _factors(case: SparseDecodeCase) -> tuple[Hashable, ...]:
    kind, main = (case.dtype, case.cache, case.extra_cache), case.main._replace(lengths=None)
    extra = None if case.extra is None else case.extra._replace(lengths=None)
    return kind, case.batch, case.s_q, case.h_q, main, extra, case.sinks


OP_SUITES = OpSuites(
    VARIANTS, SMOKE, lambda: [*corner_cases(), *_LONG, *grid()], SimulatorReduction(_ALWAYS_WHOLE.__contains__, _factors, _is_short)
)

"""Sparse decode: each query token attends to the slots of a paged latent cache that its indices name.

out = softmax(scale * q k^T) v over the valid slots among the first topk_length of topk indices, and of a second cache's.

For the plan, a request has as many keys as indices count: min(topk_length, topk) of the cache, followed by as many of the
second cache. All query tokens of a request have the same number; they are CTAs of the grid, along its second dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from . import sparse_prefill
from .abi import Float32, Int32, Int64, Pointer, params_of
from .arch import SM90, SM100, Arch
from .cache_format import FORMATS, FP8_584, FP8_656, LATENT, NOPE_528, V41, V41_FP4, V41_PAGED, CacheFormat
from .dense_decode import FEW_HEADS, SOFTMAX_TERMS, TILE_ROWS, TILINGS, parts_of, row_ctas
from .mla import BF16, ceil_div
from .split_plan import INVARIANT_SPLIT, TILE_KEYS, invariant_splits, keeps_whole, piece_overhead


class SparseDecodeArguments(NamedTuple):
    """Launch arguments of sparse_decode, in ABI order: the one list that host, launch and kernel share."""

    q: Pointer  # dtype [batch, s_q, h_q, d_qk]
    cache: Pointer  # bytes, see cache_format
    indices: Pointer  # int32 [batch, s_q, topk]; a slot outside [0, slots) is skipped
    topk_length: Pointer  # int32 [batch], or null: all topk indices count
    extra_cache: Pointer  # as cache, of the format that the variant has for it; null without
    extra_indices: Pointer  # int32 [batch, s_q, extra_topk]
    extra_topk_length: Pointer  # int32 [batch], or null
    attn_sink: Pointer  # fp32 [h_q], natural log, or null: out is scaled by exp(lse) / (exp(lse) + exp(sink))
    plan: Pointer  # int32 [num_parts, 8]
    num_splits: Pointer  # int32 [batch + 1]
    out: Pointer  # dtype [batch, s_q, h_q, 512]
    lse: Pointer  # fp32 [batch, h_q, s_q], natural log
    out_accum: Pointer  # fp32 [accumulator rows, s_q, h_q, 512], contiguous, normalised within the split, without the sink
    lse_accum: Pointer  # fp32 [accumulator rows, s_q, h_q], contiguous, base 2; -inf for an empty split
    # in elements
    q_stride_batch: Int64
    q_stride_token: Int64
    q_stride_head: Int64
    out_stride_batch: Int64
    out_stride_token: Int64
    out_stride_head: Int64
    lse_stride_batch: Int64
    lse_stride_head: Int64
    lse_stride_token: Int64
    indices_stride_batch: Int64
    indices_stride_token: Int64
    extra_indices_stride_batch: Int64
    extra_indices_stride_token: Int64
    # in bytes
    page_stride: Int64
    row_stride: Int64
    extra_page_stride: Int64
    extra_row_stride: Int64
    scale_log2: Float32  # softmax_scale * log2(e)
    empty_lse: Float32  # lse of a row that attends to nothing
    batch: Int32
    s_q: Int32
    h_q: Int32
    page_size: Int32
    slots: Int32  # pages * page_size
    topk: Int32
    extra_page_size: Int32
    extra_slots: Int32
    extra_topk: Int32  # 0 without a second cache
    max_splits: Int32  # as in dense_decode
    accum_rows: Int32  # as in dense_decode


PARAMS = params_of(SparseDecodeArguments)


# What calls can have: element type of q and out, format of the first cache
QUERY_AND_CACHE = tuple((BF16, cache.name) for cache in (LATENT, FP8_656, FP8_584, V41, V41_PAGED, NOPE_528))
DECODED: dict[str, CacheFormat] = {cache: FORMATS[cache] for _, cache in QUERY_AND_CACHE}  # formats of a first cache
DECODED_BESIDE: dict[str, CacheFormat] = {**DECODED, V41_FP4.name: V41_FP4}  # formats of a second one


def serving_kernels(cache: CacheFormat, extra: CacheFormat | None = None) -> str | None:
    """Return the format by which the kernels for a first cache and a second one are named, or None if there are none for both together."""
    if extra is None or extra.kernels == cache.kernels:
        return cache.kernels
    return extra.name if extra.beside == cache.kernels else None


# The compiled variants: element type of q and out, and what serving_kernels names
KERNELS = (*dict.fromkeys((dtype, FORMATS[cache].kernels) for dtype, cache in QUERY_AND_CACHE), (BF16, V41_FP4.name))


SPREAD_ROWS = 32  # of a CTA of rows64: a warp of those that multiply on each scheduler

FEW_HEADS_CACHES = (FP8_656.name, FP8_584.name, V41.name, NOPE_528.name)  # as serving_kernels names them


def few_heads_caches(arch: Arch) -> tuple[str, ...]:
    """Return the caches over which an architecture has kernels for few heads."""
    return FEW_HEADS_CACHES if arch is SM90 and FEW_HEADS else ()


@dataclass(frozen=True)
class SparseDecodeConfig:
    """One compiled variant.

    dtype: element type of q and out, and of a latent cache. cache: as serving_kernels names the formats of both caches.
    cluster: CTAs that share the gathered tiles (1 or 2); on sm100, the CTAs along the heads.
    few_heads: S^T = K Q^T and O^T = V^T P^T, for up to FEW_HEADS heads.
    rows64: on sm120: the same products and TILE_ROWS heads a CTA, for more heads than the 16 rows of the other kernel.
    """

    dtype: str
    cache: str
    cluster: int
    few_heads: bool = False
    rows64: bool = False

    @property
    def format(self) -> CacheFormat:
        """The layout of the first cache. Where that format has a paged twin, the row stride of a cache tells which of both it has."""
        return FORMATS[FORMATS[self.cache].beside or self.cache]

    @property
    def extra_format(self) -> CacheFormat:
        """The layout of the second cache, likewise."""
        return FORMATS[self.cache]

    @property
    def mixes_formats(self) -> bool:
        """True if the second cache has another format than the first, beyond the order of the same bytes."""
        return self.extra_format is not self.format

    @property
    def name(self) -> str:
        """The kernel's name in the manifest, without op and arch."""
        form = "few_heads" if self.few_heads else "rows64" if self.rows64 else f"cluster{self.cluster}"
        return f"{self.dtype}_{self.cache}_{form}"


def order_terms(config: SparseDecodeConfig, arch: Arch) -> dict[str, Any]:
    """Return the terms of a variant's order.

    On SM90 CTAs that share key tiles change no bit, and so `cluster` is no term. On SM100 kernels of one CTA and of two have tilings of
    their own. Over a 16-bit latent the order is that of sparse prefill, as long as no request is cut.
    """
    if config.cache == LATENT.name:
        prefill = sparse_prefill.SparsePrefillConfig(config.dtype, config.format.d_qk, config.cluster, config.rows64)
        return sparse_prefill.order_terms(prefill, arch)
    few = config.few_heads
    heads = f"heads on M, {config.cluster} CTAs" if arch is SM100 else "heads on M"
    fp32_scales = few and config.format.scale == "fp32"  # which the kernel for few heads applies to scores and P
    return {
        "op": "sparse_decode",
        "revision": 2 if arch is SM100 and config.cluster == 2 else 1,
        "arch": arch.name,
        "dtype": config.dtype,
        "cache": config.cache,
        "values": "codes exact, fp32 scales on scores and on P" if fp32_scales else f"value x scale, rounded once to {config.dtype}",
        "d_qk": config.format.d_qk,
        "rows": f"keys on M, up to {FEW_HEADS} heads" if few else "keys on M" if config.rows64 else heads,
        "keys": f"tiles of {TILE_KEYS if TILINGS[arch.name].rows == TILE_ROWS else TILE_KEYS // 2}, as given",
        "split": INVARIANT_SPLIT,
        **SOFTMAX_TERMS,
        "p": f"{config.dtype}, unnormalised",
    }


@dataclass(frozen=True)
class SparseDecodeProblem:
    """The shapes of one call. They decide, with the architecture, on variant, grid and workspace.

    cache: as in SparseDecodeConfig. few_heads: whether the call takes the kernel for few heads, where there is one. counted_parts: parts of
    the plan of a call whose indices all count, as the host knows; 0 in other calls.
    """

    arch: Arch
    dtype: str
    cache: str
    batch: int
    s_q: int
    h_q: int
    topk: int
    extra_topk: int = 0
    batch_invariant: bool = False
    few_heads: bool = True
    counted_parts: int = 0

    @property
    def row_ctas(self) -> int:
        """CTAs along the heads of one query token."""
        return head_ctas(self.arch, self.h_q)

    @property
    def config(self) -> SparseDecodeConfig:
        """The variant that serves this problem."""
        few_heads = self.few_heads and self.h_q <= FEW_HEADS and self.cache in few_heads_caches(self.arch)
        tiling = TILINGS[self.arch.name]
        cluster = self.row_ctas if tiling.paired else tiling.cluster(self.row_ctas)
        return SparseDecodeConfig(self.dtype, self.cache, cluster, few_heads, tiling.takes_rows64(self.h_q))

    @property
    def max_keys(self) -> int:
        """Indices of a query token."""
        return self.topk + self.extra_topk

    @property
    def max_splits(self) -> int:
        """The most splits of a request in a batch-invariant call; 0 in other calls, where the plan cuts.

        If all indices count, and the plan cuts no request, which then has one split, the call is batch invariant: no combine follows, and
        the kernel does not cut either where the contents of a plan say so.
        """
        splits = invariant_splits(self.max_keys)
        parts, overhead = self.counted_parts, piece_overhead(self.arch)
        whole = splits == 1 and parts > 0 and keeps_whole(self.batch, self.max_keys, parts, overhead)
        return splits if self.batch_invariant or whole else 0

    def num_parts(self, sm_count: int) -> int:
        """Return the number of parts of the plan: as many as keep every SM busy with one CTA."""
        return num_parts(self.arch, self.h_q, self.s_q, sm_count)

    def grid(self, sm_count: int) -> tuple[int, int, int]:
        """Return the CTAs along (heads, query tokens, parts).

        CTAs of rows64 have SPREAD_ROWS heads each in place of TILE_ROWS where all of them that have keys run at once. No bit depends on it.
        """
        parts, spread = self.num_parts(sm_count), ceil_div(self.h_q, SPREAD_ROWS)
        cost = self.batch * (max(ceil_div(self.max_keys, TILE_KEYS), 1) + piece_overhead(self.arch))
        with_keys = ceil_div(cost, max(ceil_div(cost, parts), 1))
        if self.config.rows64 and self.s_q * spread * with_keys <= sm_count:
            return spread, self.s_q, parts
        return self.row_ctas, self.s_q, parts


def head_ctas(arch: Arch, h_q: int) -> int:
    """Return the CTAs along the heads of one query token. Up to the rows of one, a call takes one: a pair would be half empty."""
    return 1 if h_q <= TILINGS[arch.name].rows else row_ctas(arch, h_q)


def num_parts(arch: Arch, h_q: int, s_q: int, sm_count: int) -> int:
    """Return the number of parts of a plan for so many heads and query tokens: as many as keep every SM busy with one CTA."""
    return parts_of(s_q * head_ctas(arch, h_q), sm_count)


def closed_variants(arch: Arch) -> tuple[SparseDecodeConfig, ...]:
    """Return every variant that ships for an architecture."""
    tiling = TILINGS[arch.name]
    clusters = (1, 2) if tiling.rows == TILE_ROWS else tiling.clusters  # for up to TILE_ROWS heads, and for more
    return (
        *(SparseDecodeConfig(dtype, cache, cluster) for dtype, cache in KERNELS for cluster in clusters),
        *(SparseDecodeConfig(dtype, cache, 1, rows64=True) for dtype, cache in KERNELS if tiling.takes_rows64(TILE_ROWS)),
        *(SparseDecodeConfig(BF16, cache, 1, few_heads=True) for cache in few_heads_caches(arch)),
    )

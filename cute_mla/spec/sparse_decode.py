"""Sparse decode: each query token attends to the slots of a paged latent cache that its indices name.

out = softmax(scale * q k^T) v over the valid slots among the first topk_length of topk indices, and of a second cache's.

For the plan, a request has as many keys as indices count: min(topk_length, topk) of the cache, followed by as many of the
second cache. All query tokens of a request have the same number; they are CTAs of the grid, along its second dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

from .abi import Param, float32s, int32s, int64s, pointers
from .arch import Arch
from .cache_format import FORMATS, FP8_584, FP8_656, LATENT, CacheFormat
from .dense_decode import MAX_ROW_ALIGNMENT, TILINGS, num_parts, row_ctas
from .mla import ELEMENT_BYTES
from .split_plan import invariant_splits

PARAMS: tuple[Param, ...] = (
    *pointers(
        "q",  # dtype [batch, s_q, h_q, d_qk]
        "cache",  # bytes, see cache_format
        "indices",  # int32 [batch, s_q, topk]; a slot outside [0, slots) is skipped
        "topk_length",  # int32 [batch], or null: all topk indices count
        "extra_cache",  # as cache, of the same format; null without
        "extra_indices",  # int32 [batch, s_q, extra_topk]
        "extra_topk_length",  # int32 [batch], or null
        "attn_sink",  # fp32 [h_q], natural log, or null: out is scaled by exp(lse) / (exp(lse) + exp(sink))
        "plan",  # int32 [num_parts, 8]
        "num_splits",  # int32 [batch + 1]
        "out",  # dtype [batch, s_q, h_q, 512]
        "lse",  # fp32 [batch, h_q, s_q], natural log
        "out_accum",  # fp32 [accumulator rows, s_q, h_q, 512], contiguous, normalised within the split, without the sink
        "lse_accum",  # fp32 [accumulator rows, s_q, h_q], contiguous, base 2; -inf for an empty split
    ),
    # in elements
    *int64s(
        "q_stride_batch",
        "q_stride_token",
        "q_stride_head",
        "out_stride_batch",
        "out_stride_token",
        "out_stride_head",
        "lse_stride_batch",
        "lse_stride_head",
        "lse_stride_token",
        "indices_stride_batch",
        "indices_stride_token",
        "extra_indices_stride_batch",
        "extra_indices_stride_token",
    ),
    # in bytes
    *int64s(
        "page_stride",
        "row_stride",
        "extra_page_stride",
        "extra_row_stride",
    ),
    *float32s(
        "scale_log2",  # softmax_scale * log2(e)
        "empty_lse",  # lse of a row that attends to nothing
    ),
    *int32s(
        "batch",
        "s_q",
        "h_q",
        "page_size",
        "slots",  # pages * page_size
        "topk",
        "extra_page_size",
        "extra_slots",
        "extra_topk",  # 0 without a second cache
        "max_splits",  # as in dense_decode
        "accum_rows",  # as in dense_decode
    ),
)


# The compiled variants: element type of q and out, cache format
QUERY_AND_CACHE = (("bf16", LATENT.name), ("fp16", LATENT.name), ("bf16", FP8_656.name), ("bf16", FP8_584.name))


@dataclass(frozen=True)
class SparseDecodeConfig:
    """One compiled variant.

    dtype: element type of q and out, and of a latent cache. cache: the name of a CacheFormat.
    cluster: CTAs that share the gathered tiles (1 or 2). access_bytes: as in dense_decode.
    """

    dtype: str
    cache: str
    cluster: int
    access_bytes: int

    @property
    def format(self) -> CacheFormat:
        """The cache's layout."""
        return FORMATS[self.cache]

    @property
    def name(self) -> str:
        """The kernel's name in the manifest, without op and arch."""
        return f"{self.dtype}_{self.cache}_cluster{self.cluster}" + ("_elements" if self.access_bytes == ELEMENT_BYTES else "")


@dataclass(frozen=True)
class SparseDecodeProblem:
    """The shapes of one call. They decide, with the architecture, on variant, grid and workspace.

    cache: the name of a CacheFormat. row_alignment: as in DenseDecodeProblem.
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
    row_alignment: int = MAX_ROW_ALIGNMENT

    @property
    def row_ctas(self) -> int:
        """CTAs along the heads of one query token."""
        return row_ctas(self.arch, self.h_q)

    @property
    def config(self) -> SparseDecodeConfig:
        """The variant that serves this problem."""
        return SparseDecodeConfig(self.dtype, self.cache, *TILINGS[self.arch.name].shape(self.row_ctas, self.row_alignment))

    @property
    def max_keys(self) -> int:
        """Indices of a query token."""
        return self.topk + self.extra_topk

    @property
    def max_splits(self) -> int:
        """The most splits of a request in a batch-invariant call; 0 in other calls, where the plan cuts."""
        return invariant_splits(self.max_keys) if self.batch_invariant else 0

    def num_parts(self, sm_count: int) -> int:
        """Return the number of parts of the plan: as many as keep every SM busy with one CTA."""
        return num_parts(self.arch, self.h_q, self.s_q, sm_count)

    def grid(self, sm_count: int) -> tuple[int, int, int]:
        """Return the CTAs along (heads, query tokens, parts)."""
        return self.row_ctas, self.s_q, self.num_parts(sm_count)


def closed_variants(arch: Arch) -> tuple[SparseDecodeConfig, ...]:
    """Return every variant that ships for an architecture."""
    shapes = TILINGS[arch.name].shapes
    return tuple(SparseDecodeConfig(dtype, cache, *shape) for dtype, cache in QUERY_AND_CACHE for shape in shapes)

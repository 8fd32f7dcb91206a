"""Dense decode: MQA over the paged latent cache. out = softmax(scale * q k^T) v with k = cache rows, v = k[:512]."""

from __future__ import annotations

from dataclasses import dataclass

from .abi import Param, float32s, int32s, int64s, pointers, tensor_maps
from .arch import Arch
from .mla import D_V, DTYPES, ceil_div
from .split_plan import INVARIANT_SPLIT_TILES, NO_SPLIT_LIMIT, TILE_KEYS, accumulator_rows

TILE_ROWS = 64  # query rows (query token x head) of one CTA: the M of a WGMMA
SMALL_PAGES = (16, 32)  # pages smaller than a key tile; beside them any multiple of TILE_KEYS

PARAMS: tuple[Param, ...] = (
    *tensor_maps("kv_map"),  # dims (576, h_kv, page, pages), box (64, 1, min(page, 64), 1), 128-byte swizzle
    *pointers(
        "q",  # dtype [batch, s_q, h_q, 576]
        "block_table",  # int32 [batch, max_pages]
        "cache_seqlens",  # int32 [batch]
        "plan",  # int32 [num_parts, 8]
        "num_splits",  # int32 [batch + 1]
        "out",  # dtype [batch, s_q, h_q, 512]
        "lse",  # fp32 [batch, h_q, s_q], natural log
        "out_accum",  # fp32 [accumulator rows, s_q, h_q, 512], contiguous, normalised within the split
        "lse_accum",  # fp32 [accumulator rows, s_q, h_q], contiguous, base 2; -inf for an empty split
    ),
    # strides in elements
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
        "table_stride",
    ),
    *float32s(
        "scale_log2",  # softmax_scale * log2(e)
        "empty_lse",  # lse of a row that attends to nothing
    ),
    *int32s(
        "s_q",
        "h_q",
        "heads_per_kv",  # h_q / h_kv
        "page_size",
        "causal",  # 1: key j is seen by query token i iff j < length - (s_q - 1 - i)
        "batch",
        "split_tiles",  # as in split_plan
    ),
)


@dataclass(frozen=True)
class DenseDecodeConfig:
    """One compiled variant.

    dtype: element type of q, cache and out ("bf16" or "fp16").
    cluster: CTAs that share each KV tile by multicast (1 or 2); 2 needs an even number of row tiles.
    pairs: every row of q and out begins at a multiple of 4 bytes, so that the kernel may access two elements at a time.
    """

    dtype: str
    cluster: int
    pairs: bool = True

    @property
    def name(self) -> str:
        """The kernel's name in the manifest, without op and arch."""
        return f"{self.dtype}_cluster{self.cluster}" + ("" if self.pairs else "_elements")


@dataclass(frozen=True)
class DenseDecodeProblem:
    """The shapes of one call, which alone decide variant, grid and workspace.

    pages_per_request: columns of the block table, the bound on a request's length.
    pairs: as in DenseDecodeConfig; false only for a base address or stride that is an odd number of elements.
    """

    dtype: str
    batch: int
    s_q: int
    h_q: int
    h_kv: int
    page_size: int
    pages_per_request: int
    batch_invariant: bool = False
    pairs: bool = True

    @property
    def rows(self) -> int:
        """Query rows that share one KV head."""
        return self.s_q * (self.h_q // self.h_kv)

    @property
    def row_tiles(self) -> int:
        """CTAs needed for the query rows of one KV head."""
        return ceil_div(self.rows, TILE_ROWS)

    @property
    def config(self) -> DenseDecodeConfig:
        """The variant that serves this problem."""
        return DenseDecodeConfig(self.dtype, cluster=2 if self.pairs and self.row_tiles % 2 == 0 else 1, pairs=self.pairs)

    @property
    def box_keys(self) -> int:
        """Keys that one TMA box covers."""
        return min(self.page_size, TILE_KEYS)

    @property
    def split_tiles(self) -> int:
        """Where splits may end: anywhere, or at fixed multiples when batch invariant."""
        return INVARIANT_SPLIT_TILES if self.batch_invariant else NO_SPLIT_LIMIT

    @property
    def max_splits(self) -> int:
        """Accumulator rows kept per request: 0 in a free plan, which shares them."""
        if not self.batch_invariant:
            return 0
        splits = ceil_div(ceil_div(self.pages_per_request * self.page_size, TILE_KEYS), INVARIANT_SPLIT_TILES)
        return splits if splits > 1 else 0

    def num_parts(self, sm_count: int) -> int:
        """Parts of the plan: as many as keep every SM busy with one CTA."""
        return max(sm_count // (self.h_kv * max(self.row_tiles, 1)), 1)

    def grid(self, sm_count: int) -> tuple[int, int, int]:
        """CTAs along (row tiles, KV heads, parts)."""
        return self.row_tiles, self.h_kv, self.num_parts(sm_count)

    def accumulator_rows(self, sm_count: int) -> int:
        """Rows of out_accum and lse_accum."""
        if self.batch_invariant:
            return self.batch * self.max_splits
        return accumulator_rows(self.batch, self.num_parts(sm_count))

    def workspace_bytes(self, sm_count: int) -> int:
        """Bytes of out_accum followed by lse_accum."""
        return self.accumulator_rows(sm_count) * self.s_q * self.h_q * (D_V + 1) * 4


def closed_variants(arch: Arch) -> tuple[DenseDecodeConfig, ...]:
    """Every variant that ships for an architecture."""
    del arch
    shapes = ((1, True), (2, True), (1, False))
    return tuple(DenseDecodeConfig(dtype, cluster, pairs) for dtype in DTYPES for cluster, pairs in shapes)

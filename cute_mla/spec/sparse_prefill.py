"""Sparse prefill: each query token attends to its own topk rows of an unpaged latent.

out = softmax(sm_scale * q k^T) v over the valid rows among the first topk_length of a token's topk indices; v = k[:512].

Nothing is split: one or two CTAs take the heads of a token. A group of them takes every grid-th token, so that a token's
prologue and epilogue overlap with its neighbours. A token is numbered over the batch: request * s_q + token of the request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from .abi import Float32, Int32, Int64, Pointer, params_of
from .arch import SM100, Arch
from .dense_decode import SOFTMAX_TERMS, TILE_ROWS, TILINGS
from .mla import BF16, D_LATENT, D_QK, ceil_div
from .split_plan import TILE_KEYS

HEAD_DIMS = (D_QK, D_LATENT)  # columns of q and of a row of the latent
DTYPE = BF16  # of q, kv and out
MAX_GROUPS = (1 << 16) - 1  # groups of CTAs: what the third dimension of a grid can hold
MAX_TOKENS = (1 << 31) - 1 - MAX_GROUPS  # so that the token after a group's last one can be counted in 32 bits


class SparsePrefillArguments(NamedTuple):
    """Launch arguments of sparse_prefill, in ABI order: the one list that host, launch and kernel share."""

    q: Pointer  # dtype [batch, s_q, h_q, d_qk]
    kv: Pointer  # dtype [batch, s_kv, d_qk], or all requests' rows one behind the other (kv_stride_batch 0)
    kv_offsets: Pointer  # int32 [batch + 1]: a request's rows are kv_offsets[r] .. kv_offsets[r + 1] - 1; null: 0 .. s_kv - 1
    indices: Pointer  # int32 [batch, s_q, topk], counted from the request's first row; an index outside the request's rows is skipped
    topk_length: Pointer  # int32 [batch * s_q], or null: all topk indices count
    attn_sink: Pointer  # fp32 [h_q], natural log, or null: out is scaled by exp(lse) / (exp(lse) + exp(sink))
    out: Pointer  # dtype [batch, s_q, h_q, 512]
    max_logits: Pointer  # fp32 [batch, s_q, h_q]: the greatest sm_scale * score of a row, -inf for a row that attends to nothing
    lse: Pointer  # fp32 [batch, s_q, h_q], natural log
    lse_indexer: Pointer  # fp32 [batch, s_q, h_q], natural log: over the first indexer_topk indices of a token alone; null: not asked for
    # in elements
    q_stride_batch: Int64
    q_stride_token: Int64
    q_stride_head: Int64
    out_stride_batch: Int64
    out_stride_token: Int64
    out_stride_head: Int64
    max_logits_stride_batch: Int64
    max_logits_stride_token: Int64
    max_logits_stride_head: Int64
    lse_stride_batch: Int64
    lse_stride_token: Int64
    lse_stride_head: Int64
    lse_indexer_stride_batch: Int64
    lse_indexer_stride_token: Int64
    lse_indexer_stride_head: Int64
    indices_stride_batch: Int64
    indices_stride_token: Int64
    # in bytes, multiples of 16
    kv_stride_batch: Int64
    kv_stride_row: Int64
    scale_log2: Float32  # sm_scale * log2(e)
    empty_lse: Float32  # lse of a row that attends to nothing
    tokens: Int32  # batch * s_q
    s_q: Int32
    h_q: Int32
    s_kv: Int32  # rows of kv, or with kv_stride_batch of a request's
    topk: Int32
    indexer_topk: Int32  # 1 .. topk; not read without lse_indexer


PARAMS = params_of(SparsePrefillArguments)


@dataclass(frozen=True)
class SparsePrefillConfig:
    """One compiled variant.

    dtype: element type of q, kv and out. d_qk: columns of a row, 576 or 512.
    cluster: CTAs that share the gathered tiles (1 or 2); on sm100, the CTAs along the heads.
    rows64: on sm120: keys on M and 64 rows a CTA, for more heads than the 16 rows of the other kernel.
    """

    dtype: str
    d_qk: int
    cluster: int
    rows64: bool = False

    @property
    def name(self) -> str:
        """The kernel's name in the manifest, without op and arch."""
        return f"{self.dtype}_d{self.d_qk}_" + ("rows64" if self.rows64 else f"cluster{self.cluster}")


def order_terms(config: SparsePrefillConfig, arch: Arch) -> dict[str, Any]:
    """Return the terms of a variant's order; `cluster` is one on SM100 alone, where up to 64 heads and more have two kernels.

    They are those of sparse decode over a 16-bit latent, too, where no request is cut.
    """
    return {
        "op": "sparse_attention",
        "revision": 1,
        "arch": arch.name,
        "dtype": config.dtype,
        "d_qk": config.d_qk,
        "rows": f"{config.cluster} CTAs" if arch is SM100 else "keys on M" if config.rows64 else "any",
        "keys": f"tiles of {TILE_KEYS if TILINGS[arch.name].rows == TILE_ROWS else TILE_KEYS // 2}, as given",
        "split": "none",
        **SOFTMAX_TERMS,
        "p": f"{config.dtype}, unnormalised",
    }


@dataclass(frozen=True)
class SparsePrefillProblem:
    """The shapes of one call. They decide, with the architecture, on variant and grid."""

    arch: Arch
    dtype: str
    d_qk: int
    batch: int
    s_q: int
    h_q: int

    @property
    def tokens(self) -> int:
        """Query tokens of all requests."""
        return self.batch * self.s_q

    @property
    def row_ctas(self) -> int:
        """CTAs along the heads of one query token."""
        return ceil_div(self.h_q, TILE_ROWS)

    @property
    def config(self) -> SparsePrefillConfig:
        """The variant that serves this problem."""
        tiling = TILINGS[self.arch.name]
        cluster = self.row_ctas if tiling.paired else tiling.cluster(self.row_ctas)
        return SparsePrefillConfig(self.dtype, self.d_qk, cluster, tiling.takes_rows64(self.h_q))

    def grid(self, sm_count: int) -> tuple[int, int, int]:
        """Return the CTAs along (heads, 1, tokens that run at the same time): as many as keep every SM busy with one CTA."""
        return self.row_ctas, 1, min(max(sm_count // self.row_ctas, 1), self.tokens, MAX_GROUPS)


def closed_variants(arch: Arch) -> tuple[SparsePrefillConfig, ...]:
    """Return every variant that ships for an architecture."""
    tiling = TILINGS[arch.name]
    # where CTAs come in pairs, a kernel of its own has up to TILE_ROWS heads, for which the rows of a pair would be half empty
    clusters = (1, 2) if tiling.paired else tiling.clusters
    forms = (False, True) if tiling.takes_rows64(TILE_ROWS) else (False,)
    return tuple(SparsePrefillConfig(DTYPE, d_qk, cluster, form) for d_qk in HEAD_DIMS for cluster in clusters for form in forms)

"""First kernel of the backward of dense prefill: dQ, and what the second kernel needs of every query row.

With the forward's lse and out, and dout, the gradient of out, for each sequence and query head:

    p_ij = exp(softmax_scale * <q_i, k_j> - lse_i)    delta_i = <out_i, dout_i>
    ds_ij = p_ij (<dout_i, v_j> - delta_i)            dq_i = softmax_scale * sum_j ds_ij k_j

Variants and work items are those of dense_prefill, but for the rows of an item, TILE_ROWS on every architecture, and no CTAs share one.
The kernel leaves statistics of the rows in the workspace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from .abi import Float32, Int32, Int64, Pointer, TensorMap, params_of
from .arch import SM90, SM100, Arch
from .dense_prefill import DensePrefillConfig, DensePrefillProblem
from .dense_prefill import closed_variants as forward_variants
from .mla import BF16, ceil_div

DTYPE = BF16  # of all operands and gradients, but lse
TILE_ROWS = 128  # query rows of one work item
# by architecture and d_qk: keys of one tile, and rows of the boxes of k and v
TILE_KEYS = {SM90.name: {192: 96, 128: 128, 256: 64}, SM100.name: {192: 128, 128: 128, 256: 64}}
STATISTICS = 2  # of a row: lse in log2 units, delta
STATISTIC_BYTES = 4  # fp32
WORKSPACE_ALIGNMENT = 128  # bytes, of which the size of the workspace is a multiple


class DensePrefillDqArguments(NamedTuple):
    """Launch arguments of dense_prefill_dq, in ABI order: the one list that host, launch and kernel share."""

    q_map: TensorMap  # dims (d_qk, h_q, total_q), box (64, 1, 64), 128-byte swizzle
    dout_map: TensorMap  # dims (d_v, h_q, total_q), likewise
    k_map: TensorMap  # dims (d_qk, h_kv, total_k), box (64, 1, TILE_KEYS), 128-byte swizzle
    v_map: TensorMap  # dims (d_v, h_kv, total_k), likewise
    q: Pointer  # dtype [total_q, h_q, d_qk]
    dout: Pointer  # dtype [total_q, h_q, d_v]
    out: Pointer  # dtype [total_q, h_q, d_v]: the forward's result
    lse: Pointer  # fp32 [total_q, h_q], natural log; a row with +inf or -inf has no gradient
    cu_seqlens_q: Pointer  # int32 [batch + 1], as in DensePrefillArguments
    cu_seqlens_k: Pointer  # int32 [batch + 1]
    dq: Pointer  # dtype [total_q, h_q, d_qk]
    statistics: Pointer  # fp32 [2, h_q, statistics_stride], out: lse * log2(e), +inf for a row without gradient; delta
    q_copy: Pointer  # null, as the next: the launch of the built kernels has a place for both
    dout_copy: Pointer
    # in elements
    q_stride_token: Int64
    q_stride_head: Int64
    dout_stride_token: Int64
    dout_stride_head: Int64
    out_stride_token: Int64
    out_stride_head: Int64
    lse_stride_token: Int64
    lse_stride_head: Int64
    dq_stride_token: Int64
    dq_stride_head: Int64
    statistics_stride: Int64  # of a head
    softmax_scale: Float32
    scale_log2: Float32  # softmax_scale * log2(e)
    batch: Int32
    h_q: Int32
    heads_per_kv: Int32  # h_q / h_kv
    total_q: Int32
    total_k: Int32
    row_blocks: Int32  # blocks of TILE_ROWS query rows that the longest sequence may have
    causal: Int32  # 1: query i of s_q sees key j of s_k iff j <= i + s_k - s_q


PARAMS = params_of(DensePrefillDqArguments)


@dataclass(frozen=True)
class DensePrefillDqProblem(DensePrefillProblem):
    """The shapes of one call, as in dense_prefill, of whose items an item has the rows of one tile."""

    @property
    def config(self) -> DensePrefillConfig:
        """The variant that serves this problem."""
        return replace(super().config, cluster=1)

    @property
    def row_blocks(self) -> int:
        """Blocks of query rows that a sequence may have."""
        return ceil_div(self.max_seqlen_q, TILE_ROWS)


@dataclass(frozen=True)
class BackwardWorkspace:
    """The workspace that both kernels of the backward share: the statistics of every row."""

    total_q: int
    h_q: int

    @property
    def statistics_stride(self) -> int:
        """Return the fp32 numbers from one head's statistics to the next's: the rows, rounded up to 16 bytes for TMA."""
        return ceil_div(self.total_q, 4) * 4

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""
        rows = STATISTICS * self.h_q * self.statistics_stride * STATISTIC_BYTES
        return ceil_div(rows, WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT


def closed_variants(arch: Arch) -> tuple[DensePrefillConfig, ...]:
    """Return every variant that ships for an architecture."""
    return tuple(replace(config, cluster=1) for config in forward_variants(arch) if config.dtype == DTYPE)

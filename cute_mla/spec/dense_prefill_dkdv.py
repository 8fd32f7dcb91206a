"""Second kernel of the backward of dense prefill: dK and dV, with p and ds of spec/dense_prefill_dq.py.

    dv_j = sum_i p_ij dout_i    dk_j = softmax_scale * sum_i ds_ij q_i

over the query rows i of the sequence that see key j, of all query heads that share the KV head.

A work item is TILE_KEYS keys of one KV head of one sequence, in the order of dense_prefill's items, but with the first block in
front: under a causal mask most rows see it. A key that no row sees gets 0; rows of dk and dv that belong to no sequence are not written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .abi import Float32, Int32, Int64, Pointer, TensorMap, params_of
from .arch import SM90, SM100, Arch
from .dense_prefill import HEAD_DIMS
from .dense_prefill_dq import DTYPE
from .mla import ceil_div

# by architecture and d_qk: keys of one work item
TILE_KEYS = {SM90.name: {192: 128, 128: 128, 256: 64}, SM100.name: {192: 128, 128: 128, 256: 128}}
# by architecture and d_qk: work items of a block of keys: 2 where dK and dV are an item each, since tensor memory holds one of them
ITEM_SUMS = {SM90.name: {192: 1, 128: 1, 256: 1}, SM100.name: {192: 1, 128: 1, 256: 2}}
# by architecture and d_qk: query rows of one tile, and rows of the boxes of q, dout and the statistics
TILE_QUERIES = {SM90.name: {192: 64, 128: 64, 256: 64}, SM100.name: {192: 96, 128: 128, 256: 64}}


class DensePrefillDkdvArguments(NamedTuple):
    """Launch arguments of dense_prefill_dkdv, in ABI order: the one list that host, launch and kernel share."""

    q_map: TensorMap  # dims (d_qk, h_q, total_q), box (64, 1, tile queries), 128-byte swizzle
    dout_map: TensorMap  # dims (d_v, h_q, total_q), likewise
    k_map: TensorMap  # dims (d_qk, h_kv, total_k), box (64, 1, 64), 128-byte swizzle
    v_map: TensorMap  # dims (d_v, h_kv, total_k), likewise
    statistics_map: TensorMap  # fp32, dims (total_q, h_q, 2), box (tile queries, 1, 2), no swizzle: what dense_prefill_dq left
    cu_seqlens_q: Pointer  # int32 [batch + 1], as in DensePrefillArguments
    cu_seqlens_k: Pointer  # int32 [batch + 1]
    dk: Pointer  # dtype [total_k, h_kv, d_qk]
    dv: Pointer  # dtype [total_k, h_kv, d_v]
    # in elements
    dk_stride_token: Int64
    dk_stride_head: Int64
    dv_stride_token: Int64
    dv_stride_head: Int64
    softmax_scale: Float32
    scale_log2: Float32  # softmax_scale * log2(e)
    batch: Int32
    h_kv: Int32
    heads_per_kv: Int32  # h_q / h_kv
    total_q: Int32
    total_k: Int32
    query_limit: Int32  # query rows of a sequence, from its first on, that dense_prefill_dq has served: those behind give nothing
    row_blocks: Int32  # blocks of TILE_KEYS rows of k and v that the longest sequence may have
    causal: Int32  # 1: query i of s_q sees key j of s_k iff j <= i + s_k - s_q
    aligned: Int32  # 1: rows of dk and dv begin at multiples of 16 bytes; 0: at any element


PARAMS = params_of(DensePrefillDkdvArguments)


@dataclass(frozen=True)
class DensePrefillDkdvConfig:
    """One compiled variant. dtype: element type of every tensor but the statistics. d_qk: columns of q and k."""

    dtype: str
    d_qk: int

    cluster = 1  # CTAs do not work together

    @property
    def d_v(self) -> int:
        """Columns of v and dout."""
        return HEAD_DIMS[self.d_qk]

    @property
    def name(self) -> str:
        """The kernel's name in the manifest, without op and arch."""
        return f"{self.dtype}_d{self.d_qk}"


@dataclass(frozen=True)
class DensePrefillDkdvProblem:
    """The shapes of one call. They decide, with the architecture, on variant and grid.

    max_seqlen_k: keys of the longest sequence.
    """

    arch: Arch
    dtype: str
    d_qk: int
    batch: int
    h_kv: int
    max_seqlen_k: int

    @property
    def config(self) -> DensePrefillDkdvConfig:
        """The variant that serves this problem."""
        return DensePrefillDkdvConfig(self.dtype, self.d_qk)

    @property
    def row_blocks(self) -> int:
        """Blocks of keys that a sequence may have."""
        return ceil_div(self.max_seqlen_k, TILE_KEYS[self.arch.name][self.d_qk])

    @property
    def items(self) -> int:
        """Work items, including those of blocks that a sequence may not have."""
        return self.row_blocks * ITEM_SUMS[self.arch.name][self.d_qk] * self.batch * self.h_kv

    def grid(self, sm_count: int) -> tuple[int, int, int]:
        """Return one CTA per SM, or per item if there are fewer items."""
        return min(self.items, sm_count), 1, 1


def closed_variants(arch: Arch) -> tuple[DensePrefillDkdvConfig, ...]:
    """Return every variant that ships for an architecture."""
    return tuple(DensePrefillDkdvConfig(DTYPE, d_qk) for d_qk in HEAD_DIMS)

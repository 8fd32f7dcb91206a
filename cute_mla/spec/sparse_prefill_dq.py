"""sparse_prefill_dq: dQ of sparse prefill, and what sparse_prefill_dkv needs of every score.

    p_j = exp(sm_scale <q, k_j> - lse')     dS_j = p_j (<dout, k_j[:512]> - delta')     dq = sm_scale sum_j dS_j k_j

over the valid rows among the first topk_length of a token's indices, with lse' and delta' as row_statistics leaves them. A launch takes a
chunk of tokens, and leaves P / sm_scale and dS of the chunk, rounded. Tiles of 64 slots that name no row are not written.
"""

from __future__ import annotations

from typing import NamedTuple

from .abi import Float32, Int32, Int64, Pointer, TensorMap, params_of
from .arch import Arch
from .dense_decode import TILE_ROWS, TILINGS
from .mla import BF16, ceil_div
from .sparse_prefill import HEAD_DIMS, SparsePrefillConfig


class SparsePrefillDqArguments(NamedTuple):
    """Launch arguments of sparse_prefill_dq, in ABI order: the one list that host, launch and kernel share."""

    q_map: TensorMap  # as in SparsePrefillDkvArguments, as the next
    dout_map: TensorMap
    q: Pointer  # bf16 [batch, s_q, h_q, d_qk]
    kv: Pointer  # as in SparsePrefillArguments, as the next three
    kv_offsets: Pointer
    indices: Pointer
    topk_length: Pointer
    statistics: Pointer  # fp32 [2, batch * s_q, h_q], as in RowStatisticsArguments
    dq: Pointer  # bf16 [batch, s_q, h_q, d_qk], out
    probs: Pointer  # bf16 [tokens, tiles, h_q, 64], out: P / sm_scale, of the chunk
    dscores: Pointer  # bf16, likewise: dS
    # in elements; those of dq are multiples of 8
    q_stride_batch: Int64
    q_stride_token: Int64
    q_stride_head: Int64
    dq_stride_batch: Int64
    dq_stride_token: Int64
    dq_stride_head: Int64
    indices_stride_batch: Int64
    indices_stride_token: Int64
    # in bytes, multiples of 16
    kv_stride_batch: Int64
    kv_stride_row: Int64
    sm_scale: Float32
    scale_log2: Float32  # sm_scale * log2(e)
    inverse_scale: Float32  # 1 / sm_scale
    first_token: Int32  # of the chunk, counted over the batch
    tokens: Int32  # of the chunk
    all_tokens: Int32  # batch * s_q
    s_q: Int32
    h_q: Int32
    s_kv: Int32
    topk: Int32
    tiles: Int32  # of a token in P and dS


PARAMS = params_of(SparsePrefillDqArguments)


def config_for(arch: Arch, d_qk: int, h_q: int) -> SparsePrefillConfig:
    """Return the variant for rows of d_qk columns of so many heads. On SM100 a pair of CTAs shares what a token's heads read."""
    return SparsePrefillConfig(BF16, d_qk, ceil_div(h_q, TILE_ROWS) if TILINGS[arch.name].paired else 1)


def grid(h_q: int, tokens: int, sm_count: int) -> tuple[int, int, int]:
    """Return the CTAs along (heads, 1, tokens that run at the same time)."""
    row_ctas = ceil_div(h_q, TILE_ROWS)
    return row_ctas, 1, min(max(sm_count // row_ctas, 1), tokens)


def closed_variants(arch: Arch) -> tuple[SparsePrefillConfig, ...]:
    """Return every variant that ships for an architecture."""
    heads = (TILE_ROWS, 2 * TILE_ROWS) if TILINGS[arch.name].paired else (TILE_ROWS,)
    return tuple(config_for(arch, d_qk, h_q) for d_qk in HEAD_DIMS for h_q in heads)

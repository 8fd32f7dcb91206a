"""dense_prefill_dq: gradient of q in the backward pass of dense prefill, and the statistics of its rows for dense_prefill_dkdv."""

from __future__ import annotations

from typing import NamedTuple

from .abi import Float32, Int32, Int64, Pointer, TensorMap, params_of


class DensePrefillDqArguments(NamedTuple):
    """Launch arguments of dense_prefill_dq, in ABI order: the one list that host, launch and kernel share."""

    q_map: TensorMap  # as in dense_prefill
    k_map: TensorMap
    v_map: TensorMap
    dout_map: TensorMap  # dims (128, h_q, total_q), likewise
    q: Pointer  # dtype [total_q, h_q, d_qk]
    dout: Pointer  # dtype [total_q, h_q, 128]
    out: Pointer  # dtype [total_q, h_q, 128]
    lse: Pointer  # fp32 [total_q, h_q], natural log
    cu_seqlens_q: Pointer  # as in dense_prefill
    cu_seqlens_k: Pointer
    dq: Pointer  # dtype [total_q, h_q, d_qk]
    lse_log2: Pointer  # fp32 [h_q, statistics_stride_head]
    delta: Pointer  # fp32 [h_q, statistics_stride_head]
    q_copy: Pointer  # dtype [total_q, h_q, d_qk], or null
    dout_copy: Pointer  # dtype [total_q, h_q, 128], or null
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
    statistics_stride_head: Int64
    scale_log2: Float32  # softmax_scale * log2(e)
    softmax_scale: Float32
    batch: Int32
    h_q: Int32
    heads_per_kv: Int32
    total_q: Int32
    total_k: Int32
    row_blocks: Int32
    causal: Int32


PARAMS = params_of(DensePrefillDqArguments)

"""dense_prefill_dkdv: gradients of k and v in the backward pass of dense prefill, from the statistics that dense_prefill_dq left."""

from __future__ import annotations

from typing import NamedTuple

from .abi import Float32, Int32, Int64, Pointer, TensorMap, params_of


class DensePrefillDkdvArguments(NamedTuple):
    """Launch arguments of dense_prefill_dkdv, in ABI order: the one list that host, launch and kernel share."""

    q_map: TensorMap  # as in dense_prefill_dq, or of the copies in the workspace
    k_map: TensorMap
    v_map: TensorMap
    dout_map: TensorMap
    lse_log2: Pointer  # fp32 [h_q, statistics_stride_head]
    delta: Pointer  # fp32 [h_q, statistics_stride_head]
    cu_seqlens_q: Pointer  # as in dense_prefill
    cu_seqlens_k: Pointer
    dk: Pointer  # dtype [total_k, h_kv, d_qk]
    dv: Pointer  # dtype [total_k, h_kv, 128]
    # in elements
    dk_stride_token: Int64
    dk_stride_head: Int64
    dv_stride_token: Int64
    dv_stride_head: Int64
    statistics_stride_head: Int64
    scale_log2: Float32
    softmax_scale: Float32
    batch: Int32
    h_kv: Int32
    heads_per_kv: Int32
    total_q: Int32
    total_k: Int32
    key_blocks: Int32  # blocks of KEY_ROWS keys that the longest sequence may have
    causal: Int32


PARAMS = params_of(DensePrefillDkdvArguments)

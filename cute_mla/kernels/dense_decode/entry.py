"""The entry of the dense decode kernels: the parameters of the ABI, in order, handed on by meaning."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.experimental import cuda as tensor_maps

from ...spec.dense_decode import PARAMS
from ...spec.mla import D_QK
from ...spec.split_plan import TILE_KEYS
from ..parts.attention_kernel import AttentionKernel
from ..parts.lengths import Lengths
from ..parts.work import Schedule
from .operands import BOX_COLUMNS, Operands


class DenseDecode(AttentionKernel):
    """One variant of a kernel. An architecture's kernel is a subclass that has `threads` and `run`."""

    op = "dense_decode"
    params = PARAMS

    def run(self, operands: Operands) -> None:
        """The body of the kernel."""
        raise NotImplementedError

    @cute.jit
    def host(
        self,
        kv_map: cute.Pointer, q: cute.Pointer, block_table: cute.Pointer, cache_seqlens: cute.Pointer,
        plan: cute.Pointer, num_splits: cute.Pointer, out: cute.Pointer, lse: cute.Pointer,
        out_accum: cute.Pointer, lse_accum: cute.Pointer,
        q_stride_batch: Int64, q_stride_token: Int64, q_stride_head: Int64,
        out_stride_batch: Int64, out_stride_token: Int64, out_stride_head: Int64,
        lse_stride_batch: Int64, lse_stride_head: Int64, lse_stride_token: Int64, table_stride: Int64,
        scale_log2: Float32, empty_lse: Float32,
        s_q: Int32, h_q: Int32, heads_per_kv: Int32, page_size: Int32, causal: Int32, batch: Int32,
        max_keys: Int32, max_splits: Int32, accum_rows: Int32,
    ):  # fmt: skip
        """Compiled for its types, never run: the runtime launches the kernel itself."""
        typed_map = tensor_maps.create_tensor_map_tiled(
            global_address=kv_map.toint(),
            dtype=self.dtype,
            global_dims=[D_QK, TILE_KEYS],
            global_strides=[D_QK // 8],
            box_dims=[BOX_COLUMNS, TILE_KEYS],
            swizzle=tensor_maps.TensorMapSwizzle.s128b,
        )
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            typed_map, q, block_table, cache_seqlens, plan, num_splits, out, lse, out_accum, lse_accum,
            q_stride_batch, q_stride_token, q_stride_head, out_stride_batch, out_stride_token, out_stride_head,
            lse_stride_batch, lse_stride_head, lse_stride_token, table_stride, scale_log2, empty_lse,
            s_q, h_q, heads_per_kv, page_size, causal, batch, max_keys, max_splits, accum_rows,
        ).launch(grid=(self.config.cluster, 1, 1), block=(self.threads, 1, 1), cluster=(self.config.cluster, 1, 1))  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        kv_map: cutlass.GridConstant[tensor_maps.TensorMap], q: cute.Pointer, block_table: cute.Pointer,
        cache_seqlens: cute.Pointer, plan: cute.Pointer, num_splits: cute.Pointer, out: cute.Pointer, lse: cute.Pointer,
        out_accum: cute.Pointer, lse_accum: cute.Pointer,
        q_stride_batch: Int64, q_stride_token: Int64, q_stride_head: Int64,
        out_stride_batch: Int64, out_stride_token: Int64, out_stride_head: Int64,
        lse_stride_batch: Int64, lse_stride_head: Int64, lse_stride_token: Int64, table_stride: Int64,
        scale_log2: Float32, empty_lse: Float32,
        s_q: Int32, h_q: Int32, heads_per_kv: Int32, page_size: Int32, causal: Int32, batch: Int32,
        max_keys: Int32, max_splits: Int32, accum_rows: Int32,
    ):  # fmt: skip
        operands = Operands(
            kv_map, q, block_table, out, lse, out_accum, lse_accum,
            (q_stride_batch, q_stride_token, q_stride_head), (out_stride_batch, out_stride_token, out_stride_head),
            (lse_stride_batch, lse_stride_token, lse_stride_head), table_stride, scale_log2, empty_lse,
            s_q, h_q, heads_per_kv, page_size, causal,
            Schedule(plan, num_splits, Lengths(cache_seqlens, None, max_keys, Int32(0)), batch, max_splits, accum_rows),
        )  # fmt: skip
        self.run(operands)

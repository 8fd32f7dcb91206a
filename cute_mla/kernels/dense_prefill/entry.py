"""The entry of the dense prefill kernels: the parameters of the ABI, in order, handed on by meaning."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.experimental import cuda as tensor_maps

from ...spec.dense_prefill import BOX_COLUMNS, BOX_ROWS, D_V, PARAMS
from ..attention.kernel import AttentionKernel
from ..attention.tiles import ELEMENT_BYTES
from .operands import Items, Operands


class DensePrefill(AttentionKernel):
    """One variant of a kernel. An architecture's kernel is a subclass that has `threads`, `rows_each` and `run`.

    rows_each: query rows of a work item."""

    op = "dense_prefill"
    params = PARAMS
    rows_each: int

    def run(self, operands: Operands) -> None:
        """The body of the kernel."""
        raise NotImplementedError

    def typed_map(self, pointer: cute.Pointer, columns: int) -> Any:
        """A map of the type of q, k or v: 64 rows of 64 columns of a head a box."""
        return tensor_maps.create_tensor_map_tiled(
            global_address=pointer.toint(),
            dtype=self.dtype,
            global_dims=[columns, 1, BOX_ROWS],
            global_strides=[columns * ELEMENT_BYTES // 16, columns * ELEMENT_BYTES // 16],
            box_dims=[BOX_COLUMNS, 1, BOX_ROWS],
            swizzle=tensor_maps.TensorMapSwizzle.s128b,
        )

    @cute.jit
    def host(
        self,
        q_map: cute.Pointer, k_map: cute.Pointer, v_map: cute.Pointer, q: cute.Pointer,
        cu_seqlens_q: cute.Pointer, cu_seqlens_k: cute.Pointer, out: cute.Pointer, lse: cute.Pointer,
        q_stride_token: Int64, q_stride_head: Int64, out_stride_token: Int64, out_stride_head: Int64,
        lse_stride_token: Int64, lse_stride_head: Int64, scale_log2: Float32, empty_lse: Float32,
        batch: Int32, h_q: Int32, heads_per_kv: Int32, total_q: Int32, total_k: Int32, row_blocks: Int32, causal: Int32,
    ):  # fmt: skip
        """Compiled for its types, never run: the runtime launches the kernel itself.

        Unless told that there is a CTA a multiprocessor, ptxas ignores setmaxnreg on Blackwell (C7508)."""
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            self.typed_map(q_map, self.config.d_qk), self.typed_map(k_map, self.config.d_qk), self.typed_map(v_map, D_V),
            q, cu_seqlens_q, cu_seqlens_k, out, lse, q_stride_token, q_stride_head, out_stride_token, out_stride_head,
            lse_stride_token, lse_stride_head, scale_log2, empty_lse,
            batch, h_q, heads_per_kv, total_q, total_k, row_blocks, causal,
        ).launch(grid=(1, 1, 1), block=(self.threads, 1, 1), min_blocks_per_mp=1)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q_map: cutlass.GridConstant[tensor_maps.TensorMap], k_map: cutlass.GridConstant[tensor_maps.TensorMap],
        v_map: cutlass.GridConstant[tensor_maps.TensorMap], q: cute.Pointer,
        cu_seqlens_q: cute.Pointer, cu_seqlens_k: cute.Pointer, out: cute.Pointer, lse: cute.Pointer,
        q_stride_token: Int64, q_stride_head: Int64, out_stride_token: Int64, out_stride_head: Int64,
        lse_stride_token: Int64, lse_stride_head: Int64, scale_log2: Float32, empty_lse: Float32,
        batch: Int32, h_q: Int32, heads_per_kv: Int32, total_q: Int32, total_k: Int32, row_blocks: Int32, causal: Int32,
    ):  # fmt: skip
        operands = Operands(
            q_map, k_map, v_map, q, out, lse, (q_stride_token, q_stride_head), (out_stride_token, out_stride_head),
            (lse_stride_token, lse_stride_head), scale_log2, empty_lse,
            Items(
                cu_seqlens_q, cu_seqlens_k, batch, h_q, heads_per_kv, total_q, total_k, row_blocks, causal != 0, self.rows_each
            ),
        )  # fmt: skip
        self.run(operands)

"""The entry of the dense decode kernels: the parameters of the ABI, in order, handed on by meaning."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.experimental import cuda as tensor_maps

from ...spec.arch import Arch
from ...spec.dense_decode import FP8, LATENT, PARAMS, DenseDecodeConfig
from ...spec.mla import D_QK
from ...spec.split_plan import TILE_KEYS
from ..attention.kernel import AttentionKernel
from ..attention.lengths import Lengths
from ..attention.split_kv_scheduler import Schedule
from .operands import BOX_BYTES_PER_KEY, Fp8Cache, Operands


class DenseDecode(AttentionKernel):
    """One variant of a kernel. An architecture's kernel is a subclass that has `threads` and `run`."""

    op = "dense_decode"
    params = PARAMS

    def __init__(self, config: DenseDecodeConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        self.cache_dtype = self.dtype if config.operands == LATENT else cutlass.Float8E4M3FN
        self.query_dtype = cutlass.Float8E4M3FN if config.operands == FP8 else self.dtype

    def elements(self) -> dict[str, type[cutlass.Numeric]]:
        """What the pointers among the parameters point to, if not to int32."""
        return {**super().elements(), "q": self.query_dtype, "cache": cutlass.Uint8, **dict.fromkeys(("descale_q", "descale_k"), Float32)}

    def run(self, operands: Operands) -> None:
        """The body of the kernel."""
        raise NotImplementedError

    @cute.jit
    def host(
        self,
        kv_map: cute.Pointer, q: cute.Pointer, cache: cute.Pointer, descale_q: cute.Pointer, descale_k: cute.Pointer,
        block_table: cute.Pointer, cache_seqlens: cute.Pointer, plan: cute.Pointer, num_splits: cute.Pointer,
        out: cute.Pointer, lse: cute.Pointer, out_accum: cute.Pointer, lse_accum: cute.Pointer,
        q_stride_batch: Int64, q_stride_token: Int64, q_stride_head: Int64,
        out_stride_batch: Int64, out_stride_token: Int64, out_stride_head: Int64,
        lse_stride_batch: Int64, lse_stride_head: Int64, lse_stride_token: Int64, table_stride: Int64,
        page_stride: Int64, row_stride: Int64, scale_log2: Float32, empty_lse: Float32,
        s_q: Int32, h_q: Int32, heads_per_kv: Int32, page_size: Int32, pages: Int32, causal: Int32, batch: Int32,
        max_keys: Int32, max_splits: Int32, accum_rows: Int32,
    ):  # fmt: skip
        """Compiled for its types, never run: the runtime launches the kernel itself."""
        typed_map = tensor_maps.create_tensor_map_tiled(
            global_address=kv_map.toint(),
            dtype=self.cache_dtype,
            global_dims=[D_QK, TILE_KEYS],
            global_strides=[D_QK // 8],
            box_dims=[BOX_BYTES_PER_KEY * 8 // self.cache_dtype.width, TILE_KEYS],
            swizzle=tensor_maps.TensorMapSwizzle.s128b,
        )
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            typed_map, q, cache, descale_q, descale_k, block_table, cache_seqlens, plan, num_splits, out, lse,
            out_accum, lse_accum,
            q_stride_batch, q_stride_token, q_stride_head, out_stride_batch, out_stride_token, out_stride_head,
            lse_stride_batch, lse_stride_head, lse_stride_token, table_stride, page_stride, row_stride,
            scale_log2, empty_lse, s_q, h_q, heads_per_kv, page_size, pages, causal, batch, max_keys, max_splits, accum_rows,
        ).launch(grid=(self.config.cluster, 1, 1), block=(self.threads, 1, 1), cluster=(self.config.cluster, 1, 1))  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        kv_map: cutlass.GridConstant[tensor_maps.TensorMap], q: cute.Pointer, cache: cute.Pointer,
        descale_q: cute.Pointer, descale_k: cute.Pointer, block_table: cute.Pointer, cache_seqlens: cute.Pointer,
        plan: cute.Pointer, num_splits: cute.Pointer, out: cute.Pointer, lse: cute.Pointer,
        out_accum: cute.Pointer, lse_accum: cute.Pointer,
        q_stride_batch: Int64, q_stride_token: Int64, q_stride_head: Int64,
        out_stride_batch: Int64, out_stride_token: Int64, out_stride_head: Int64,
        lse_stride_batch: Int64, lse_stride_head: Int64, lse_stride_token: Int64, table_stride: Int64,
        page_stride: Int64, row_stride: Int64, scale_log2: Float32, empty_lse: Float32,
        s_q: Int32, h_q: Int32, heads_per_kv: Int32, page_size: Int32, pages: Int32, causal: Int32, batch: Int32,
        max_keys: Int32, max_splits: Int32, accum_rows: Int32,
    ):  # fmt: skip
        operands = Operands(
            kv_map, q, Fp8Cache(cache, page_stride, row_stride, pages), (descale_q, descale_k), block_table,
            out, lse, out_accum, lse_accum,
            (q_stride_batch, q_stride_token, q_stride_head), (out_stride_batch, out_stride_token, out_stride_head),
            (lse_stride_batch, lse_stride_token, lse_stride_head), table_stride, scale_log2, empty_lse,
            s_q, h_q, heads_per_kv, page_size, causal,
            Schedule(plan, num_splits, Lengths(cache_seqlens, None, max_keys, Int32(0)), batch, max_splits, accum_rows),
        )  # fmt: skip
        self.run(operands)

"""The entry of the sparse decode kernels: the parameters of the ABI, in order, handed on by meaning."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute

from ...spec.cache_format import CacheFormat
from ...spec.sparse_decode import PARAMS
from ..attention.kernel import AttentionKernel
from ..attention.lengths import Lengths
from ..attention.split_kv_scheduler import Schedule
from .operands import Operands, SlotCache


class SparseDecode(AttentionKernel):
    """One variant of a kernel. An architecture's kernel is a subclass that has `threads` and `run`."""

    op = "sparse_decode"
    params = PARAMS

    @property
    def format(self) -> CacheFormat:
        """The cache's layout."""
        return self.config.format

    def elements(self) -> dict[str, type[cutlass.Numeric]]:
        """As of every decode kernel; caches are bytes."""
        return {**super().elements(), "cache": Uint8, "extra_cache": Uint8}

    def run(self, operands: Operands) -> None:
        """The body of the kernel."""
        raise NotImplementedError

    @cute.jit
    def host(
        self,
        q: cute.Pointer, cache: cute.Pointer, indices: cute.Pointer, topk_length: cute.Pointer,
        extra_cache: cute.Pointer, extra_indices: cute.Pointer, extra_topk_length: cute.Pointer, attn_sink: cute.Pointer,
        plan: cute.Pointer, num_splits: cute.Pointer, out: cute.Pointer, lse: cute.Pointer,
        out_accum: cute.Pointer, lse_accum: cute.Pointer,
        q_stride_batch: Int64, q_stride_token: Int64, q_stride_head: Int64,
        out_stride_batch: Int64, out_stride_token: Int64, out_stride_head: Int64,
        lse_stride_batch: Int64, lse_stride_head: Int64, lse_stride_token: Int64,
        indices_stride_batch: Int64, indices_stride_token: Int64,
        extra_indices_stride_batch: Int64, extra_indices_stride_token: Int64,
        page_stride: Int64, row_stride: Int64, extra_page_stride: Int64, extra_row_stride: Int64,
        scale_log2: Float32, empty_lse: Float32,
        batch: Int32, s_q: Int32, h_q: Int32, page_size: Int32, slots: Int32, topk: Int32,
        extra_page_size: Int32, extra_slots: Int32, extra_topk: Int32, max_splits: Int32, accum_rows: Int32,
    ):  # fmt: skip
        """Compiled for its types, never run: the runtime launches the kernel itself."""
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            q, cache, indices, topk_length, extra_cache, extra_indices, extra_topk_length, attn_sink, plan, num_splits,
            out, lse, out_accum, lse_accum,
            q_stride_batch, q_stride_token, q_stride_head, out_stride_batch, out_stride_token, out_stride_head,
            lse_stride_batch, lse_stride_head, lse_stride_token, indices_stride_batch, indices_stride_token,
            extra_indices_stride_batch, extra_indices_stride_token,
            page_stride, row_stride, extra_page_stride, extra_row_stride, scale_log2, empty_lse,
            batch, s_q, h_q, page_size, slots, topk, extra_page_size, extra_slots, extra_topk, max_splits, accum_rows,
        ).launch(grid=(self.config.cluster, 1, 1), block=(self.threads, 1, 1), cluster=(self.config.cluster, 1, 1))  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q: cute.Pointer, cache: cute.Pointer, indices: cute.Pointer, topk_length: cute.Pointer,
        extra_cache: cute.Pointer, extra_indices: cute.Pointer, extra_topk_length: cute.Pointer, attn_sink: cute.Pointer,
        plan: cute.Pointer, num_splits: cute.Pointer, out: cute.Pointer, lse: cute.Pointer,
        out_accum: cute.Pointer, lse_accum: cute.Pointer,
        q_stride_batch: Int64, q_stride_token: Int64, q_stride_head: Int64,
        out_stride_batch: Int64, out_stride_token: Int64, out_stride_head: Int64,
        lse_stride_batch: Int64, lse_stride_head: Int64, lse_stride_token: Int64,
        indices_stride_batch: Int64, indices_stride_token: Int64,
        extra_indices_stride_batch: Int64, extra_indices_stride_token: Int64,
        page_stride: Int64, row_stride: Int64, extra_page_stride: Int64, extra_row_stride: Int64,
        scale_log2: Float32, empty_lse: Float32,
        batch: Int32, s_q: Int32, h_q: Int32, page_size: Int32, slots: Int32, topk: Int32,
        extra_page_size: Int32, extra_slots: Int32, extra_topk: Int32, max_splits: Int32, accum_rows: Int32,
    ):  # fmt: skip
        operands = Operands(
            q, out, lse, out_accum, lse_accum, attn_sink,
            SlotCache(cache, indices, (indices_stride_batch, indices_stride_token), page_stride, row_stride, page_size, slots),
            SlotCache(
                extra_cache, extra_indices, (extra_indices_stride_batch, extra_indices_stride_token),
                extra_page_stride, extra_row_stride, extra_page_size, extra_slots,
            ),
            (q_stride_batch, q_stride_token, q_stride_head), (out_stride_batch, out_stride_token, out_stride_head),
            (lse_stride_batch, lse_stride_token, lse_stride_head), scale_log2, empty_lse, s_q, h_q,
            Schedule(
                plan, num_splits, Lengths(topk_length, extra_topk_length, topk, extra_topk), batch, max_splits, accum_rows
            ),
        )  # fmt: skip
        self.run(operands)

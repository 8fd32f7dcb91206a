"""The entry of the sparse prefill kernels: the parameters of the ABI, in order, handed on by meaning."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute

from ...spec.sparse_prefill import PARAMS
from ..attention.kernel import AttentionKernel
from ..attention.token_scheduler import TokenSchedule
from .operands import Latent, Operands


class SparsePrefill(AttentionKernel):
    """One variant of a kernel. An architecture's kernel is a subclass that has `threads` and `run`."""

    op = "sparse_prefill"
    params = PARAMS

    def elements(self) -> dict[str, type[cutlass.Numeric]]:
        """As of every kernel; the latent is bytes."""
        return {**super().elements(), "kv": Uint8}

    def run(self, operands: Operands) -> None:
        """The body of the kernel."""
        raise NotImplementedError

    @cute.jit
    def host(
        self,
        q: cute.Pointer, kv: cute.Pointer, kv_offsets: cute.Pointer, indices: cute.Pointer, topk_length: cute.Pointer,
        attn_sink: cute.Pointer, out: cute.Pointer, max_logits: cute.Pointer, lse: cute.Pointer,
        q_stride_batch: Int64, q_stride_token: Int64, q_stride_head: Int64,
        out_stride_batch: Int64, out_stride_token: Int64, out_stride_head: Int64,
        max_logits_stride_batch: Int64, max_logits_stride_token: Int64, max_logits_stride_head: Int64,
        lse_stride_batch: Int64, lse_stride_token: Int64, lse_stride_head: Int64,
        indices_stride_batch: Int64, indices_stride_token: Int64, kv_stride_batch: Int64, kv_stride_row: Int64,
        scale_log2: Float32, empty_lse: Float32,
        tokens: Int32, s_q: Int32, h_q: Int32, s_kv: Int32, topk: Int32,
    ):  # fmt: skip
        """Compiled for its types, never run: the runtime launches the kernel itself."""
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            q, kv, kv_offsets, indices, topk_length, attn_sink, out, max_logits, lse,
            q_stride_batch, q_stride_token, q_stride_head, out_stride_batch, out_stride_token, out_stride_head,
            max_logits_stride_batch, max_logits_stride_token, max_logits_stride_head,
            lse_stride_batch, lse_stride_token, lse_stride_head, indices_stride_batch, indices_stride_token,
            kv_stride_batch, kv_stride_row, scale_log2, empty_lse, tokens, s_q, h_q, s_kv, topk,
        ).launch(grid=(self.config.cluster, 1, 1), block=(self.threads, 1, 1), cluster=(self.config.cluster, 1, 1))  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q: cute.Pointer, kv: cute.Pointer, kv_offsets: cute.Pointer, indices: cute.Pointer, topk_length: cute.Pointer,
        attn_sink: cute.Pointer, out: cute.Pointer, max_logits: cute.Pointer, lse: cute.Pointer,
        q_stride_batch: Int64, q_stride_token: Int64, q_stride_head: Int64,
        out_stride_batch: Int64, out_stride_token: Int64, out_stride_head: Int64,
        max_logits_stride_batch: Int64, max_logits_stride_token: Int64, max_logits_stride_head: Int64,
        lse_stride_batch: Int64, lse_stride_token: Int64, lse_stride_head: Int64,
        indices_stride_batch: Int64, indices_stride_token: Int64, kv_stride_batch: Int64, kv_stride_row: Int64,
        scale_log2: Float32, empty_lse: Float32,
        tokens: Int32, s_q: Int32, h_q: Int32, s_kv: Int32, topk: Int32,
    ):  # fmt: skip
        operands = Operands(
            q, out, max_logits, lse, attn_sink, Latent(kv, kv_offsets, kv_stride_batch, kv_stride_row, s_kv), indices,
            (q_stride_batch, q_stride_token, q_stride_head), (out_stride_batch, out_stride_token, out_stride_head),
            (max_logits_stride_batch, max_logits_stride_token, max_logits_stride_head),
            (lse_stride_batch, lse_stride_token, lse_stride_head), (indices_stride_batch, indices_stride_token),
            scale_log2, empty_lse, s_q, h_q, TokenSchedule(topk_length, topk, tokens),
        )  # fmt: skip
        self.run(operands)

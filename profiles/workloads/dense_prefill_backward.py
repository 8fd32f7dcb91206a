"""Workload of the backward pass of dense prefill: flash_attn_varlen_backward of packed sequences that attend to themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch

from ... import reference
from ...api import flash_attn_varlen_backward, flash_attn_varlen_func, workspace_size
from ...spec.dense_prefill import HEAD_DIMS
from ...testing.compare import DENSE_PREFILL_GRADIENT
from ..shapes import DensePrefillBackwardShape
from .dense_decode import sample_requests
from .operands import generator, values
from .workload import DTYPES, Results, Workload


@dataclass(frozen=True)
class Operands:
    """Tensors of one flash_attn_varlen_backward call."""

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


class DensePrefillBackward(Workload[Operands]):
    """Computes the gradients of attention within packed sequences."""

    def prepare(self) -> None:
        """Set the tolerances; make the ends of the sequences and the workspace. There is no plan."""
        self.tolerances = dict.fromkeys(("dq", "dk", "dv"), DENSE_PREFILL_GRADIENT)
        assert isinstance(self.case.shape, DensePrefillBackwardShape)
        self.shape = shape = self.case.shape
        self.ends = tuple(accumulate(shape.lengths, initial=0))
        self.cu_seqlens = torch.tensor(self.ends, dtype=torch.int32, device=self.device)
        self.longest = max(shape.lengths)
        self.cu_seqlens_k, self.longest_k = self.cu_seqlens, self.longest
        size = workspace_size(
            self.case.op,
            batch=shape.batch,
            s_q=self.longest,
            h_q=shape.h_q,
            h_kv=shape.h_kv,
            total_q=shape.tokens,
            device=self.device,
        )
        self.workspace = torch.empty(size, dtype=torch.uint8, device=self.device)

    def make_operands(self, seed: int) -> Operands:
        """Allocate one operand set; out and lse are those of a forward call."""
        shape, dtype, device = self.shape, DTYPES[self.case.dtype], self.device
        draw, d_v = generator(device, seed), HEAD_DIMS[shape.d_qk]
        q, k = (values(draw, dtype, shape.tokens, heads, shape.d_qk) for heads in (shape.h_q, shape.h_kv))
        v = values(draw, dtype, shape.tokens, shape.h_kv, d_v)
        dout = values(draw, dtype, shape.tokens, shape.h_q, d_v) * 10
        ends = (self.cu_seqlens, self.cu_seqlens_k, self.longest, self.longest_k)
        out, lse = flash_attn_varlen_func(q, k, v, *ends, causal=shape.causal)
        dq, dk, dv = (torch.full_like(tensor, math.nan) for tensor in (q, k, v))
        return Operands(dout, q, k, v, out, lse, dq, dk, dv)

    def call(self, operands: Operands) -> None:
        """Call the backward pass."""
        flash_attn_varlen_backward(
            operands.dout,
            operands.q,
            operands.k,
            operands.v,
            operands.out,
            operands.lse,
            self.cu_seqlens,
            self.cu_seqlens,
            self.longest,
            self.longest,
            causal=self.shape.causal,
            dq=operands.dq,
            dk=operands.dk,
            dv=operands.dv,
            workspace=self.workspace,
        )

    def results(self, operands: Operands) -> Results:
        """Return dq, dk and dv."""
        return {"dq": operands.dq, "dk": operands.dk, "dv": operands.dv}

    def samples(self) -> tuple[int, ...]:
        """Return the sequences to check."""
        return sample_requests(self.shape.lengths)

    def _kv_heads(self) -> list[int]:
        """Return the KV heads whose gradients are compared: the first and the last."""
        return sorted({0, self.shape.h_kv - 1})

    def part(self, results: Results, sample: int) -> Results:
        """Return the gradients of the compared KV heads of a sequence, with all query heads that share them."""
        rows = slice(self.ends[sample], self.ends[sample + 1])
        return {name: self._of_heads(tensor[rows]) for name, tensor in results.items()}

    def _of_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the compared KV heads, or the query heads that share them, of a tensor [tokens, heads, columns]."""
        return tensor.unflatten(1, (self.shape.h_kv, -1))[:, self._kv_heads()].flatten(1, 2)

    def expected(self, operands: Operands, sample: int) -> Results:
        """Return the gradients of the compared heads, by autograd over the whole sequence."""
        rows = slice(self.ends[sample], self.ends[sample + 1])
        dout, q, k, v = (self._of_heads(tensor[rows]) for tensor in (operands.dout, operands.q, operands.k, operands.v))
        visible = reference.visible_keys(len(q), len(k), self.shape.causal, self.device)
        live = torch.ones(q.shape[:2], dtype=torch.bool, device=self.device)
        gradients = reference.attention_gradients(dout, (q, k, v), self.shape.d_qk**-0.5, visible, live)
        return dict(zip(("dq", "dk", "dv"), gradients, strict=True))

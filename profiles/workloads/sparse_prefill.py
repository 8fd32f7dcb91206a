"""Workload of sparse prefill: flash_mla_sparse_fwd over an unpaged latent."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ... import reference
from ...api import flash_mla_sparse_fwd
from ...spec.mla import D_V
from ...testing.compare import PREFILL_LSE, SPARSE_PREFILL_OUT
from ..shapes import SparsePrefillShape
from .operands import generator, selections, values
from .workload import DTYPES, Results, Workload, spread_samples


@dataclass(frozen=True)
class Operands:
    """Tensors of one flash_mla_sparse_fwd call."""

    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    out: torch.Tensor
    max_logits: torch.Tensor
    lse: torch.Tensor


class SparsePrefill(Workload[Operands]):
    """Attends to topk rows of one latent, selected by each token."""

    def prepare(self) -> None:
        """Set the tolerances. Sets share nothing: there is neither plan nor workspace."""
        self.tolerances = {"out": SPARSE_PREFILL_OUT, "max_logits": PREFILL_LSE, "lse": PREFILL_LSE}
        assert isinstance(self.case.shape, SparsePrefillShape)
        self.shape = self.case.shape
        self.scale = self.shape.d_qk**-0.5

    def make_operands(self, seed: int) -> Operands:
        """Allocate one operand set."""
        shape, dtype, device = self.shape, DTYPES[self.case.dtype], self.device
        draw = generator(device, seed)
        return Operands(
            q=values(draw, dtype, shape.s_q, shape.h_q, shape.d_qk),
            kv=values(draw, dtype, shape.s_kv, 1, shape.d_qk),
            indices=selections(draw, shape.s_q, shape.topk, shape.s_kv).unsqueeze(1),
            out=torch.full((shape.s_q, shape.h_q, D_V), math.nan, dtype=dtype, device=device),
            max_logits=torch.full((shape.s_q, shape.h_q), math.nan, dtype=torch.float32, device=device),
            lse=torch.full((shape.s_q, shape.h_q), math.nan, dtype=torch.float32, device=device),
        )

    def call(self, operands: Operands) -> None:
        """Call sparse prefill."""
        flash_mla_sparse_fwd(
            operands.q,
            operands.kv,
            operands.indices,
            self.scale,
            out=operands.out,
            max_logits=operands.max_logits,
            lse=operands.lse,
        )

    def results(self, operands: Operands) -> Results:
        """Return out, max_logits and lse."""
        return {"out": operands.out, "max_logits": operands.max_logits, "lse": operands.lse}

    def samples(self) -> tuple[int, ...]:
        """Return the query tokens to check."""
        return spread_samples(self.shape.s_q)

    def part(self, results: Results, sample: int) -> Results:
        """Return out [h_q, 512], max_logits and lse [h_q] of a token."""
        return {name: tensor[sample] for name, tensor in results.items()}

    def expected(self, operands: Operands, sample: int) -> Results:
        """Attend to the rows that the token selects."""
        keys = reference.named_rows(operands.kv[:, 0], operands.indices[sample, 0], None)
        out, max_logits, lse = reference.attend_to_all(operands.q[sample], keys, self.scale, None)
        return {"out": out, "max_logits": max_logits, "lse": lse}

"""Workload of merge_states on stacked states."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ... import reference
from ...api import merge_states
from ...testing.compare import DENSE_DECODE_OUT, LSE
from ..shapes import MergeShape
from .operands import generator, values
from .workload import DTYPES, Results, Workload, spread_samples


@dataclass(frozen=True)
class Operands:
    """Tensors of one merge_states call."""

    outs: torch.Tensor
    lses: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class MergeStates(Workload[Operands]):
    """Merges the stacked states of all tokens."""

    def prepare(self) -> None:
        """Set the tolerances. Sets share nothing: there is neither plan nor workspace."""
        self.tolerances = {"out": DENSE_DECODE_OUT, "lse": LSE}
        assert isinstance(self.case.shape, MergeShape)
        self.shape = self.case.shape

    def make_operands(self, seed: int) -> Operands:
        """Allocate one operand set."""
        shape, dtype, device = self.shape, DTYPES[self.case.dtype], self.device
        draw = generator(device, seed)
        rows = (shape.tokens, shape.h_q)
        return Operands(
            outs=values(draw, dtype, shape.states, *rows, shape.head_dim),
            lses=torch.empty((shape.states, *rows), dtype=torch.float32, device=device).normal_(7.0, 1.0, generator=draw),
            out=torch.full((*rows, shape.head_dim), math.nan, dtype=dtype, device=device),
            lse=torch.full(rows, math.nan, dtype=torch.float32, device=device),
        )

    def call(self, operands: Operands) -> None:
        """Call merge_states."""
        merge_states(operands.outs, operands.lses, out=operands.out, lse=operands.lse)

    def results(self, operands: Operands) -> Results:
        """Return out and lse."""
        return {"out": operands.out, "lse": operands.lse}

    def samples(self) -> tuple[int, ...]:
        """Return the tokens to check."""
        return spread_samples(self.shape.tokens)

    def part(self, results: Results, sample: int) -> Results:
        """Return out [h_q, d] and lse [h_q] of a token."""
        return {name: tensor[sample] for name, tensor in results.items()}

    def expected(self, operands: Operands, sample: int) -> Results:
        """Merge the token's states."""
        out, lse = reference.merge_states(operands.outs[:, sample], operands.lses[:, sample])
        return {"out": out, "lse": lse}

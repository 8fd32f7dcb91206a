"""merge_states of stacked states."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ... import reference
from ...api.merge_states import merge_states
from ...testing.compare import DENSE_DECODE_OUT, LSE
from ..shapes import MergeShape
from .operands import generator, values
from .subject import DTYPES, Results, Subject, spread_samples


@dataclass(frozen=True)
class Operands:
    """One set of tensors of a call, as merge_states describes them."""

    outs: torch.Tensor
    lses: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class MergeStates(Subject[Operands]):
    """States of all tokens in one stack."""

    def prepare(self) -> None:
        """Nothing is shared: there is neither a plan nor a workspace."""
        self.tolerances = {"out": DENSE_DECODE_OUT, "lse": LSE}
        assert isinstance(self.case.shape, MergeShape)
        self.shape = self.case.shape

    def make_operands(self, seed: int) -> Operands:
        """One set."""
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
        """merge_states."""
        merge_states(operands.outs, operands.lses, out=operands.out, lse=operands.lse)

    def results(self, operands: Operands) -> Results:
        """out and lse."""
        return {"out": operands.out, "lse": operands.lse}

    def samples(self) -> tuple[int, ...]:
        """Tokens."""
        return spread_samples(self.shape.tokens)

    def part(self, results: Results, sample: int) -> Results:
        """out [h_q, d] and lse [h_q] of a token."""
        return {name: tensor[sample] for name, tensor in results.items()}

    def expected(self, operands: Operands, sample: int) -> Results:
        """Over the token's states."""
        out, lse = reference.merge_states(operands.outs[:, sample], operands.lses[:, sample])
        return {"out": out, "lse": lse}

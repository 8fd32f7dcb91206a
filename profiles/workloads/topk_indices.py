"""Workload of topk_indices on rows of normal numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ... import reference
from ...indexer import topk_indices
from ...testing.compare import EQUAL
from ..shapes import TopkShape
from .operands import generator
from .workload import Results, Workload, spread_samples

_UNWRITTEN = -2  # which no call returns


@dataclass(frozen=True)
class Operands:
    """Tensors of one topk_indices call."""

    logits: torch.Tensor
    lengths: torch.Tensor
    out: torch.Tensor


class TopkIndices(Workload[Operands]):
    """Selects positions in rows that all have their full length."""

    def prepare(self) -> None:
        """Set the tolerance. Sets share nothing: there is neither plan nor workspace."""
        self.tolerances = {"out": EQUAL}
        assert isinstance(self.case.shape, TopkShape)
        self.shape = self.case.shape

    def make_operands(self, seed: int) -> Operands:
        """Allocate one operand set."""
        shape, device = self.shape, self.device
        draw = generator(device, seed)
        return Operands(
            logits=torch.empty((shape.rows, shape.columns), dtype=torch.float32, device=device).normal_(generator=draw),
            lengths=torch.full((shape.rows,), shape.columns, dtype=torch.int32, device=device),
            out=torch.full((shape.rows, shape.topk), _UNWRITTEN, dtype=torch.int32, device=device),
        )

    def call(self, operands: Operands) -> None:
        """Call topk_indices."""
        topk_indices(operands.logits, operands.lengths, self.shape.topk, out=operands.out)

    def poison(self) -> None:
        """Fill the results with a number that no call returns."""
        for operands in self.sets:
            operands.out.fill_(_UNWRITTEN)

    def results(self, operands: Operands) -> Results:
        """Return out, fp64 [rows, topk], NaN where nothing was written."""
        return {"out": operands.out.double().masked_fill(operands.out == _UNWRITTEN, math.nan)}

    def samples(self) -> tuple[int, ...]:
        """Return the rows to check."""
        return spread_samples(self.shape.rows)

    def part(self, results: Results, sample: int) -> Results:
        """Return out [topk] of a row."""
        return {"out": results["out"][sample]}

    def expected(self, operands: Operands, sample: int) -> Results:
        """Select the row's positions."""
        row = slice(sample, sample + 1)
        return {"out": reference.topk_indices(operands.logits[row], operands.lengths[row], self.shape.topk)[0].double()}

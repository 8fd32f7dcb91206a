"""Workload of combine alone, on partial results with the same number of splits for every request.

combine has no public call, so the kernel is launched as a decode launches it. Launches back to back overlap a little, since each may
start before its predecessor ends, as combine does after a decode kernel. The time that combine adds to a decode appears in the kernel
times and the totals of the decode rows, not here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cute_mla import reference
from cute_mla.ops.launch_plan import named_strides
from cute_mla.ops.split_plan import window_scalars
from cute_mla.runtime.current import device_for
from cute_mla.spec.combine import CombineArguments, CombineConfig, grid
from cute_mla.spec.mla import D_V, LOG2E
from cute_mla.spec.split_plan import NO_LIMIT, NO_WINDOW
from cute_mla.testing.cases.base import DTYPES
from cute_mla.testing.cases.tensors import OutputBuffer
from cute_mla.testing.compare import DENSE_DECODE_OUT, LSE

from ..rows import Case
from ..shapes import CombineShape
from .operands import generator, values
from .workload import Results, Workload, spread_samples


@dataclass(frozen=True)
class Operands:
    """Tensors of one launch. out_accum fp32 [rows, s_q, h_q, 512], lse_accum fp32 [rows, s_q, h_q], base 2; a request has `splits` rows."""

    out_accum: torch.Tensor
    lse_accum: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    @property
    def output_buffers(self) -> dict[str, OutputBuffer]:
        """Return the results by name."""
        return {"out": OutputBuffer(self.out, self.out), "lse": OutputBuffer(self.lse, self.lse)}


class Combine(Workload):
    """Merges accumulator rows; the splits of a request are consecutive rows."""

    def __init__(self, case: Case, device: torch.device, l2_bytes: int, sets: int | None = None) -> None:
        super().__init__(case, None, self.make_operands, device, l2_bytes, sets)

    def prepare(self) -> None:
        """Set the tolerances; make the prefix sum of splits that a plan would hold; look up kernel and grid."""
        self.tolerances = {"out": DENSE_DECODE_OUT, "lse": LSE}
        assert isinstance(self.case.shape, CombineShape)
        self.shape = shape = self.case.shape
        self.num_splits = torch.arange(shape.batch + 1, dtype=torch.int32, device=self.device) * shape.splits
        self.runner = device_for(self.device)
        self.kernel = self.runner.kernel("combine", CombineConfig(self.case.dtype).name)
        self.grid = grid(shape.batch, shape.s_q, shape.h_q, self.runner.sm_count)

    def make_operands(self, seed: int) -> Operands:
        """Allocate one operand set."""
        shape, device = self.shape, self.device
        draw = generator(device, seed)
        rows = (shape.batch * shape.splits, shape.s_q, shape.h_q)
        return Operands(
            out_accum=values(draw, torch.float32, *rows, D_V),
            lse_accum=torch.empty(rows, dtype=torch.float32, device=device).normal_(10.0, 1.0, generator=draw),
            out=torch.full((shape.batch, shape.s_q, shape.h_q, D_V), math.nan, dtype=DTYPES[self.case.dtype], device=device),
            lse=torch.full((shape.batch, shape.h_q, shape.s_q), math.nan, dtype=torch.float32, device=device),
        )

    def call(self, operands: Operands) -> None:
        """Launch combine."""
        shape = self.shape
        args = CombineArguments(
            lengths=None,
            extra_lengths=None,
            num_splits=self.num_splits,
            attn_sink=None,
            out_accum=operands.out_accum,
            lse_accum=operands.lse_accum,
            out=operands.out,
            lse=operands.lse,
            **named_strides("out", "batch token head", operands.out.stride()[:3]),
            **named_strides("lse", "batch head token", operands.lse.stride()),
            empty_lse=math.inf,
            batch=shape.batch,
            s_q=shape.s_q,
            h_q=shape.h_q,
            max_keys=NO_LIMIT,  # combine reads neither limit here, without lengths and batch invariance
            extra_max_keys=0,
            max_splits=0,
            accum_rows=shape.batch * shape.splits,
            cu_seqlens_q=None,
            units=None,
            requests=shape.batch,
            total_q=0,
            causal=0,
            **window_scalars(NO_WINDOW),
        )
        self.runner.launch(self.kernel, self.grid, args, pdl=True)

    @property
    def has_plan(self) -> bool:
        """False."""
        return False

    def arguments_of(self, operands: Operands) -> dict[str, Any]:
        """Return nothing: the launch takes the operands."""
        return {}

    def samples(self) -> tuple[int, ...]:
        """Return the requests to check."""
        return spread_samples(self.shape.batch)

    def expected(self, operands: Operands, sample: int) -> tuple[Results, Callable[[Results], Results]]:
        """Merge the request's partial results as attention states over disjoint keys."""
        rows = slice(sample * self.shape.splits, (sample + 1) * self.shape.splits)
        out, lse = reference.merge_states(operands.out_accum[rows], operands.lse_accum[rows] / LOG2E)
        return {"out": out, "lse": lse}, lambda results: {
            name: tensor[sample] if name == "out" else tensor[sample].transpose(0, 1) for name, tensor in results.items()
        }

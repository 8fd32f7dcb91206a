"""Cases of the backward pass of dense prefill: those of the forward pass, with a gradient of out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from .... import reference
from ....spec.arch import Arch
from ....spec.dense_prefill_dkdv import DensePrefillDkdvProblem
from ....spec.dense_prefill_dq import DensePrefillDqProblem
from ...cases.base import DTYPES, Outputs, QLayout, Tags
from ...cases.tensors import Fp32Result, OutputBuffer, allocate_rows, fp32_buffer, generator_for, rows_buffer, without_batch
from ..dense_prefill.case import DensePrefillCase, DensePrefillTensors, make_inputs


def _numbers(ranges: Iterable[tuple[int, int]]) -> Tensor:
    """Return the numbers of ranges [first, end), one range after the other."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *(torch.arange(first, end) for first, end in ranges)])


@dataclass(frozen=True)
class DensePrefillBackwardCase(DensePrefillCase):
    """One call of the backward pass of dense prefill, whose results are dq, dk and dv.

    dout_layout: as q_layout.
    outputs: "odd": like "strided", but rows of dk and dv begin at any element.
    saved: layout of out and lse, which the call reads, as `outputs` of a forward call names it.
    ends: "margins": also keys of no sequence only if the caller passes results.
    neighbours: "nan": so are q and dout of the second, fourth, .. sequence.
    longest: what the call says the longest sequence has in query tokens, a number of whole work items; None: the truth. Rows beyond it are
        left out: they get no gradient, give none, and are NaN in q, dout, out and lse.
    holes: whether every third row of q has an infinite lse, though it sees keys, and an out of NaN.
    """

    op: ClassVar[str] = "dense_prefill_backward"
    tags: ClassVar[Tags] = {
        "dout_layout": lambda layout: f"dout_{layout}",
        "saved": lambda saved: f"saved_{saved}",
        "longest": lambda longest: f"longest{longest}",
        "holes": lambda holes: "holes",
        **DensePrefillCase.tags,
    }

    dout_layout: QLayout = "packed"
    saved: Outputs = "given"
    longest: int | None = None
    holes: bool = False

    @property
    def max_seqlen_q(self) -> int:
        """Return the query tokens of the longest sequence, as the call says."""
        return super().max_seqlen_q if self.longest is None else self.longest

    @property
    def left_out(self) -> Tensor:
        """Return the rows of q that are left out."""
        most = self.max_seqlen_q
        return _numbers((first + most, end) for first, end in pairwise(self.q_starts) if end - first > most)

    @property
    def rows_of_neighbours(self) -> Tensor:
        """Return the rows of q of sequences that are full of NaN."""
        return _numbers([] if self.neighbours == "finite" else [*pairwise(self.q_starts)][1::2])

    @property
    def kernel_op(self) -> str:
        """Return the op of the kernel that a record names."""
        return "dense_prefill_dkdv"

    def problem(self, arch: Arch) -> DensePrefillDkdvProblem:  # type: ignore[override]
        """Return the shapes of dk and dv."""
        return DensePrefillDkdvProblem(arch, self.dtype, self.d_qk, len(self.lengths), self.h_kv, self.max_seqlen_k)

    def dq_problem(self, arch: Arch) -> DensePrefillDqProblem:
        """Return the shapes of dq."""
        return DensePrefillDqProblem(**vars(super().problem(arch)))

    @property
    def _k_margins(self) -> bool:
        return self._q_margins


@dataclass(frozen=True)
class DqCase(DensePrefillBackwardCase):
    """A call of which the kernel that computes dq is of interest; a plain case is about that of dk and dv."""

    @property
    def kernel_op(self) -> str:
        """Return the op of the kernel."""
        return "dense_prefill_dq"

    def problem(self, arch: Arch) -> DensePrefillDqProblem:  # type: ignore[override]
        """Return the shapes of dq."""
        return self.dq_problem(arch)


@dataclass(frozen=True, kw_only=True)
class DensePrefillBackwardTensors(DensePrefillTensors):
    """The operands of a case.

    dout, out: dtype [total_q, h_q, d_v]; lse: fp32 [total_q, h_q]. output_buffers: dq, dk and dv, of the shapes of q, k and v.
    """

    dout: Tensor
    out: Tensor
    lse: Tensor


def make_dense_prefill_backward_tensors(case: DensePrefillBackwardCase, device: str | torch.device = "cpu") -> DensePrefillBackwardTensors:
    """Make the operands of a case, out and lse by the reference."""
    device = torch.device(device)
    inputs = make_inputs(case, device)
    inputs["q"][case.rows_of_neighbours] = math.nan
    empty_lse = math.inf if case.empty_lse is None else case.empty_lse
    out, lse = reference.dense_prefill(**inputs, softmax_scale=case.softmax_scale, causal=case.causal, empty_lse=empty_lse)
    rows = (1, case.total_q, case.h_q)
    saved_out = rows_buffer(case.saved, (*rows, case.d_v), DTYPES[case.dtype], device).tensor[0].copy_(out)
    saved_lse = fp32_buffer(case.saved, Fp32Result(rows, 1, 2), device).tensor[0].copy_(lse)
    buffers = _output_buffers(case, inputs, device)
    tensors = DensePrefillBackwardTensors(**inputs, dout=_dout(case, device), out=saved_out, lse=saved_lse, output_buffers=buffers)
    if case.holes:
        tensors.lse[::3], tensors.out[::3] = empty_lse, math.nan
    if case.longest is not None:
        for tensor in (tensors.q, tensors.dout, tensors.out, tensors.lse):
            tensor[case.left_out] = math.nan
    return tensors


def without_left_out(case: DensePrefillBackwardCase, tensors: DensePrefillBackwardTensors) -> DensePrefillBackwardTensors:
    """Return operands for the reference, in which rows that are left out have an infinite lse."""
    if case.longest is None:
        return tensors
    rows = case.left_out.to(tensors.q.device)
    zeros = {name: getattr(tensors, name).index_fill(0, rows, 0.0) for name in ("q", "dout", "out")}
    return replace(tensors, **zeros, lse=tensors.lse.index_fill(0, rows, math.inf))


def _dout(case: DensePrefillBackwardCase, device: torch.device) -> Tensor:
    """Draw dout from N(0, 1), with NaN in rows of no sequence. Gradients of a smaller dout would be subnormal in fp16."""
    shape, dtype = (case.total_q, case.h_q, case.d_v), DTYPES[case.dtype]
    generator = generator_for(case, math.prod(shape), device, 500)
    drawn = torch.randn(shape, generator=generator, device=generator.device)
    dout = allocate_rows(case.dout_layout, (1, *shape), dtype, device)[0]
    own = slice(case.q_starts[0], case.q_starts[-1])
    dout[own].copy_(drawn[own])
    dout[case.rows_of_neighbours] = math.nan
    return dout


def _output_buffers(case: DensePrefillBackwardCase, inputs: dict[str, Tensor], device: torch.device) -> dict[str, OutputBuffer]:
    """Allocate dq, dk and dv if the caller passes them."""
    if case.outputs == "allocated":
        return {}
    shapes = {f"d{name}": (1, *inputs[name].shape) for name in ("q", "k", "v")}
    dtype = DTYPES[case.dtype]
    layouts: dict[str, Outputs] = {name: "strided" if (name, case.outputs) == ("dq", "odd") else case.outputs for name in shapes}
    return {name: without_batch(rows_buffer(layouts[name], shape, dtype, device)) for name, shape in shapes.items()}

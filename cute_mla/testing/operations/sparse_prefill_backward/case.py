"""Cases of the backward pass of sparse prefill: those of the forward pass, with a gradient of out."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from .... import reference
from ....spec import sparse_prefill_dkv, sparse_prefill_dq
from ....spec.arch import Arch
from ....spec.key_lists import closed_variants as list_steps
from ....spec.mla import BF16
from ....spec.row_statistics import RowStatisticsConfig
from ....spec.row_sums import FP32, RowSumsConfig
from ...cases.base import DTYPES, Config, Outputs, QLayout, Tags
from ...cases.tensors import (
    Fp32Result,
    OutputBuffer,
    allocate_rows,
    fp32_buffer,
    generator_for,
    nan_tensor,
    rows_buffer,
    sliced_buffers,
    without_batch,
)
from ..sparse_prefill.case import SparsePrefillCase, SparsePrefillTensors, make_sparse_prefill_tensors

Dkv = Literal["bf16", "fp32", "added"]


class Launched(NamedTuple):
    """A kernel of a call, by the name of its op."""

    op: str
    config: Config


@dataclass(frozen=True)
class SparsePrefillBackwardCase(SparsePrefillCase):
    """One call of the backward pass of sparse prefill, whose results are dq, dkv and d_sink.

    dout_layout: as q_layout. saved: layout of out, lse and dlse, which the call reads, as `outputs` of a forward call names it.
    dkv: element type of dkv; "added": fp32, and the call adds to what there is.
    dlse: whether lse has a gradient. chunked: whether the workspace has room for one token, so that each is a chunk.
    holes: whether every third head has an infinite lse, though it sees keys, and an out of NaN.
    """

    op: ClassVar[str] = "sparse_prefill_backward"
    tags: ClassVar[Tags] = {
        "dout_layout": lambda layout: f"dout_{layout}",
        "saved": lambda saved: f"saved_{saved}",
        "dkv": lambda dkv: f"dkv_{dkv}",
        "dlse": lambda _: "dlse",
        "chunked": lambda _: "chunked",
        "holes": lambda _: "holes",
        **SparsePrefillCase.tags,
    }

    dout_layout: QLayout = "packed"
    saved: Outputs = "given"
    dkv: Dkv = "bf16"
    dlse: bool = False
    chunked: bool = False
    holes: bool = False

    @property
    def kernel_op(self) -> str:
        """Return the op of the kernel that a record names."""
        return "sparse_prefill_dq"

    @property
    def has_scores(self) -> bool:
        """Return whether there are slots and rows that they could name."""
        return bool(self.tokens and self.topk and self.kv_rows)

    def kernels_on(self, arch: Arch) -> tuple[Launched, ...]:
        """Return the kernels of the call; of one without scores the first alone."""
        statistics = Launched("row_statistics", RowStatisticsConfig(self.dtype))
        if not self.has_scores:
            return (statistics,) if self.tokens else ()
        sums = RowSumsConfig(self.d_qk, BF16 if self.dkv == "bf16" else FP32)
        return (
            statistics,
            Launched("sparse_prefill_dq", sparse_prefill_dq.config_for(arch, self.d_qk, self.h_q)),
            Launched("sparse_prefill_dkv", sparse_prefill_dkv.config_for(self.d_qk, self.h_q)),
            *(Launched("key_lists", step) for step in list_steps()),
            Launched("row_sums", sums),
        )

    def problem(self, arch: Arch) -> Launched:  # type: ignore[override]
        """Return the kernel that computes dq."""
        return Launched(self.kernel_op, sparse_prefill_dq.config_for(arch, self.d_qk, self.h_q))

    @property
    def tiles(self) -> int:
        """Return the cost on the simulated device: a tile has five products, of which the forward pass has two."""
        return 5 * super().tiles // 2


@dataclass(frozen=True)
class DkvCase(SparsePrefillBackwardCase):
    """A call of which the kernel that makes rows for dkv is of interest; a plain case is about that of dq."""

    @property
    def kernel_op(self) -> str:
        """Return the op of the kernel."""
        return "sparse_prefill_dkv"

    def problem(self, arch: Arch) -> Launched:  # type: ignore[override]
        """Return that kernel."""
        return Launched(self.kernel_op, sparse_prefill_dkv.config_for(self.d_qk, self.h_q))


@dataclass(frozen=True, kw_only=True)
class SparsePrefillBackwardTensors(SparsePrefillTensors):
    """The operands of a case.

    dout, out: dtype [b, s_q, h_q, 512]; lse: fp32 [b, s_q, h_q]; dlse: likewise, or None. addend: fp32 of kv's shape, to which dkv is
    added, or None. output_buffers: dq, dkv and d_sink, of the shapes of q, kv and attn_sink.
    """

    dout: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None = None
    addend: Tensor | None = None


def make_sparse_prefill_backward_tensors(
    case: SparsePrefillBackwardCase, device: str | torch.device = "cpu"
) -> SparsePrefillBackwardTensors:
    """Make the operands of a case, out and lse by the reference."""
    device = torch.device(device)
    forward = make_sparse_prefill_tensors(replace(case, outputs="allocated"), device)
    named = {field.name: getattr(forward, field.name) for field in fields(forward)}
    empty_lse = math.inf if case.empty_lse is None else case.empty_lse
    rest = (forward.attn_sink, forward.topk_length, forward.kv_offsets, empty_lse)
    out, _, lse = reference.sparse_prefill(forward.q, forward.kv, forward.indices, case.scale, *rest)
    shape = (*case.q_shape[:3], case.d_v)
    dout = _drawn(case, shape, 500, device)
    tensors = SparsePrefillBackwardTensors(
        **{**named, "output_buffers": _output_buffers(case, forward, device)},
        dout=_filled(case, allocate_rows(case.dout_layout, shape, DTYPES[case.dtype], device), dout),
        out=_filled(case, rows_buffer(case.saved, shape, DTYPES[case.dtype], device).tensor, out),
        lse=_of_rows(case, lse, device),
        dlse=_of_rows(case, _drawn(case, case.q_shape[:3], 501, device), device) if case.dlse else None,
        addend=_drawn(case, tuple(forward.kv.shape), 502, device) if case.dkv == "added" else None,
    )
    if case.holes:
        tensors.lse[..., ::3], tensors.out[..., ::3, :] = empty_lse, math.nan
    return tensors


def _drawn(case: SparsePrefillBackwardCase, shape: tuple[int, ...], offset: int, device: torch.device) -> Tensor:
    """Draw fp32 from N(0, 1)."""
    generator = generator_for(case, math.prod(shape), device, offset)
    return torch.randn(shape, generator=generator, device=generator.device).to(device)


def _filled(case: SparsePrefillBackwardCase, storage: Tensor, values: Tensor) -> Tensor:
    """Copy values to an operand [b, ..]; return it as it is called."""
    operand = storage[0] if case.form == "single" else storage
    return operand.copy_(values.reshape(operand.shape))


def _of_rows(case: SparsePrefillBackwardCase, values: Tensor, device: torch.device) -> Tensor:
    """Return fp32 [.., s_q, h_q] in the layout of what the call reads."""
    return _filled(case, fp32_buffer(case.saved, Fp32Result(case.q_shape[:3], 1, 2), device).tensor, values)


def _output_buffers(case: SparsePrefillBackwardCase, forward: SparsePrefillTensors, device: torch.device) -> dict[str, OutputBuffer]:
    """Allocate the results that the caller passes; dkv in fp32 is always one."""
    dkv_dtype = torch.float32 if case.dkv == "fp32" else DTYPES[case.dtype]
    dkv = nan_tensor(tuple(forward.kv.shape), dkv_dtype, device)
    buffers = {} if case.dkv == "added" or (case.dkv, case.outputs) == ("bf16", "allocated") else {"dkv": OutputBuffer(dkv, dkv)}
    if case.outputs == "allocated":
        return buffers
    dq = rows_buffer(case.outputs, case.q_shape, DTYPES[case.dtype], device)
    sinks = sliced_buffers("strided" if case.outputs == "strided" else "given", {"d_sink": ((case.h_q,), torch.float32)}, device)
    return {"dq": without_batch(dq) if case.form == "single" else dq, **buffers, **sinks}

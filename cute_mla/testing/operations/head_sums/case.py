"""Cases of head_sums: queries, keys and indices of sparse prefill, with a number for each head of a token."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .... import reference
from ....spec.arch import Arch
from ....spec.head_sums import INDEX_COLUMNS, HeadSumsConfig, Kind
from ....spec.mla import D_QK
from ....spec.sparse_prefill import HEAD_DIMS
from ...cases.base import Outputs, Tags
from ...cases.tensors import Fp32Result, fp32_buffer, generator_for, sliced_buffers
from ..operation import empty_lse
from ..sparse_prefill.case import SparsePrefillCase, SparsePrefillTensors, as_called, make_sparse_prefill_tensors


class HeadSumsProblem(NamedTuple):
    """The properties of a call that select the kernel."""

    config: HeadSumsConfig


@dataclass(frozen=True)
class ChosenKeysCase(SparsePrefillCase):
    """A call over chosen keys with a number for each head. saved: layout of these numbers, as `outputs` names that of a result."""

    head_dims: ClassVar[tuple[int, ...]] = (*HEAD_DIMS, INDEX_COLUMNS)
    tags: ClassVar[Tags] = {"saved": lambda saved: f"saved_{saved}", **SparsePrefillCase.tags}

    d_qk: int = INDEX_COLUMNS
    saved: Outputs = "given"

    def row_bytes(self, arch: Arch) -> int:
        """Return 1: rows of q that begin elsewhere than kernels take them are copied."""
        return 1


@dataclass(frozen=True)
class HeadSumsCase(ChosenKeysCase):
    """One call of attention_head_sums, or with INDEX_COLUMNS of indexer_scores.

    holes: whether every third head has an infinite lse, though it sees keys.
    """

    op: ClassVar[str] = "head_sums"
    tags: ClassVar[Tags] = {"holes": lambda _: "holes", **ChosenKeysCase.tags}

    d_qk: int = D_QK
    holes: bool = False

    @property
    def kind(self) -> Kind:
        """Return what is summed over the heads."""
        return "scores" if self.d_qk == INDEX_COLUMNS else "probs"

    @property
    def has_scores(self) -> bool:
        """Return whether there are slots to write."""
        return bool(self.tokens and self.topk)

    def problem(self, arch: Arch) -> HeadSumsProblem:  # type: ignore[override]
        """Return the properties of the call that select the kernel."""
        return HeadSumsProblem(HeadSumsConfig(self.dtype, self.kind, self.d_qk))


@dataclass(frozen=True, kw_only=True)
class ChosenKeysTensors(SparsePrefillTensors):
    """The operands of a case. terms: fp32 [b, s_q, h_q], lse of the heads or their weights."""

    terms: Tensor


def make_head_sums_tensors(case: HeadSumsCase, device: str | torch.device = "cpu") -> ChosenKeysTensors:
    """Make the operands of a case: lse of more keys than those chosen, or weights of both signs."""
    device = torch.device(device)
    forward = make_sparse_prefill_tensors(replace(case, outputs="allocated"), device)
    drawn = draw_numbers(case, case.q_shape[:3], 600, device)
    if case.kind == "probs":
        rest = (case.scale, None, forward.topk_length, forward.kv_offsets, empty_lse(case))
        _, _, lse = reference.sparse_prefill(forward.q, forward.kv, forward.indices, *rest)
        drawn = lse.view(drawn.shape) + drawn.abs()
        if case.holes:
            drawn[..., ::3] = empty_lse(case)
    shape = (case.s_q, case.topk) if case.form == "single" else (case.batch, case.s_q, case.topk)
    buffers = sliced_buffers(case.outputs, {"out": (shape, torch.float32)}, device)
    return ChosenKeysTensors(**{**fields_of(forward), "output_buffers": buffers}, terms=of_heads(case, drawn))


def fields_of(tensors: SparsePrefillTensors) -> dict[str, Any]:
    """Return the operands by name."""
    return {field.name: getattr(tensors, field.name) for field in fields(tensors)}


def draw_numbers(case: SparsePrefillCase, shape: tuple[int, ...], offset: int, device: torch.device) -> Tensor:
    """Draw fp32 from N(0, 1). offset: of the tensor's generator."""
    elements = int(torch.Size(shape).numel())
    generator = generator_for(case, elements, device, offset)
    return torch.randn(shape, generator=generator, device=generator.device).to(device)


def of_heads(case: ChosenKeysCase, values: Tensor) -> Tensor:
    """Return fp32 values [b, s_q, h_q] in the layout of what the call reads, as it is called."""
    storage = fp32_buffer(case.saved, Fp32Result(case.q_shape[:3], 1, 2), values.device).tensor
    return as_called(case, storage.copy_(values))

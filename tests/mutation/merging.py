"""Cases of merge_states, which has no suite of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from cute_mla import merge_states
from cute_mla.spec.arch import Arch
from cute_mla.spec.merge_states import MergeStatesConfig
from cute_mla.testing.cases.base import DTYPES, BaseCase
from cute_mla.testing.cases.tensors import OutputBuffer, generator_for, nan_tensor
from cute_mla.testing.operations import Operation, Result, operation

STATES = 3


@dataclass(frozen=True)
class MergeCase(BaseCase):
    """One call: three states of `tokens` x `heads` rows."""

    op: ClassVar[str] = "merge_states"

    head_dim: int = 512
    tokens: int = 3
    heads: int = 9

    @property
    def shape_id(self) -> str:
        """The first part of the id."""
        return f"{self.dtype}-merge{STATES}-t{self.tokens}-h{self.heads}-d{self.head_dim}"

    def problem(self, arch: Arch) -> Any:
        """Return the variant."""
        return SimpleNamespace(config=MergeStatesConfig(self.dtype, self.head_dim))


@dataclass(frozen=True)
class MergeTensors:
    """Stacked states, and where the result goes."""

    outs: Tensor
    lses: Tensor
    output_buffers: Mapping[str, OutputBuffer]


def _make(case: MergeCase, device: str | torch.device) -> MergeTensors:
    rows = (case.tokens, case.heads)
    draw = generator_for(case, STATES * case.tokens * case.heads * case.head_dim, torch.device(device))
    outs = torch.randn(STATES, *rows, case.head_dim, generator=draw).to(DTYPES[case.dtype])
    out, lse = nan_tensor((*rows, case.head_dim), outs.dtype, outs.device), nan_tensor(rows, torch.float32, outs.device)
    return MergeTensors(outs, torch.randn(STATES, *rows, generator=draw), {"out": OutputBuffer(out, out), "lse": OutputBuffer(lse, lse)})


def _arguments(case: MergeCase, tensors: MergeTensors, workspace: Tensor | None) -> dict[str, Any]:
    return {"outs": tensors.outs, "lses": tensors.lses, **{name: buffer.tensor for name, buffer in tensors.output_buffers.items()}}


def _no_reference(case: MergeCase, tensors: MergeTensors) -> Result:
    raise NotImplementedError


MERGING = Operation(_make, merge_states, _arguments, _no_reference, {})


def operation_of(case: BaseCase) -> Operation:
    """Return the operation that runs a case."""
    return MERGING if isinstance(case, MergeCase) else operation(case)

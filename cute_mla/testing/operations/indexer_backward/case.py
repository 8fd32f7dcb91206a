"""Cases of indexer_backward: those of indexer_scores, with a gradient of the scores."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ....spec.arch import Arch
from ....spec.head_sums import INDEX_COLUMNS
from ....spec.indexer_backward import IndexerBackwardConfig, closed_variants
from ....spec.key_lists import closed_variants as list_steps
from ....spec.mla import BF16
from ....spec.row_sums import FP32, RowSumsConfig
from ...cases.base import DTYPES, Tags
from ...cases.tensors import sliced_buffers
from ..head_sums.case import ChosenKeysCase, ChosenKeysTensors, draw_numbers, fields_of, of_heads
from ..sparse_prefill.case import as_called, make_sparse_prefill_tensors
from ..sparse_prefill_backward.case import Launched

Dk = Literal["bf16", "fp32", "added"]


class IndexerBackwardProblem(NamedTuple):
    """The properties of a call that select the kernel."""

    config: IndexerBackwardConfig


@dataclass(frozen=True)
class IndexerBackwardCase(ChosenKeysCase):
    """One call of indexer_backward.

    dk: element type of dk; "added": fp32, and the call adds to what there is. chunked: whether the workspace has room for one token, so
    that each is a chunk. transposed: whether dscores lie slot by slot, so that the call copies them.
    """

    op: ClassVar[str] = "indexer_backward"
    head_dims: ClassVar[tuple[int, ...]] = (INDEX_COLUMNS,)
    tags: ClassVar[Tags] = {
        "dk": lambda dk: f"dk_{dk}",
        "chunked": lambda _: "chunked",
        "transposed": lambda _: "transposed",
        **ChosenKeysCase.tags,
    }

    dk: Dk = "bf16"
    chunked: bool = False
    transposed: bool = False

    @property
    def has_scores(self) -> bool:
        """Return whether there are slots and rows that they could name."""
        return bool(self.tokens and self.topk and self.kv_rows)

    def kernels_on(self, arch: Arch) -> tuple[Launched, ...]:
        """Return the kernels of the call."""
        if not self.has_scores:
            return ()
        sums = RowSumsConfig(self.d_qk, BF16 if self.dk == "bf16" else FP32)
        return (
            Launched(self.op, self.problem(arch).config),
            *(Launched("key_lists", step) for step in list_steps()),
            Launched("row_sums", sums),
        )

    def problem(self, arch: Arch) -> IndexerBackwardProblem:  # type: ignore[override]
        """Return the properties of the call that select the kernel."""
        return IndexerBackwardProblem(closed_variants()[0])


@dataclass(frozen=True, kw_only=True)
class IndexerBackwardTensors(ChosenKeysTensors):
    """The operands of a case. dscores: fp32 [b, s_q, topk]. addend: fp32 of k's shape, to which dk is added, or None."""

    dscores: Tensor
    addend: Tensor | None = None


def make_indexer_backward_tensors(case: IndexerBackwardCase, device: str | torch.device = "cpu") -> IndexerBackwardTensors:
    """Make the operands of a case. The gradients of slots that name no key are NaN."""
    device = torch.device(device)
    forward = make_sparse_prefill_tensors(replace(case, outputs="allocated"), device)
    shape = (case.batch, case.s_q, case.topk)
    dscores = draw_numbers(case, shape, 601, device)
    unused = torch.arange(case.topk, device=device) >= torch.tensor(case.counts, device=device).view(case.batch, case.s_q, 1)
    own = torch.tensor([count for _, count in case.row_ranges], device=device).view(-1, 1, 1)
    indices = forward.indices.reshape(shape)
    dscores.masked_fill_(unused | (indices < 0) | (indices >= own), math.nan)
    if case.transposed:
        dscores = dscores.mT.contiguous().mT
    keys = tuple(forward.kv.squeeze(-2).shape)
    dk_dtype = DTYPES[case.dtype] if case.dk == "bf16" else torch.float32
    results: dict[str, tuple[tuple[int, ...], torch.dtype]] = {} if case.dk == "added" else {"dk": (keys, dk_dtype)}
    if case.outputs != "allocated":
        rows = tuple(forward.q.shape)
        results |= {"dq": (rows, DTYPES[case.dtype]), "dweights": (rows[:-1], torch.float32)}
    elif case.dk == "bf16":
        results = {}
    return IndexerBackwardTensors(
        **{**fields_of(forward), "output_buffers": sliced_buffers("given", results, device)},
        terms=of_heads(case, draw_numbers(case, case.q_shape[:3], 600, device)),
        dscores=as_called(case, dscores),
        addend=draw_numbers(case, keys, 602, device) if case.dk == "added" else None,
    )

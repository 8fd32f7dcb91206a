"""Cases of indexer_topk and indexer_topk_prefill: the operands of a case of mqa_logits, and a selection."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ...spec.arch import Arch
from ...spec.topk_indices import config_for
from .base import TAGS, BaseCase, Tags
from .far import far_tensor
from .mqa_logits import KeyWindows, LogitsLayout, LogitsValues, MqaLogitsCase, MqaLogitsTensors, RequestLengths, make_mqa_logits_tensors
from .tensors import OutputBuffer
from .topk_indices import TopkProblem


@dataclass(frozen=True)
class IndexerTopkCase(BaseCase):
    """One choice of `topk` keys of each query token, over the operands of MqaLogitsCase, whose fields have these names and meanings.

    columns: max_seqlen_k of rows. values: those whose logits are exact, so that so is the choice. slots: keys are given by their slots.
    """

    op: ClassVar[str] = "indexer_topk"
    cut_by: ClassVar[str] = "requests"
    tags: ClassVar[Tags] = {**MqaLogitsCase.tags, "slots": lambda _: "slots", **TAGS}

    dtype: str = "e4m3"
    heads: int = 64
    requests: int = 1
    tokens: int = 5
    keys: int = 300
    page_size: int | None = None
    windows: KeyWindows = "causal"
    lengths: RequestLengths = "full"
    per_token: bool = False
    columns: int | None = None
    values: LogitsValues = "exact"
    layout: LogitsLayout = "packed"
    broken: bool = False
    topk: int = 64
    slots: bool = False

    @property
    def logits(self) -> MqaLogitsCase:
        """Return the case of the logits."""
        names = (
            "heads",
            "requests",
            "tokens",
            "page_size",
            "windows",
            "lengths",
            "per_token",
            "values",
            "layout",
            "broken",
            "seed",
            "keys",
        )
        columns = None if self.page_size is None else -(-self.keys // self.page_size) * self.page_size  # all that the table has room for
        return MqaLogitsCase(clean=False, columns=columns, **{name: getattr(self, name) for name in names})

    @property
    def most_keys(self) -> int:
        """Return the columns of the logits."""
        if self.page_size is not None:
            return self.logits.table_pages * self.page_size
        return self.keys if self.columns is None else min(self.columns, self.keys)

    @property
    def is_scored(self) -> bool:
        """Return whether the call computes logits."""
        return self.most_keys > self.topk > 0

    @property
    def shape_id(self) -> str:
        """Return the first part of the id."""
        return f"{self.logits.shape_id}-top{self.topk}"

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """Return requests, tokens, keys chosen and 1: a call without them launches nothing."""
        return self.requests, self.tokens, self.topk, 1

    @property
    def tiles(self) -> int:
        """Return the cost on the simulated device: that of the logits, and of a selection for each token."""
        return (self.logits.tiles if self.is_scored else 0) + max(self.requests * self.tokens, 1)

    @property
    def finding_kinds(self) -> frozenset[str]:
        """Return the kinds of findings that the simulated device must report."""
        return self.logits.finding_kinds

    @property
    def kernel_op(self) -> str:
        """Return the op of the kernel that ends the call."""
        return "topk_indices"

    def problem(self, arch: Arch) -> TopkProblem:
        """Return the properties of the call that select this kernel."""
        columns = self.most_keys if self.is_scored else 0
        return TopkProblem(config_for(self.requests * self.tokens, columns, self.sm_count or arch.sm_count, self.slots))


def make_indexer_topk_tensors(case: IndexerTopkCase, device: str | torch.device = "cpu") -> MqaLogitsTensors:
    """Make the operands of a case: equal for equal cases. A result that the caller passes is int32."""
    tensors = make_mqa_logits_tensors(case.logits, device)
    if case.outputs == "allocated":
        return tensors
    rows, home = case.requests * case.tokens, tensors.q.device
    if case.outputs == "far_requests":
        far = far_tensor((rows, case.topk), 0, torch.int32, home)
        return replace(tensors, output_buffers={"out": OutputBuffer(far, far)})
    before, after = {"given": (0, 0), "strided": (8, 8), "odd": (1, 2)}[case.outputs]
    storage = torch.zeros((rows, before + case.topk + after), dtype=torch.int32, device=home)
    return replace(tensors, output_buffers={"out": OutputBuffer(storage[:, before : before + case.topk], storage)})

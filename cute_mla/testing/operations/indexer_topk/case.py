"""Cases of indexer_topk and indexer_topk_prefill: the operands of a case of mqa_logits, and a selection."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch

from ....spec.arch import Arch
from ....spec.mqa_logits import COLUMNS, SCALE_BYTES
from ....spec.topk_indices import config_for, streams
from ...cases.base import Tags
from ...cases.tensors import sliced_buffers
from ..mqa_logits.case import LogitsCase, MqaLogitsCase, MqaLogitsTensors, make_mqa_logits_tensors
from ..topk_indices.case import LogitValues, TopkIndicesCase, TopkProblem, numbers_of

_DIGITS = 5  # of a number, base 16, which e4m3 holds
_UNIT = 2.0**-17  # of the last digit
_LEAST = -4.0


@dataclass(frozen=True)
class IndexerTopkCase(LogitsCase):
    """One choice of `topk` keys of each query token; other fields as in LogitsCase.

    columns: max_seqlen_k of rows. values: those whose logits are exact, so that so is the choice. slots: keys are given by their slots.
    patterns: what logits are instead, by token, as the values of TopkIndicesCase: of one request with pages.
    """

    op: ClassVar[str] = "indexer_topk"
    tags: ClassVar[Tags] = {**LogitsCase.tags, "slots": lambda _: "slots", "patterns": "_".join}

    topk: int = 64
    slots: bool = False
    patterns: tuple[LogitValues, ...] = ()

    @property
    def logits(self) -> MqaLogitsCase:
        """Return the case of the logits."""
        columns = None if self.page_size is None else -(-self.keys // self.page_size) * self.page_size  # all that the table has room for
        given = {field.name: getattr(self, field.name) for field in fields(LogitsCase)}
        return MqaLogitsCase(**{**given, "columns": columns, "clean": False, "outputs": "allocated", "sm_count": None})

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
        return f"{super().shape_id}-top{self.topk}"

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

    def problem(self, arch: Arch) -> TopkProblem:  # type: ignore[override]
        """Return the properties of the call that select this kernel."""
        columns = self.most_keys if self.is_scored else 0
        return TopkProblem(
            config_for(self.requests * self.tokens, columns, self.topk, self.sm_count or arch.sm_count, self.slots, streams(arch))
        )


def make_indexer_topk_tensors(case: IndexerTopkCase, device: str | torch.device = "cpu") -> MqaLogitsTensors:
    """Make the operands of a case: equal for equal cases. A result that the caller passes is int32."""
    tensors = make_mqa_logits_tensors(case.logits, device)
    if case.patterns:
        tensors = _with_patterns(case, tensors)
    shape = (case.requests * case.tokens, case.topk)
    return replace(tensors, output_buffers=sliced_buffers(case.outputs, {"out": (shape, torch.int32)}, tensors.q.device))


def _with_patterns(case: IndexerTopkCase, tensors: MqaLogitsTensors) -> MqaLogitsTensors:
    """Replace queries, weights and keys of one request by such that token t has the numbers of patterns[t], rounded to 19 bits.

    Head h of a token is column h of a key. The first is 1 in all keys; each token has five of its own, which hold the digits of its number.
    """
    assert tensors.block_table is not None
    assert case.page_size is not None
    first = torch.arange(_DIGITS)
    columns = torch.zeros(case.keys, COLUMNS)
    columns[:, 0] = 1.0
    weights = torch.zeros(case.tokens, case.heads)
    weights[:, 0] = _LEAST
    for token, values in enumerate(case.patterns):
        drawn = TopkIndicesCase(rows=case.tokens, columns=case.keys, topk=case.topk, values=values, sm_count=case.sm_count, seed=case.seed)
        whole = ((numbers_of(drawn, 1)[0] - _LEAST) / _UNIT).round().clamp(0, 16**_DIGITS - 1).long()
        own = 1 + _DIGITS * token + first
        columns[:, own] = (whole.unsqueeze(1) >> 4 * first & 15).float()
        weights[token, own] = _UNIT * 16.0**first
    q = torch.eye(case.heads, COLUMNS).to(tensors.q.dtype).view(torch.uint8)
    tensors.q.view(torch.uint8).copy_(q.expand(tensors.q.shape))
    tensors.weights.copy_(weights)
    place = torch.arange(case.keys, device=tensors.keys.device)
    pages, rows = tensors.block_table[0, place // case.page_size].long(), place % case.page_size
    cache = tensors.keys.flatten(1)
    codes = columns.to(tensors.q.dtype).view(torch.uint8).to(cache.device)
    ones = torch.ones(case.keys, 1).view(torch.uint8).to(cache.device)
    for width, begin, content in ((COLUMNS, 0, codes), (SCALE_BYTES, case.page_size * COLUMNS, ones)):
        where = begin + rows.unsqueeze(1) * width + torch.arange(width, device=cache.device)
        cache[pages.unsqueeze(1), where] = content
    return tensors

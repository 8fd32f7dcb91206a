"""The operation topk_indices."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import reference
from ...indexer import topk_indices
from ..cases.topk_indices import TopkIndicesCase, TopkIndicesTensors, make_topk_indices_tensors
from .operation import Operation, Result, output_argument


def _arguments(case: TopkIndicesCase, tensors: TopkIndicesTensors, workspace: Tensor | None) -> dict[str, Any]:
    return {"logits": tensors.logits, "lengths": tensors.lengths, "topk": case.topk, "out": output_argument(tensors, "out")}


def _reference(case: TopkIndicesCase, tensors: TopkIndicesTensors) -> Result:
    return (reference.topk_indices(tensors.logits, tensors.lengths, case.topk),)


TOPK_INDICES = Operation(make_topk_indices_tensors, topk_indices, _arguments, _reference)

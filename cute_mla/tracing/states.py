"""The op of merge_states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops import merge_states as merge
from .register import Function, TorchOp


def _merged(outs: list[Tensor], stacked: bool = False, **others: Any) -> tuple[Tensor, Tensor]:
    """Allocate out and lse of merge_states."""
    shape = outs[0].shape[1:] if stacked else outs[0].shape
    return outs[0].new_empty(shape), outs[0].new_empty(shape[:-1], dtype=torch.float32)


def _as_lists(call: Function, arguments: dict[str, Any]) -> Any:
    """Call the op, which takes lists alone."""
    outs, lses = arguments.pop("outs"), arguments.pop("lses")
    if merge.is_stacked(outs, lses):
        return call(outs=[outs], lses=[lses], stacked=True, **arguments)
    return call(outs=list(outs), lses=list(lses), **arguments)


MERGE = TorchOp(
    merge.run,
    _merged,
    ("out", "lse"),
    spelled={"outs": "Tensor[] outs", "lses": "Tensor[] lses, bool stacked=False"},
    traced=_as_lists,
    body=merge.run_lists,
)

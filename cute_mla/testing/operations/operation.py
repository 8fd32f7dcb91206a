"""The operation of a case: its tensors, its call through the public API, and the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..cases.base import BaseCase
from ..cases.tensors import Operands
from ..compare import ErrorLimit, Tolerance

Result = tuple[Tensor, ...]


def _as_tuple(case: Any, arguments: Mapping[str, Any], returned: Any) -> Result:
    return (returned,) if isinstance(returned, Tensor) else tuple(returned)


def _no_workspace(case: Any, tensors: Any) -> int:
    return 0


def _no_limits(case: Any, tensors: Any, expected: Result) -> Mapping[str, ErrorLimit]:
    return {}


@dataclass(frozen=True)
class Operation:
    """One op. Each function takes a case of the op.

    make_tensors(case, device): makes the operands. function: the public function.
    arguments(case, tensors, workspace or None): all arguments of that function by name. Makes a plan of tensors on the device, if the
        case asks for one.
    reference(case, tensors): computes the results in fp64 and returns them in fp32.
    results: by name, in the order of call and reference, the tolerance of each result; `operation` sets it for a case.
    workspace_bytes(case, tensors): exactly what the call needs. results_of(case, arguments, returned): the results after the function
        has returned.
    limits(case, tensors, results of the reference): by name of a result, the limit of its errors, for ops that have one besides the
        tolerances.
    """

    make_tensors: Callable[[Any, str | torch.device], Any]
    function: Callable[..., Any]
    arguments: Callable[[Any, Any, Tensor | None], dict[str, Any]]
    reference: Callable[[Any, Any], Result]
    results: Mapping[str, Tolerance] = field(default_factory=dict)
    workspace_bytes: Callable[[Any, Any], int] = _no_workspace
    results_of: Callable[[Any, Mapping[str, Any], Any], Result] = _as_tuple
    limits: Callable[[Any, Any, Result], Mapping[str, ErrorLimit]] = _no_limits

    def call(self, case: Any, tensors: Any, workspace: Tensor | None) -> Result:
        """Call the public function with the operands of the case; return its results."""
        arguments = self.arguments(case, tensors, workspace)
        return self.results_of(case, arguments, self.function(**arguments))


def empty_lse(case: BaseCase) -> float:
    """Return the lse of a row without keys, by default +inf."""
    return math.inf if case.empty_lse is None else case.empty_lse


def output_argument(tensors: Operands, name: str) -> Tensor | None:
    """Return the tensor that the caller passes for a result, or None."""
    buffer = tensors.output_buffers.get(name)
    return None if buffer is None else buffer.tensor

"""The record of an op: its cases and suites, how tensors are made, the call through the public API, the reference and its bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...spec.arch import Arch
from ..cases.base import BaseCase
from ..cases.tensors import Operands
from ..compare import EQUAL, ErrorLimit, Tolerance
from ..suites.entries import OpSuites

Result = tuple[Tensor, ...]
Plan = tuple[Tensor, Tensor]  # tile_scheduler_metadata, num_splits
Sample = tuple[Result, Callable[[Result], Result]]


def _as_tuple(case: Any, arguments: Mapping[str, Any], returned: Any) -> Result:
    return (returned,) if isinstance(returned, Tensor) else tuple(returned)


def _equal(case: Any) -> Mapping[str, Tolerance]:
    return {"out": EQUAL}


def _no_workspace(case: Any, tensors: Any) -> int:
    return 0


def _no_form(case: Any, arch: Arch) -> Mapping[str, Any]:
    return {}


def _no_limits(case: Any, tensors: Any, expected: Result) -> Mapping[str, ErrorLimit]:
    return {}


@dataclass(frozen=True)
class Operation:
    """The record of one op. Each function takes a case of the op.

    case: the class of its cases, which names the op. suites: its cases.
    make_tensors(case, device): makes the operands. function: the public function.
    arguments(case, tensors, workspace or None): all arguments of that function by name. Makes a plan of tensors on the device, if the
        case asks for one.
    expected(arguments): computes the results of a call with these arguments by name, in fp64, and returns them in fp32; of an op that
        writes in place, it writes to these arguments in plain torch.
    operands(case, tensors): those arguments that decide on the results; by default all that can be had without a plan and a workspace.
    bounds(case): by name, in the order of call and reference, the tolerance of each result; equal bits by default.
    workspace_bytes(case, tensors): exactly what the call needs. results_of(case, arguments, returned): the results after the function
        has returned.
    taken(case, tensors, picks, moved): the call of these requests of a case, in this order, repeated ones too. moved: what belongs to them
        lies elsewhere in memory, tables are wider than any of them needs, and what there is to plan is planned beforehand.
    of(case, tensors, results, place): the results of the request at a place of a call.
    requests(case): how many requests a call has.
    part(case, tensors, request): as `sample`, of a part of a request, for ops whose requests may be too large for the reference.
    plan(case, tensors): makes a plan on the device, for ops whose calls take one.
    form(case, arch): what `expected` must know of the kernel that serves a case on an architecture, by name, beside the arguments.
    in_place: arguments that the call overwrites, which `arguments` copies from tensors of these names.
    limits(case, tensors, results of the reference): by name of a result, the limit of its errors, for ops that have one besides the
        tolerances.
    """

    case: type[BaseCase]
    suites: OpSuites[Any]
    make_tensors: Callable[[Any, str | torch.device], Any]
    function: Callable[..., Any]
    arguments: Callable[[Any, Any, Tensor | None], dict[str, Any]]
    expected: Callable[[Mapping[str, Any]], Result]
    bounds: Callable[[Any], Mapping[str, Tolerance]] = _equal
    workspace_bytes: Callable[[Any, Any], int] = _no_workspace
    results_of: Callable[[Any, Mapping[str, Any], Any], Result] = _as_tuple
    limits: Callable[[Any, Any, Result], Mapping[str, ErrorLimit]] = _no_limits
    taken: Callable[[Any, Any, Sequence[int], bool], tuple[Any, Any]] = field(kw_only=True)
    of: Callable[[Any, Any, Result, int], Result] = field(kw_only=True)
    requests: Callable[[Any], int] = field(kw_only=True)
    part: Callable[[Any, Any, int], Sample] | None = None
    plan: Callable[[Any, Any], Plan] | None = None
    operands: Callable[[Any, Any], dict[str, Any]] | None = None
    form: Callable[[Any, Arch], Mapping[str, Any]] = _no_form
    in_place: tuple[str, ...] = ()

    def call(self, case: Any, tensors: Any, workspace: Tensor | None) -> Result:
        """Call the public function with the operands of the case; return its results."""
        arguments = self.arguments(case, tensors, workspace)
        return self.results_of(case, arguments, self.function(**arguments))

    def reference(self, case: Any, tensors: Any, arch: Arch | None = None) -> Result:
        """Compute the results of the call of a case, on an architecture if its kernels' contracts differ."""
        arguments = self.arguments(case, tensors, None) if self.operands is None else self.operands(case, tensors)
        results = self.expected(arguments if arch is None else {**arguments, **self.form(case, arch)})
        return self.results_of(case, arguments, results) if self.in_place else results

    def sample(self, case: Any, tensors: Any, request: int) -> Sample:
        """Compute a request of a call by the reference. Return its results, and what takes the same part of the results of the call."""
        if self.part is not None:
            return self.part(case, tensors, request)
        taken, own = self.taken(case, tensors, [request], False)
        return self.of(taken, own, self.reference(taken, own), 0), lambda results: self.of(case, tensors, results, request)


def empty_lse(case: BaseCase) -> float:
    """Return the lse of a row without keys, by default +inf."""
    return math.inf if case.empty_lse is None else case.empty_lse


def operands_of(tensors: Operands, *names: str) -> dict[str, Any]:
    """Return operands that arguments are named like."""
    return {name: getattr(tensors, name) for name in names}


def outputs_of(tensors: Operands, *names: str) -> dict[str, Any]:
    """Return the tensor that the caller passes for each result, or None."""
    buffers = tensors.output_buffers
    return {name: buffers[name].tensor if name in buffers else None for name in names}


def scale_argument(arguments: Mapping[str, Any]) -> float:
    """Return the scale of the softmax that a call asks for, by default d_qk ** -0.5."""
    scale = arguments["softmax_scale"]
    return float(arguments["q"].shape[-1] ** -0.5 if scale is None else scale)

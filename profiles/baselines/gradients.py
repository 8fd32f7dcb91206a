"""Backward passes of libraries that are differentiable by torch's autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from cute_mla.testing.operations.dense_prefill_backward.case import DensePrefillBackwardTensors

from ..workloads.workload import Results
from .baseline import Run


class Leaves(Protocol):
    """The operands of a forward call."""

    @property
    def q(self) -> torch.Tensor:
        """Return the queries."""
        ...

    @property
    def k(self) -> torch.Tensor:
        """Return the keys."""
        ...

    @property
    def v(self) -> torch.Tensor:
        """Return the values."""
        ...


class _Copies:
    """Copies of q, k and v that require gradients."""

    def __init__(self, operands: DensePrefillBackwardTensors) -> None:
        self.q, self.k, self.v = (tensor.detach().clone().requires_grad_() for tensor in (operands.q, operands.k, operands.v))


def gradient_run(operands: DensePrefillBackwardTensors, forward: Callable[[Leaves], torch.Tensor]) -> Run:
    """Return a run of the backward pass of `forward`, whose out [tokens, h_q, 128] is computed here, outside the timing."""
    leaves = _Copies(operands)
    with torch.enable_grad():
        out = forward(leaves)

    def run() -> Results:
        gradients = torch.autograd.grad(out, (leaves.q, leaves.k, leaves.v), operands.dout, retain_graph=True)
        return dict(zip(("dq", "dk", "dv"), gradients, strict=True))

    return run

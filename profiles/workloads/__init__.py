"""Workloads: operands, timed call and check of a benchmark row."""

from __future__ import annotations

import torch

from ..rows import Case
from .calls import CALLS
from .combine import Combine
from .operands import generator
from .workload import Workload


def make_workload(case: Case, device: torch.device, l2_bytes: int, sets: int | None = None) -> Workload:
    """Return the workload of a case on a device. l2_bytes: size of its L2 cache, which decides the number of operand sets."""
    if case.op == "combine":
        return Combine(case, device, l2_bytes, sets)
    row_call = CALLS[case.op]
    call_case = row_call.case_of(case, case.shape)
    return Workload(case, call_case, lambda seed: row_call.draw(call_case, case.shape, generator(device, seed)), device, l2_bytes, sets)

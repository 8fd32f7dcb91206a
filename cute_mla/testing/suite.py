"""Suites: which cases of each op run on a GPU and on the simulated device, and why a case is reduced or skipped.

quick   Smoke cases that reach most features and kernels for their cost, drawn by the rule of quick.py: half a minute on two cores.
smoke   Small cases of which each kernel variant meets every feature of its op (suites/cover.py): layouts, far strides of every operand,
        page sizes, lengths, kinds of scores, sinks, masks. Beside these a few cases whose size is what they test, of at most 200 tiles.
        Every line of the edge contract occurs. The simulated device and GPUs run the same cases. So do all architectures, but for rows at
        multiples of 4 bytes, which Hopper alone takes.
full    FlashMLA's grid of the op in every dtype (dense prefill: a grid of this project), its corner cases and the smoke cases. A GPU runs
        all of them. The simulated device runs the corner and smoke cases, a few long cases, and of the grid a pairwise cover: of all
        kernel variants and factor values. Small cases run whole: short sequences and at most 6 requests, or few tiles (prefill). Large
        ones add the pairs that no small case has, cut to a budget of tiles: by batch (decode), query tokens (sparse prefill) or query
        heads per KV head (dense prefill).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from ..spec.arch import Arch
from ..spec.kernel_ops import OPS
from .operations import OPERATIONS
from .suites.entries import SuiteEntry
from .suites.quick import kernels_of, quick_cases

__all__ = ["OPS", "SUITES", "suite", "suite_kernels"]

SUITES = ("quick", "smoke", "full")


def suite(name: str, op: str, *, simulated: bool, arch: Arch | None = None, seed: int = 0) -> list[SuiteEntry[Any]]:
    """Return the entries of a suite, the seeds of all cases raised by this one. Raise ValueError for an unknown suite or op.

    arch: leave out cases that this architecture refuses; None: keep all.
    """
    if name not in SUITES or op not in OPS:
        raise ValueError(f"suite is {name!r} and op {op!r}; supported: {', '.join(SUITES)} and {', '.join(OPS)}")
    suites = OPERATIONS[op].suites
    if name == "quick":
        entries = [SuiteEntry(case) for case in quick_cases(tuple(suites.smoke))]
    elif name == "smoke":
        entries = [SuiteEntry(case) for case in suites.smoke]
    elif simulated:
        entries = _simulated_full(op)
    else:
        entries = [SuiteEntry(case) for case in suites.full()]
    taken = [entry for entry in entries if arch is None or entry.case.runs_on(arch)]
    return [replace(entry, case=replace(entry.case, seed=entry.case.seed + seed)) for entry in taken]


@cache
def _simulated_full(op: str) -> list[SuiteEntry[Any]]:
    """Return the full suite of the simulated device, whose cover takes a second or two."""
    suites = OPERATIONS[op].suites
    return suites.simulated.entries(suites.full())


def suite_kernels(name: str, op: str, arch: Arch) -> set[str]:
    """Return the manifest names of the kernels that a suite of an op launches on the simulated device."""
    return {
        kernel for entry in suite(name, op, simulated=True, arch=arch) if entry.mode != "skipped" for kernel in kernels_of(entry.case, arch)
    }

"""Any op on the simulated device, for tests: one call, or a case judged against the reference."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from torch import Tensor

import cute_mla
from cute_mla.simulator import Finding
from cute_mla.spec.arch import Arch
from cute_mla.testing.cases.base import BaseCase
from cute_mla.testing.cases.tensors import Operands
from cute_mla.testing.compare import compare, same_bits, with_error_limit
from cute_mla.testing.operations import operation
from cute_mla.testing.runner import Record, Schedule, Target, call, run_case

Result = tuple[Tensor, ...]

ROUND_ROBIN = Schedule("round_robin", 0)


@dataclass(frozen=True)
class Bench:
    """The simulated device of one architecture."""

    arch: Arch

    def judge(self, case: BaseCase, *schedules: Schedule) -> list[Record]:
        """Run a case and assert that it passes, under every schedule (default: round robin). Skip one that the architecture refuses."""
        self.skip_refused(case)
        records = run_case(case, Target(self.arch.name, "sim", schedules or (ROUND_ROBIN,)))
        for record in records:
            assert record.passed, f"{record.case} on {record.arch} under {record.schedule}: {record.reason}"
        return records

    def run(self, case: BaseCase, tensors: Operands | None = None, *, schedule: Schedule = ROUND_ROBIN) -> Result:
        """Make a case's call, with other operands if given. A finding of the simulator raises. Skip as judge does."""
        self.skip_refused(case)
        with cute_mla.simulate(self.arch, case.sm_count, schedule=schedule.name, seed=schedule.seed):
            return call(case, operation(case).make_tensors(case, "cpu") if tensors is None else tensors)

    def skip_refused(self, case: BaseCase) -> None:
        """Skip the test if there is no kernel for a case, as docs/limits.md says."""
        if not case.runs_on(self.arch):
            pytest.skip(f"{self.arch.name} has no kernel for {case}")

    def collect(self, case: BaseCase, tensors: Operands) -> tuple[Result, list[Finding]]:
        """Make a case's call with these operands. Return its results and the findings of the simulator."""
        with cute_mla.simulate(self.arch, case.sm_count, on_finding="collect") as device:
            return call(case, tensors), device.findings


def expect(case: BaseCase, tensors: Operands, result: Result, arch: Arch | None = None) -> None:
    """Assert that a result agrees with the reference for these operands. arch: where kernels' contracts differ."""
    op = operation(case)
    expected = op.reference(case, tensors, arch)
    limits = op.limits(case, tensors, expected)
    for (name, tolerance), actual, wanted in zip(op.bounds(case).items(), result, expected, strict=True):
        comparison = with_error_limit(name, compare(name, actual, wanted, tolerance), limits.get(name))
        assert comparison.passed, comparison.reason


def identical(result: Result, other: Result) -> bool:
    """Return whether two results agree in every bit."""
    return all(same_bits(x, y) for x, y in zip(result, other, strict=True))

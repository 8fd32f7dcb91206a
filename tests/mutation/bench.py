"""Runs broken kernels in one process: the runtime's parsed module of a kernel is replaced by that of the broken text."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch

from cute_mla import simulator
from cute_mla.manifest import KernelEntry, kernel_name
from cute_mla.runtime import simulated
from cute_mla.runtime.device import simulate
from cute_mla.runtime.library import load_artifacts
from cute_mla.simulator.engine import recorder
from cute_mla.spec.arch import ARCHS
from cute_mla.spec.cache_rows import ANY_16_BITS
from cute_mla.testing.cases.base import BaseCase
from cute_mla.testing.compare import same_bits
from cute_mla.testing.operations import Result
from cute_mla.testing.runner import Schedule
from tests.mutation.cases import cases
from tests.mutation.merging import operation_of
from tests.mutation.places import Places
from tests.mutation.sites import Mutation

CPU_SECONDS = 40  # of one run; a broken kernel may run for ever
MEMORY = 3 << 30  # bytes of a process; it may also issue copies for ever
SAME = ("dtype", "operands", "head_dim")  # fields of a kernel's config that its cases have, too
MOST_CASES = 3  # of those that use a kernel


def orders(seeds: int) -> tuple[Schedule, ...]:
    """Schedules, those that find most first. The first two have no seed."""
    fixed = (Schedule("lazy", 0), Schedule("round_robin", 0))
    return fixed + tuple(Schedule(name, seed) for seed in range(seeds) for name in ("adversarial", "random"))


@dataclass(frozen=True)
class Outcome:
    """What came of a mutation. noticed: "finding", "deadlock", "answer", "error", "hang", or "" for a survivor. by: schedule and case."""

    noticed: str
    detail: str
    by: str


@contextmanager
def limited_time() -> Iterator[None]:
    """Raises TimeoutError in what takes too long."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


class Subject:
    """A kernel with its cases. places: where its instructions run in these. clean: schedules and cases without findings as it ships."""

    def __init__(self, kernel: KernelEntry) -> None:
        self.arch = kernel.arch
        self.kernel = kernel
        self.ptx = load_artifacts().ptx(kernel)
        self.places = Places(kernel)
        self.clean: set[str] = set()
        self.cases: list[tuple[BaseCase, Any, Result]] = []
        for case in cases(kernel.op, ARCHS[kernel.arch]):
            same = {name: kernel.config[name] for name in SAME if name in kernel.config and hasattr(case, name)}
            case = replace(case, **{name: value for name, value in same.items() if value != ANY_16_BITS})
            name = kernel_name(case.op, kernel.arch, case.problem(ARCHS[kernel.arch]).config.name)
            if len(self.cases) < MOST_CASES and (name == kernel.name or kernel.op != case.op):
                self._try(case)

    def _try(self, case: BaseCase) -> None:
        """Take a case in if it launches the kernel; it must be without findings."""
        tensors = operation_of(case).make_tensors(case, "cpu")
        simulated._modules.clear()
        with self.places.watch():
            results, findings = self._call(case, tensors, Schedule("round_robin", 0))
        if self.kernel.ptx_sha256 in simulated._modules:
            if findings:
                raise ValueError(f"{self.kernel.name} as it ships has findings: {findings[0]}")
            self.cases.append((case, tensors, results))

    def _call(self, case: BaseCase, tensors: Any, schedule: Schedule) -> tuple[Result, Sequence[simulator.Finding]]:
        for given in tensors.output_buffers.values():
            given.storage.fill_(float("nan"))
        with simulate(self.arch, case.sm_count, schedule=schedule.name, seed=schedule.seed, on_finding="collect") as device:
            results = operation_of(case).call(case, tensors, None)
        return tuple(result.clone() for result in results), device.findings

    def judge(self, mutation: Mutation, schedules: Sequence[Schedule]) -> Outcome:
        """Runs the cases with the broken kernel until something is noticed. ValueError if it is noticed in the kernel as it ships, too."""
        module = simulator.load_module(mutation.apply(self.ptx))
        key = self.kernel.ptx_sha256
        before = simulated._modules.pop(key, None)
        simulated._modules[key] = module
        try:
            outcome = self._judge(schedules)
        finally:
            simulated._modules.pop(key, None)
            if before is not None:
                simulated._modules[key] = before
        self._expect_clean(outcome, schedules)
        return outcome

    def _expect_clean(self, outcome: Outcome, schedules: Sequence[Schedule]) -> None:
        """What was noticed must be the mutation's doing."""
        for schedule in schedules:
            for case, tensors, expected in self.cases:
                by = f"{schedule} {case.id}"
                if by == outcome.by and by not in self.clean:
                    results, findings = self._call(case, tensors, schedule)
                    if findings or not all(map(same_bits, results, expected)):
                        raise ValueError(f"{self.kernel.name} as it ships, {by}: {[*findings, 'other results'][0]}")
                    self.clean.add(by)

    def _judge(self, schedules: Sequence[Schedule]) -> Outcome:
        for schedule in schedules:
            for case, tensors, expected in self.cases:
                by = f"{schedule} {case.id}"
                try:
                    with limited_time():
                        results, findings = self._call(case, tensors, schedule)
                except TimeoutError:
                    return Outcome("hang", "", by)
                except Exception as error:
                    return Outcome("error", f"{type(error).__name__}: {error}".splitlines()[0], by)
                if findings:
                    first = findings[0]
                    return Outcome("deadlock" if first.kind == "deadlock" else "finding", str(first), by)
                if not all(map(same_bits, results, expected)):
                    return Outcome("answer", "", by)
        return Outcome("", "", "")


def prepare() -> None:
    """One thread, not too much memory; a run ends at its first finding."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    recorder.MAX_FINDINGS = 1

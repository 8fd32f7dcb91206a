"""Judges broken numbers: a kernel's smoke cases run as `cute-mla verify` runs them, against the reference."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cute_mla.manifest import KernelEntry
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.spec.arch import ARCHS
from cute_mla.spec.kernel_ops import KERNEL_OPS
from cute_mla.testing.cases.base import BaseCase
from cute_mla.testing.runner import Record, Schedule, Target, run_case, schedules_in_turn
from cute_mla.testing.suite import OPS, suite
from tests.mutation.bench import UNNOTICED, Outcome, launched_instead, limited_time
from tests.mutation.places import Places
from tests.mutation.sites import Mutation

ROUND_ROBIN = Schedule("round_robin", 0)
LEAST_SECONDS, SLOWER = 3.0, 5.0  # a broken case may take so much CPU time, and so many times that of the shipped kernel
_EITHER = {"dense_prefill", "masked_prefill"}  # kernels of which a call launches the one that its case names


def ops_of(kernel: KernelEntry) -> list[str]:
    """Return the ops whose calls launch a kernel."""
    callers = KERNEL_OPS[kernel.op].callers
    return [op for op in OPS if op in ((kernel.op,) if callers is None else callers)]


def _run(case: BaseCase, kernel: KernelEntry, schedule: Schedule) -> Record:
    (record,) = run_case(case, Target(kernel.arch, "sim", (schedule,)))
    return record


@dataclass(frozen=True)
class SmokeTrial:
    """A case of a suite that launches a kernel, under a schedule. lines: PTX lines that it runs. seconds: CPU time of a run."""

    kernel: KernelEntry
    case: BaseCase
    schedule: Schedule
    lines: frozenset[int]
    seconds: float

    def __call__(self, ptx: str) -> Outcome:
        by = f"{self.schedule} {self.case.id}"
        try:
            with launched_instead(self.kernel, ptx), limited_time(LEAST_SECONDS + SLOWER * self.seconds):
                record = _run(self.case, self.kernel, self.schedule)
        except TimeoutError:
            return Outcome("hang", "", by)
        if record.passed:
            return UNNOTICED
        if "TimeoutError" in record.reason:
            return Outcome("hang", "", by)
        return Outcome("finding" if record.findings else "answer", record.reason.splitlines()[0], by)


class SmokeSubject:
    """A kernel with the cases of a suite that launch it.

    A case runs on the kernel as it ships when the first mutation needs it, cheapest first: most are noticed by one of the first cases.
    """

    def __init__(self, kernel: KernelEntry, suite_name: str = "smoke") -> None:
        self.kernel = kernel
        self.text = load_artifacts().ptx(kernel)
        self.places = Places(kernel)
        self.known: list[SmokeTrial] = []
        self.notices: Counter[str] = Counter()  # mutations that each case has noticed, by its id
        self._rest = self._trials(sorted(self.cases(suite_name), key=lambda item: item[0].tiles))

    @property
    def trials(self) -> Iterator[SmokeTrial]:
        """Yield the cases that launch the kernel; ValueError if one fails on the kernel as it ships.

        First those that have run, with the most notices for their time in front.
        """
        yield from sorted(self.known, key=lambda trial: trial.seconds / (1 + self.notices[trial.case.id]))
        for trial in self._rest:
            self.known.append(trial)
            yield trial

    def cases(self, suite_name: str) -> Iterator[tuple[BaseCase, Schedule]]:
        """Yield the cases of the suite that may launch the kernel, with the schedules under which `cute-mla verify` runs them."""
        arch = ARCHS[self.kernel.arch]
        for op in ops_of(self.kernel):
            cases = [entry.case for entry in suite(suite_name, op, simulated=True, arch=arch) if entry.mode != "skipped"]
            for case, (schedule,) in zip(cases, schedules_in_turn(cases, arch, 0), strict=True):
                if {self.kernel.op, case.kernel_op} == _EITHER:
                    continue
                if op != self.kernel.op or load_artifacts().entry(op, arch.name, case.problem(arch).config.name).name == self.kernel.name:
                    yield case, schedule

    def _trials(self, cases: Sequence[tuple[BaseCase, Schedule]]) -> Iterator[SmokeTrial]:
        """Run the kernel as it ships; yield the cases that launch it."""
        for case, schedule in cases:
            own = Places(self.kernel)
            before = time.process_time()
            with own.watch():
                record = _run(case, self.kernel, schedule)
            if not own.roles:
                continue  # the call needs no launch of the helper
            if not record.passed:
                raise ValueError(f"{self.kernel.name} as it ships fails {case.id} under {schedule}: {record.reason}")
            for line, roles in own.roles.items():
                self.places.roles[line] |= roles
            yield SmokeTrial(self.kernel, case, schedule, frozenset(own.roles), time.process_time() - before)

    def judge(self, mutation: Mutation) -> Outcome:
        """Run the cases that reach the broken line until one notices. UNNOTICED if none does."""
        broken = mutation.apply(self.text)
        for trial in self.trials:
            if mutation.line in trial.lines and (outcome := trial(broken)).noticed:
                self.notices[trial.case.id] += 1
                return outcome
        return UNNOTICED

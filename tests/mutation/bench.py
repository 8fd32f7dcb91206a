"""Judges broken kernels: a trial runs a broken text, PTX or machine code, once, under one schedule, and says what it notices."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from multiprocessing import get_context
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch

from cute_mla import simulator
from cute_mla.manifest import KernelEntry, kernel_name
from cute_mla.runtime import simulated_device
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.runtime.current import simulate
from cute_mla.simulator.engine import recorder
from cute_mla.simulator.sass.module import load_machine_code
from cute_mla.simulator.sass.text_cache import disassembly
from cute_mla.spec.arch import ARCHS, Arch
from cute_mla.spec.cache_rows import ANY_16_BITS
from cute_mla.testing.cases.base import BaseCase
from cute_mla.testing.compare import same_bits
from cute_mla.testing.operations import Result, operation
from cute_mla.testing.runner import Record, Schedule, Target, run_case, start_worker
from tests.mutation.cases import cases
from tests.mutation.places import Places
from tests.mutation.planting import EVERY, Planted
from tests.mutation.sites import Mutation

CPU_SECONDS = 40  # of one run; a broken kernel may run for ever
MEMORY = 3 << 30  # bytes of a process; it may also issue copies for ever
SAME = ("dtype", "operands", "head_dim")  # fields of a kernel's config that its cases have, too
MOST_CASES = 3  # of those that use a kernel


def orders(seeds: int) -> tuple[Schedule, ...]:
    """Return schedules, those that find most first. The first two have no seed."""
    fixed = (Schedule("lazy", 0), Schedule("round_robin", 0))
    return fixed + tuple(Schedule(name, seed) for seed in range(seeds) for name in ("adversarial", "random"))


@dataclass(frozen=True)
class Outcome:
    """Outcome of a mutation. noticed: "finding", "deadlock", "answer", "error", "hang", or "" for a survivor. by: schedule and case."""

    noticed: str
    detail: str
    by: str


UNNOTICED = Outcome("", "", "")
Trial = Callable[[str, Schedule], Outcome]  # of a broken text


def first_notice(trials: Iterable[Trial], ptx: str, schedules: Iterable[Schedule]) -> Outcome:
    """Run trials under one schedule after the other until one notices. UNNOTICED if none does."""
    known = list(trials)
    return next((outcome for schedule in schedules for trial in known if (outcome := trial(ptx, schedule)).noticed), UNNOTICED)


def text_of(kernel: KernelEntry, code: str) -> str:
    """Return the PTX of a kernel, or its machine code ("sass") as nvdisasm prints it."""
    artifacts = load_artifacts()
    return artifacts.ptx(kernel) if code == "ptx" else disassembly(artifacts.cubin(kernel))


def key_of(kernel: KernelEntry, code: str) -> str:
    """Return the key of a kernel's code among the modules of the simulated device."""
    return kernel.ptx_sha256 if code == "ptx" else kernel.cubin_sha256


@lru_cache(1)
def _loaded(kernel: str, text: str, code: str) -> simulator.Module:
    if code == "ptx":
        return simulator.load_module(text)
    artifacts = load_artifacts()
    return load_machine_code(artifacts.cubin(artifacts.manifest.kernels[kernel]), text)


@contextmanager
def launched_instead(kernel: KernelEntry, text: str, code: str = "ptx") -> Iterator[None]:
    """Launch a text wherever the runtime would launch a kernel."""
    key = key_of(kernel, code)
    before = simulated_device._modules.pop(key, None)
    simulated_device._modules[key] = _loaded(kernel.name, text, code)
    try:
        yield
    finally:
        simulated_device._modules.pop(key, None)
        if before is not None:
            simulated_device._modules[key] = before


@contextmanager
def limited_time(seconds: float = CPU_SECONDS) -> Iterator[None]:
    """Raise TimeoutError in what takes more seconds of CPU time."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def kernel_of(case: BaseCase, arch: Arch) -> KernelEntry:
    """Return the built kernel that serves a case."""
    return load_artifacts().entry(case.kernel_op, arch.name, case.problem(arch).config.name)


def run_with(ptx: str, case: BaseCase, arch: Arch, schedules: Sequence[Schedule]) -> list[Record]:
    """Verify a case as `cute-mla verify` does, with another PTX text for its kernel."""
    with launched_instead(kernel_of(case, arch), ptx):
        return run_case(case, Target(arch.name, "sim", tuple(schedules)))


def verify(case: BaseCase, arch: Arch, ptx: str, schedule: Schedule) -> Outcome:
    """Notice a finding, an error, or an answer that disagrees with the reference. A trial, once case and arch are given."""
    with patch.object(recorder, "MAX_FINDINGS", 1):
        (record,) = run_with(ptx, case, arch, (schedule,))
    if record.passed:
        return UNNOTICED
    return Outcome("finding" if record.findings else "answer", record.reason, f"{schedule} {case.id}")


def outcomes_of_cases(planted: Planted, arch: Arch, schedules: Sequence[Schedule], ways: slice = EVERY) -> dict[str, Outcome]:
    """Plant a bug in the built kernel of its cases, in every way or in these; return what the cases notice first, by the broken lines."""
    (kernel,) = {kernel_of(case, arch).name: kernel_of(case, arch) for case in planted.cases}.values()
    trials = [partial(verify, case, arch) for case in planted.cases]
    ptx = load_artifacts().ptx(kernel)
    return {label: first_notice(trials, broken, schedules) for label, broken in planted.bug.broken(ptx)[ways]}


def unnoticed(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Return the broken lines that no case notices."""
    return [label for label, outcome in outcomes.items() if not outcome.noticed]


@dataclass(frozen=True)
class ShippedBits:
    """A call whose results must be, bit for bit, those of the kernel as it ships. A trial. code: "ptx" or "sass"."""

    kernel: KernelEntry
    case: BaseCase
    tensors: Any
    expected: Result
    code: str = "ptx"

    def call(self, schedule: Schedule) -> tuple[Result, Sequence[simulator.Finding]]:
        """Make the call; return results and findings."""
        return call_of(self.kernel.arch, self.case, self.tensors, schedule, self.code)

    def name(self, schedule: Schedule) -> str:
        """Name the trial under a schedule."""
        return f"{schedule} {self.case.id}"

    def __call__(self, text: str, schedule: Schedule) -> Outcome:
        by = self.name(schedule)
        try:
            with launched_instead(self.kernel, text, self.code), limited_time():
                results, findings = self.call(schedule)
        except TimeoutError:
            return Outcome("hang", "", by)
        except Exception as error:
            return Outcome("error", f"{type(error).__name__}: {error}".splitlines()[0], by)
        if findings:
            first = findings[0]
            return Outcome("deadlock" if first.kind == "deadlock" else "finding", str(first), by)
        return UNNOTICED if all(map(same_bits, results, self.expected)) else Outcome("answer", "", by)


def call_of(arch: str, case: BaseCase, tensors: Any, schedule: Schedule, code: str = "ptx") -> tuple[Result, Sequence[simulator.Finding]]:
    for given in tensors.output_buffers.values():
        given.storage.fill_(float("nan") if given.storage.is_floating_point() else -1 << 30)
    with simulate(arch, case.sm_count, schedule=schedule.name, seed=schedule.seed, on_finding="collect", code=code) as device:
        results = operation(case).call(case, tensors, None)
    return tuple(result.clone() for result in results), device.findings


class Subject:
    """A kernel with its trials. places: where its instructions run in these. clean: trials that notice nothing in it as it ships."""

    def __init__(self, kernel: KernelEntry, code: str = "ptx") -> None:
        self.kernel = kernel
        self.code = code
        self.text = text_of(kernel, code)
        self.places = Places(kernel)
        self.clean: set[str] = set()
        self.trials: list[ShippedBits] = []
        for drawn in cases(kernel.op, ARCHS[kernel.arch]):
            same = {name: kernel.config[name] for name in SAME if name in kernel.config and hasattr(drawn, name)}
            case = replace(drawn, **{name: value for name, value in same.items() if value != ANY_16_BITS})
            name = kernel_name(case.op, kernel.arch, case.problem(ARCHS[kernel.arch]).config.name)
            if len(self.trials) < MOST_CASES and (name == kernel.name or kernel.op != case.op):
                self._try(case)

    def _try(self, case: BaseCase) -> None:
        """Take a case in if it launches the kernel; it must be without findings."""
        tensors = operation(case).make_tensors(case, "cpu")
        simulated_device._modules.clear()
        with self.places.watch():
            results, findings = call_of(self.kernel.arch, case, tensors, Schedule("round_robin", 0), self.code)
        if key_of(self.kernel, self.code) in simulated_device._modules:
            if findings:
                raise ValueError(f"{self.kernel.name} as it ships has findings: {findings[0]}")
            self.trials.append(ShippedBits(self.kernel, case, tensors, results, self.code))

    def judge(self, mutation: Mutation, schedules: Sequence[Schedule]) -> Outcome:
        """Run the trials until one notices. ValueError if it notices something in the kernel as it ships, too."""
        outcome = first_notice(self.trials, mutation.apply(self.text), schedules)
        self._expect_clean(outcome, schedules)
        return outcome

    def _expect_clean(self, outcome: Outcome, schedules: Sequence[Schedule]) -> None:
        """Check that the mutation caused what was noticed."""
        for schedule in schedules:
            for trial in self.trials:
                if (by := trial.name(schedule)) == outcome.by and by not in self.clean:
                    results, findings = trial.call(schedule)
                    if findings or not all(map(same_bits, results, trial.expected)):
                        raise ValueError(f"{self.kernel.name} as it ships, {by}: {[*findings, 'other results'][0]}")
                    self.clean.add(by)


def processes(number: int) -> ProcessPoolExecutor:
    """Return a pool of so many new processes, which end with this one if it is killed."""
    return ProcessPoolExecutor(number, mp_context=get_context("spawn"), initializer=start_worker)


def prepare() -> None:
    """Limit the process to one thread and some memory; end runs at their first finding."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    recorder.MAX_FINDINGS = 1

"""Runs cases through the public API, compares them with the reference and keeps a record of each.

The order matters: outputs start as NaN and the kernel runs before the reference, so that nothing right can be found lying
in memory; what surrounds strided outputs and the workspace is looked at afterwards.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from threading import Thread
from typing import Any, Literal

import torch
from torch import Tensor

from ..runtime.artifacts import load_artifacts
from ..runtime.current import simulate
from ..runtime.errors import ArtifactError
from ..spec.arch import ARCHS
from .case import BaseCase, Given, Operands
from .compare import Comparison, compare, same_bits, within
from .operations import Result, operation

Kind = Literal["sim", "cuda"]
Status = Literal["passed", "failed", "skipped", "reduced"]

SCHEDULES = ("round_robin", "lazy", "random", "adversarial")

_GUARD = 256  # bytes before and after the workspace that must stay as they are
_GUARD_BYTE = 0xA5
_NAN_BYTE = 0xFF  # four of them are a NaN


@dataclass(frozen=True)
class Schedule:
    """An order in which the simulated device runs warps and completes asynchronous work."""

    name: str
    seed: int

    def __str__(self) -> str:
        return f"{self.name}@{self.seed}" if self.seed else self.name


def schedules(count: int, seed: int) -> tuple[Schedule, ...]:
    """The first `count` schedules: each name once, then each with the next seed, and so on."""
    return tuple(Schedule(SCHEDULES[i % len(SCHEDULES)], seed + i // len(SCHEDULES)) for i in range(count))


@dataclass(frozen=True)
class Target:
    """Where a case runs: the simulated device of an architecture, under each of these schedules, or the first GPU."""

    arch: str
    kind: Kind
    schedules: tuple[Schedule, ...] = (Schedule("round_robin", 0),)


@dataclass(frozen=True)
class Record:
    """One run of one case, as `verify --json` writes it. schedule is None on a GPU; passed is None if it did not run.

    out_cos_limit: what out_cos_diff may be.
    status "reduced": it ran, in the form that `case` says; reason says what was cut, and what failed if it did.
    kernel_sha256: of the cubin. seconds: of the kernels with the API call, on a GPU the first call's set-up included.
    """

    op: str
    arch: str
    case: str
    config: str
    device: Kind
    schedule: str | None
    seed: int
    sm_count: int
    kernel_sha256: str
    status: Status
    reason: str = ""
    passed: bool | None = None
    out_max_abs: float | None = None
    out_cos_diff: float | None = None
    out_cos_limit: float | None = None
    lse_max_abs: float | None = None
    max_logits_max_abs: float | None = None
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class _Outcome:
    """What a call left behind."""

    results: Result
    findings: tuple[str, ...]
    damage: str
    seconds: float


@dataclass(frozen=True)
class _Expected:
    """The reference's results, and how far any element of a result may be off, by its name; of most there is no such limit."""

    results: Result
    limits: Mapping[str, float]


def _expected(case: BaseCase, tensors: Operands) -> _Expected:
    op = operation(case)
    results = op.reference(case, tensors)
    return _Expected(results, op.limits(case, tensors, results))


def skipped(case: BaseCase, target: Target, reason: str) -> Record:
    """The record of a case that is not run."""
    return Record(**_identity(case, target), schedule=None, status="skipped", reason=reason)


def run_case(case: BaseCase, target: Target, reduced: str = "") -> list[Record]:
    """Runs a case, on the simulated device once under each schedule; all must give the same bits.

    reduced: what was cut from the case to get this one, if anything. Whatever goes wrong becomes a failed record, except
    that ArtifactError is raised: without kernels there is nothing to say about any case.
    """
    device = "cuda" if target.kind == "cuda" else "cpu"
    tensors = operation(case).make_tensors(case, device)
    expected: _Expected | None = None
    first: _Outcome | None = None
    records = []
    for schedule in target.schedules if target.kind == "sim" else (None,):
        base = {**_identity(case, target), "schedule": None if schedule is None else str(schedule)}
        try:
            outcome = _run(case, target, tensors, schedule)
        except ArtifactError:
            raise
        except Exception as error:
            records.append(_finish(base, reduced, [_brief(error)], findings=[str(item) for item in getattr(error, "findings", ())]))
            continue
        if expected is None:
            expected = _expected(case, tensors)
        limit = operation(case).results["out"].cos_tol
        records.append(_judge(base, reduced, outcome, first, _compared(case, outcome, expected), limit))
        first = first or outcome
    return records


def run_all(
    jobs: Sequence[tuple[BaseCase, Target, str]], workers: int | None = None, on_start: Callable[[BaseCase], None] = lambda case: None
) -> Iterator[tuple[int, list[Record]]]:
    """Runs jobs (case, target, what was reduced) and yields the index and records of each as it ends.

    Jobs on the simulated device are spread over processes (default: one per CPU), large ones first; a GPU runs its jobs in
    this process, in order, and each is told to on_start before: a kernel that hangs a GPU leaves its name.
    """
    on_gpu = [index for index, job in enumerate(jobs) if job[1].kind == "cuda"]
    simulated = [index for index, job in enumerate(jobs) if job[1].kind == "sim"]
    for index in on_gpu:
        on_start(jobs[index][0])
        yield index, run_case(*jobs[index])
    if not simulated:
        return
    simulated.sort(key=lambda index: -jobs[index][0].tiles)
    workers = min(workers or os.cpu_count() or 1, len(simulated))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start_worker) as pool:
        futures = {pool.submit(run_case, *jobs[index]): index for index in simulated}
        try:
            for future in as_completed(futures):
                try:
                    records = future.result()
                except BrokenProcessPool as error:  # a process was killed, by want of memory as a rule, and took the others along
                    records = _lost(*jobs[futures[future]], error)
                yield futures[future], records
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    """One thread a process, which does not outlive the command: a killed parent leaves its pool's queue to its workers."""
    torch.set_num_threads(1)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _lost(case: BaseCase, target: Target, reduced: str, error: Exception) -> list[Record]:
    """The records of a case that was cut off."""
    identity = _identity(case, target)
    return [_finish({**identity, "schedule": str(schedule)}, reduced, [_brief(error)]) for schedule in target.schedules]


def call(case: BaseCase, tensors: Operands, workspace: Tensor | None = None) -> Result:
    """Makes the call that a case describes, through the public API, on the device of its tensors."""
    return operation(case).call(case, tensors, workspace)


def _identity(case: BaseCase, target: Target) -> dict[str, Any]:
    """The fields that say which case ran on what."""
    arch = ARCHS[target.arch]
    config = case.problem(arch).config.name
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count if target.kind == "cuda" else case.sm_count or arch.sm_count
    return {
        "op": case.op,
        "arch": target.arch,
        "case": case.id,
        "config": config,
        "device": target.kind,
        "seed": case.seed,
        "sm_count": sm_count,
        "kernel_sha256": load_artifacts().entry(case.op, target.arch, config).cubin_sha256,
    }


@contextmanager
def _device(case: BaseCase, target: Target, schedule: Schedule | None) -> Iterator[list[Any]]:
    """Makes the target current, and gives the list that findings go to."""
    if schedule is None:
        yield []
        torch.cuda.synchronize()
        return
    with simulate(target.arch, case.sm_count, schedule=schedule.name, seed=schedule.seed, on_finding="collect") as device:
        yield device.findings


def _run(case: BaseCase, target: Target, tensors: Operands, schedule: Schedule | None) -> _Outcome:
    for given in tensors.given.values():
        given.storage.fill_(float("nan"))
    start = time.perf_counter()
    with _device(case, target, schedule) as findings:
        guarded = _workspace(case, tensors) if tensors.given else None
        results = call(case, tensors, None if guarded is None else guarded[_GUARD : guarded.numel() - _GUARD])
    seconds = time.perf_counter() - start
    kept = tuple(result.clone() for result in results)  # later schedules write to the same outputs
    returned = dict(zip(operation(case).results, results, strict=True))
    return _Outcome(kept, tuple(map(str, findings)), "; ".join(_damage(tensors.given, returned, guarded)), seconds)


def _workspace(case: BaseCase, tensors: Operands) -> Tensor:
    """A workspace of exactly the bytes that the call needs, between guards."""
    size, device = operation(case).workspace_bytes(case, tensors), next(iter(tensors.given.values())).storage.device
    guarded = torch.full((size + 2 * _GUARD,), _GUARD_BYTE, dtype=torch.uint8, device=device)
    guarded[_GUARD : _GUARD + size] = _NAN_BYTE
    return guarded


def _damage(expected: Mapping[str, Given], returned: Mapping[str, Tensor], guarded: Tensor | None) -> Iterator[str]:
    """Says which memory outside the outputs and the workspace was written, and if outputs given were not those returned."""
    for name, given in expected.items():
        if returned[name] is not given.tensor:
            yield f"the {name} returned is not the {name} given"
        given.tensor.fill_(float("nan"))
        if not given.storage.isnan().all():
            yield f"memory between the rows of {name} was written"
    if guarded is not None and ((guarded[:_GUARD] != _GUARD_BYTE).any() or (guarded[-_GUARD:] != _GUARD_BYTE).any()):
        yield "memory next to the workspace was written"


def _compared(case: BaseCase, outcome: _Outcome, expected: _Expected) -> dict[str, Comparison]:
    """Each result beside the reference's."""
    pairs = zip(operation(case).results.items(), outcome.results, expected.results, strict=True)
    compared = {name: compare(name, actual, wanted, tolerance) for (name, tolerance), actual, wanted in pairs}
    return {name: within(name, comparison, expected.limits.get(name, math.inf)) for name, comparison in compared.items()}


def _judge(
    base: dict[str, Any],
    reduced: str,
    outcome: _Outcome,
    first: _Outcome | None,
    compared: Mapping[str, Comparison],
    out_cos_limit: float,
) -> Record:
    """The record of an outcome that was compared with the reference; here it meets the first schedule's bits."""
    faults = [*(comparison.reason for comparison in compared.values()), outcome.damage]
    if outcome.findings:
        faults.append(f"{len(outcome.findings)} findings, first {outcome.findings[0]}")
    if first is not None and not all(map(same_bits, outcome.results, first.results)):
        faults.append("other bits than under the first schedule")
    figures = {f"{name}_max_abs": comparison.max_abs for name, comparison in compared.items()}
    figures["out_cos_diff"] = compared["out"].cos_diff
    figures["out_cos_limit"] = out_cos_limit
    return _finish(base, reduced, faults, **figures, findings=list(outcome.findings), seconds=outcome.seconds)


def _finish(base: dict[str, Any], reduced: str, faults: list[str], **figures: Any) -> Record:
    faults = [fault for fault in faults if fault]
    status: Status = "reduced" if reduced else "failed" if faults else "passed"
    reason = "; ".join([*([reduced] if reduced else []), *faults])
    return Record(**base, status=status, reason=reason, passed=not faults, **figures)


def _brief(error: Exception) -> str:
    first_line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line}"

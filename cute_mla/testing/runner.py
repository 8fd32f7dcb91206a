"""Run cases through the public API, compare their results with the reference and record the outcome.

Outputs start as NaN and the kernel runs before the reference, so that no correct value can be left in memory for the kernel to find.
Afterwards the memory around strided outputs and around the workspace is checked for writes.
"""

from __future__ import annotations

import math
import os
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor

from ..manifest import kernel_name
from ..runtime.artifacts import load_artifacts
from ..runtime.current import simulate
from ..runtime.errors import ArtifactError
from ..spec.arch import ARCHS, Arch
from .cases.base import BaseCase
from .cases.tensors import Operands, OutputBuffer, is_untouched, make_untouched
from .collector import collect_seldom
from .compare import Comparison, ErrorLimit, Tolerance, compare, same_bits, with_error_limit
from .job_queue import JobQueue
from .operations import Result, operation
from .processes import GPU_START_SECONDS, Loss, Work, end_with_parent, prepared, run_jobs

Kind = Literal["sim", "cuda"]
Status = Literal["passed", "failed", "skipped", "reduced", "hung", "faulted", "died"]

SCHEDULES = ("round_robin", "lazy", "random", "adversarial")
USUAL_SCHEDULES = 2  # of which `cute-mla verify` runs a case under one or, in the quick suite, under all

_GUARD = 256  # bytes before and after the workspace that must not change
_GUARD_BYTE = 0xA5
_BESIDE_OUT = ("lse", "max_logits", "lse_indexer")  # results with figures of their own
_NAN_BYTE = 0xFF  # four of them are a NaN
# Undefined results may come of memory that nothing has written, or that two CTAs write, each as its own.
_FINDINGS_OF_UNDEFINED = frozenset({"poison", "race"})


@dataclass(frozen=True)
class Schedule:
    """An order in which the simulated device runs warps and completes asynchronous work, and the code that it runs: ptx or sass."""

    name: str
    seed: int
    code: str = "ptx"

    def __str__(self) -> str:
        order = f"{self.name}@{self.seed}" if self.seed else self.name
        return order if self.code == "ptx" else f"{order}:{self.code}"


def schedules(number: int, seed: int, codes: Sequence[str] = ("ptx",)) -> tuple[Schedule, ...]:
    """Return the first `number` schedules, each with every code: each name once, then each name with the next seed, and so on."""
    return tuple(Schedule(SCHEDULES[i % len(SCHEDULES)], seed + i // len(SCHEDULES), code) for i in range(number) for code in codes)


def schedules_in_turn(cases: Sequence[BaseCase], arch: Arch, seed: int, codes: Sequence[str] = ("ptx",)) -> list[tuple[Schedule, ...]]:
    """Return for each case one of the usual schedules, with every code.

    They alternate over the cases of a kernel, so that it meets both. Its first case has another one on the next architecture.
    """
    first = list(ARCHS).index(arch.name)
    turns: dict[str, Iterator[int]] = defaultdict(lambda: count(first))
    names = (SCHEDULES[next(turns[kernel_of(case, arch)]) % USUAL_SCHEDULES] for case in cases)
    return [tuple(Schedule(name, seed, code) for code in codes) for name in names]


def kernel_of(case: BaseCase, arch: Arch) -> str:
    """Return the name of the kernel that serves a case."""
    return kernel_name(case.kernel_op, arch.name, case.problem(arch).config.name)


@dataclass(frozen=True)
class Target:
    """The device of a case: the first GPU, or the simulated device of an architecture under each of these schedules."""

    arch: str
    kind: Kind
    schedules: tuple[Schedule, ...] = (Schedule("round_robin", 0),)


Job = tuple[BaseCase, Target, str]  # a case, its target, and what was reduced


@dataclass(frozen=True)
class Record:
    """One run of one case, as `verify --json` writes it. schedule is None on a GPU; passed is None if the case did not run.

    out_max_abs, out_cos_diff, out_cos_limit: errors of out and the bound of the second; of a backward call, those of the gradient nearest
    its bound.
    status "reduced": the case ran in the reduced form that `case` names; reason says what was cut, and what failed, if anything.
    "hung": no answer in time; "faulted": the GPU takes no more calls of its process; "died": its process ended; passed is False for each.
    code: "ptx" or "sass" on the simulated device. kernel_sha256: hash of the cubin, "" if it is not built. seconds: time of the API call
    with its kernels, on a GPU including the set-up of the first call. kernel: name of the kernel that the case is about.
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
    lse_indexer_max_abs: float | None = None
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0
    code: str | None = None
    kernel: str = ""


@dataclass(frozen=True)
class _Outcome:
    """Results of one run of a call.

    findings: those of the simulator, but for the kinds that the case expects. damage: describes out-of-bounds writes.
    missing: kinds of findings that the case expects and the simulator did not report.
    """

    results: Result
    findings: tuple[str, ...]
    damage: str
    missing: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class _Expected:
    """Results of the reference, and by name of a result the limit of its errors, if it has one."""

    results: Result
    limits: Mapping[str, ErrorLimit]


def _expected(case: BaseCase, tensors: Operands, arch: Arch) -> _Expected:
    op = operation(case)
    results = op.reference(case, tensors, arch)
    return _Expected(results, op.limits(case, tensors, results))


def skipped(case: BaseCase, target: Target, reason: str) -> Record:
    """Return the record of a case that does not run."""
    return Record(**_identity(case, target), schedule=None, status="skipped", reason=reason)


def run_case(case: BaseCase, target: Target, reduced: str = "") -> list[Record]:
    """Run a case, on the simulated device once under each schedule; all runs must give the same bits.

    reduced: what was cut from the case, if anything. An exception of a run becomes a failed record. Only ArtifactError is raised, since it
    says nothing about a kernel that ran.
    """
    device = "cuda" if target.kind == "cuda" else "cpu"
    tensors = operation(case).make_tensors(case, device)
    expected: _Expected | None = None
    first: _Outcome | None = None
    records = []
    for schedule in target.schedules if target.kind == "sim" else (None,):
        ran = {"schedule": None, "code": None} if schedule is None else {"schedule": str(schedule), "code": schedule.code}
        base = {**_identity(case, target), **ran}
        try:
            outcome = run_once(case, target, tensors, schedule)
        except ArtifactError:
            raise
        except Exception as error:
            records.append(_finish(base, reduced, [brief(error)], findings=[str(item) for item in getattr(error, "findings", ())]))
            continue
        if not case.results_defined:
            records.append(_finish(base, reduced, _faults(outcome), findings=list(outcome.findings), seconds=outcome.seconds))
            continue
        if expected is None:
            expected = _expected(case, tensors, ARCHS[target.arch])
        records.append(_judge(base, reduced, outcome, first, _compared(case, outcome, expected), operation(case).bounds(case)))
        first = first or outcome
    return records


def run_all(
    jobs: Sequence[Job], workers: int | None = None, on_start: Callable[[BaseCase], None] = lambda case: None, gpu: Work | None = None
) -> Generator[tuple[int, list[Record]], None, None]:
    """Run jobs (case, target, what was reduced) in worker processes and yield the index and the records of each job as it ends.

    workers: by default one per CPU for the simulated device, in the order of JobQueue, and GPU_WORKERS for a GPU, a case of each kernel
    first. on_start: takes each case before it starts. gpu: what processes do on a GPU, by default GPU_WORK. An exception in a process fails
    its case. An exception here, such as that of Ctrl-C, or closing the iterator ends the processes at once.
    """
    for kind, work in (("cuda", gpu or GPU_WORK), ("sim", SIMULATED_WORK)):
        order = [index for index, job in enumerate(jobs) if job[1].kind == kind]
        chosen = [jobs[index] for index in order]
        for position, answer in deal(chosen, work, on_start, workers):
            yield order[position], _lost(*chosen[position], answer) if isinstance(answer, Loss) else answer


def deal(jobs: Sequence[Job], work: Work, on_start: Callable[[BaseCase], None], workers: int | None = None) -> Iterator[tuple[int, Any]]:
    """Run jobs of one kind of device in worker processes, as run_all does; yield the index and the answer or Loss of each."""
    kernels = [kernel_of(case, ARCHS[target.arch]) for case, target, _ in jobs]
    on_gpu = bool(jobs) and jobs[0][1].kind == "cuda"
    take = _kernels_in_turn(kernels) if on_gpu else JobQueue([case.tiles for case, _, _ in jobs], kernels).take
    most = GPU_WORKERS if on_gpu else os.cpu_count() or 1
    return run_jobs(jobs, kernels, take, work, min(workers or most, len(jobs)), lambda job: on_start(job[0]))


def _kernels_in_turn(kernels: Sequence[str]) -> Callable[[int], int | None]:
    """Return what gives workers the first job of each kernel, then the second ones: a GPU may be there for minutes only."""
    turns: dict[str, Iterator[int]] = defaultdict(count)
    turn = [next(turns[kernel]) for kernel in kernels]
    order = iter(sorted(range(len(kernels)), key=turn.__getitem__))
    return lambda worker: next(order, None)


def start_worker() -> None:
    """Limit a worker to one thread, and end it with its parent. The garbage collector no longer looks at modules imported so far."""
    torch.set_num_threads(1)
    collect_seldom()
    end_with_parent()


def start_on_gpu() -> None:
    """Start a worker, and the GPU in it."""
    start_worker()
    touch_gpu()


def touch_gpu() -> None:
    """Raise the error that an earlier call has left on the GPU, if there is one, and give back its unused memory."""
    torch.cuda.empty_cache()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()


def _run_job(job: Job) -> tuple[list[Record], bool]:
    """Run a job in its process. Any exception, such as that of a kernel that is missing, fails the case."""
    try:
        return run_case(*job), True
    except Exception as error:
        if not isinstance(error, ArtifactError):
            traceback.print_exc()
        return _unrun(*job, brief(error)), True


def run_on_gpu(job: Job) -> tuple[list[Record], bool]:
    """Run a job on the GPU. After an error that stays, the case is faulted, and no other can run in this process."""
    records, _ = _run_job(job)
    try:
        touch_gpu()
    except Exception as error:
        text = brief(error)
        reasons = [record.reason if text in record.reason else "; ".join(filter(None, (record.reason, text))) for record in records]
        faulted = [replace(record, status="faulted", passed=False, reason=why) for record, why in zip(records, reasons, strict=True)]
        return faulted, False
    return records, True


GPU_WORK = Work(partial(prepared, start_on_gpu, run_on_gpu), step_seconds=20.0, start_seconds=GPU_START_SECONDS)
GPU_WORKERS = 4
SIMULATED_WORK = Work(partial(prepared, start_worker, _run_job))


def _lost(case: BaseCase, target: Target, reduced: str, loss: Loss) -> list[Record]:
    """Return the records of a case whose process hung or died, or that was left out."""
    if loss.status == "skipped":
        return [skipped(case, target, loss.reason)]
    return [replace(record, status=loss.status) for record in _unrun(case, target, reduced, loss.reason)]


def _unrun(case: BaseCase, target: Target, reduced: str, fault: str) -> list[Record]:
    """Return the failed records of a case that did not come to its end."""
    identity = _identity(case, target)
    orders = [str(schedule) for schedule in target.schedules] if target.kind == "sim" else [None]
    return [_finish({**identity, "schedule": order}, reduced, [fault]) for order in orders]


def call(case: BaseCase, tensors: Operands, workspace: Tensor | None = None) -> Result:
    """Call the public API as a case describes, on the device of its tensors."""
    return operation(case).call(case, tensors, workspace)


def _identity(case: BaseCase, target: Target) -> dict[str, Any]:
    """Return the fields of a record that identify the case and its device."""
    arch = ARCHS[target.arch]
    config = case.problem(arch).config.name
    try:
        kernel_sha256 = load_artifacts().entry(case.kernel_op, target.arch, config).cubin_sha256
    except ArtifactError:
        kernel_sha256 = ""
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count if target.kind == "cuda" else case.sm_count or arch.sm_count
    return {
        "op": case.op,
        "arch": target.arch,
        "case": case.id,
        "config": config,
        "device": target.kind,
        "seed": case.seed,
        "sm_count": sm_count,
        "kernel_sha256": kernel_sha256,
        "kernel": kernel_of(case, arch),
    }


@contextmanager
def _device(case: BaseCase, target: Target, schedule: Schedule | None) -> Iterator[list[Any]]:
    """Make the target the current device, and yield the list that receives findings."""
    if schedule is None:
        yield []
        torch.cuda.synchronize()
        return
    order, seed, code = schedule.name, schedule.seed, schedule.code
    ignored = () if case.results_defined else _FINDINGS_OF_UNDEFINED
    with simulate(target.arch, case.sm_count, schedule=order, seed=seed, on_finding="collect", code=code, ignored=ignored) as device:
        yield device.findings


def run_once(case: BaseCase, target: Target, tensors: Operands, schedule: Schedule | None) -> _Outcome:
    """Call the API on fresh outputs once, on a GPU without a schedule."""
    for buffer in tensors.output_buffers.values():
        make_untouched(buffer.storage)
    start = time.perf_counter()
    with _device(case, target, schedule) as findings:
        guarded = _workspace(case, tensors) if tensors.output_buffers else None
        results = call(case, tensors, None if guarded is None else guarded[_GUARD : guarded.numel() - _GUARD])
    seconds = time.perf_counter() - start
    copies = tuple(result.clone() for result in results)  # runs under later schedules write to the same outputs
    returned = dict(zip(operation(case).bounds(case), results, strict=True))
    by_kind = [(text.partition(":")[0], text) for text in map(str, findings)]
    return _Outcome(
        copies,
        findings=tuple(text for kind, text in by_kind if kind not in case.finding_kinds),
        damage="; ".join(_damage(tensors.output_buffers, returned, guarded)),
        missing=() if schedule is None else tuple(sorted(case.finding_kinds.difference(kind for kind, _ in by_kind))),
        seconds=seconds,
    )


def _workspace(case: BaseCase, tensors: Operands) -> Tensor:
    """Allocate a workspace of exactly the bytes that the call needs, between guard bytes."""
    size, device = operation(case).workspace_bytes(case, tensors), next(iter(tensors.output_buffers.values())).storage.device
    guarded = torch.full((size + 2 * _GUARD,), _GUARD_BYTE, dtype=torch.uint8, device=device)
    guarded[_GUARD : _GUARD + size] = _NAN_BYTE
    return guarded


def _damage(buffers: Mapping[str, OutputBuffer], returned: Mapping[str, Tensor], guarded: Tensor | None) -> Iterator[str]:
    """Describe each write outside the outputs and the workspace, and each returned tensor that is not the one passed."""
    for name, buffer in buffers.items():
        if returned[name] is not buffer.tensor:
            yield f"the {name} returned is not the {name} given"
        make_untouched(buffer.tensor)
        if not is_untouched(buffer.storage):
            yield f"memory between the rows of {name} was written"
    if guarded is not None and ((guarded[:_GUARD] != _GUARD_BYTE).any() or (guarded[-_GUARD:] != _GUARD_BYTE).any()):
        yield "memory next to the workspace was written"


def _compared(case: BaseCase, outcome: _Outcome, expected: _Expected) -> dict[str, Comparison]:
    """Compare each result with the reference."""
    pairs = zip(operation(case).bounds(case).items(), outcome.results, expected.results, strict=True)
    compared = {name: compare(name, actual, correct, tolerance) for (name, tolerance), actual, correct in pairs}
    return {name: with_error_limit(name, comparison, expected.limits.get(name)) for name, comparison in compared.items()}


def _judge(
    base: dict[str, Any],
    reduced: str,
    outcome: _Outcome,
    first: _Outcome | None,
    compared: Mapping[str, Comparison],
    bounds: Mapping[str, Tolerance],
) -> Record:
    """Return the record of a run from its comparisons with the reference and with the bits under the first schedule."""
    faults = [*(comparison.reason for comparison in compared.values()), *_faults(outcome)]
    if first is not None and not all(map(same_bits, outcome.results, first.results)):
        faults.append("other bits than under the first schedule")
    figures = {f"{name}_max_abs": comparison.max_abs for name, comparison in compared.items() if name in _BESIDE_OUT}
    others = [name for name in compared if name not in _BESIDE_OUT]
    out = max(others, key=lambda name: compared[name].cos_diff / (bounds[name].cos_tol or math.inf))
    figures["out_max_abs"], figures["out_cos_diff"] = compared[out].max_abs, compared[out].cos_diff
    figures["out_cos_limit"] = bounds[out].cos_tol
    return _finish(base, reduced, faults, **figures, findings=list(outcome.findings), seconds=outcome.seconds)


def _faults(outcome: _Outcome) -> list[str]:
    """Return what was wrong with a run apart from its results."""
    faults = [outcome.damage]
    if outcome.findings:
        faults.append(f"{len(outcome.findings)} findings, first {outcome.findings[0]}")
    return [*faults, *(f"no finding {kind}" for kind in outcome.missing)]


def _finish(base: dict[str, Any], reduced: str, faults: list[str], **figures: Any) -> Record:
    faults = [fault for fault in faults if fault]
    status: Status = "reduced" if reduced else "failed" if faults else "passed"
    reason = "; ".join([*([reduced] if reduced else []), *faults])
    return Record(**base, status=status, reason=reason, passed=not faults, **figures)


def brief(error: Exception) -> str:
    """Return the type of an error and the first line of its text."""
    first_line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line}"

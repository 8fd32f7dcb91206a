"""A bench without a GPU: the reference computes, planned times pass, and bugs can be planted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from cute_mla import reference
from cute_mla.manifest import KernelEntry, Role
from cute_mla.profiles.baselines.baseline import Baseline, Run
from cute_mla.profiles.measure.ceilings import Ceilings
from cute_mla.profiles.measure.run_rows import Ask
from cute_mla.profiles.measure.runner import Bench, Task, row_worker
from cute_mla.profiles.measure.timing import Call, Recording
from cute_mla.profiles.rows import Case, load
from cute_mla.profiles.shapes import DecodeShape, Shape
from cute_mla.profiles.workloads import workload
from cute_mla.profiles.workloads.workload import Results, Workload
from cute_mla.spec.dense_decode import LATENT
from cute_mla.testing.operations import OPERATIONS
from cute_mla.testing.processes import Work

CALL_US = {"cold": 100.0, "control": 101.0, "warm": 50.0, "plan": 5.0, "matmul": 1000.0, "copy": 500.0, "l2_read": 250.0}

ENTRY = KernelEntry(
    name="dense_decode_sm90_bf16",
    op="dense_decode",
    arch="sm90",
    config={"dtype": "bf16"},
    entry="dense_decode_sm90_bf16_0",
    cubin="a.cubin",
    cubin_sha256="0" * 64,
    ptx="a.ptx",
    ptx_sha256="0" * 64,
    params=(),
    block=(128, 4, 1),
    cluster=(2, 1, 1),
    smem_bytes=116_224,
    registers=128,
    stack_bytes=8,
    fingerprint="0" * 64,
    roles=(Role("load", 0, 4), Role("score", 4, 4)),
    instructions={"FMUL": 10, "HGMMA": 44, "BAR": 10},
)


class FakeStopwatch:
    """Runs what is recorded when it is replayed; the time of a launch is CALL_US of the recording's name."""

    def record(self, name: str, calls: Sequence[Call]) -> Recording:
        def replay() -> None:
            for call in calls:
                call()

        return Recording(name, len(calls), replay)

    def elapsed_us(self, recording: Recording) -> float:
        return CALL_US.get(recording.name, 2000.0) * recording.launches


@dataclass
class FakeKernel:
    """Stands in for the API: computes by the reference, then lets `spoil` do its worst. calls: how often it ran."""

    spoil: Callable[[int, torch.Tensor, torch.Tensor], None] = lambda call, out, lse: None
    calls: int = 0
    seen: list[dict[str, Any]] = field(default_factory=list)

    def flash_mla_with_kvcache(
        self, *, q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor, cache_seqlens: torch.Tensor, causal: bool,
        out: torch.Tensor, lse: torch.Tensor, workspace: torch.Tensor, descale_q: torch.Tensor | None, descale_k: torch.Tensor | None,
        **_: object,
    ) -> None:  # fmt: skip
        descales = descale_q, descale_k
        result, result_lse = reference.dense_decode(q, k_cache, block_table, cache_seqlens, causal=causal, descales=descales)
        out.copy_(result)
        lse.copy_(result_lse)
        self.calls += 1
        self.seen.append({"q": q.data_ptr(), "workspace": workspace.data_ptr(), "causal": causal})
        self.spoil(self.calls, out, lse)


@dataclass
class FakeBaseline:
    """A baseline that computes by the reference, and then what `spoil` makes of it."""

    name: str = "Theirs"
    ops: tuple[str, ...] = ("dense_decode",)
    spoil: Callable[[int, Results], Results] = lambda call, results: results
    absent: Exception | None = None
    refuses: str = ""
    calls: int = 0

    def version(self) -> str:
        if self.absent is not None:
            raise self.absent
        return "1.2.3"

    def unsupported_reason(self, case: Case) -> str:
        return self.refuses

    def runs(self, workload: Workload) -> list[Run]:
        def of(operands: Any) -> Run:
            def run() -> Results:
                self.calls += 1
                arguments = (operands.q, operands.k_cache, operands.block_table, operands.cache_seqlens)
                out, lse = reference.dense_decode(*arguments, causal=workload.call_case.causal)
                return self.spoil(self.calls, {"out": out.to(torch.bfloat16), "lse": lse})

            return run

        return [of(operands) for operands in workload.sets]


def install(monkeypatch: pytest.MonkeyPatch, kernel: FakeKernel) -> None:
    """Put the fake where the bench finds the API."""
    for op in tuple(OPERATIONS):
        without_plans(monkeypatch, op)
    with_function(monkeypatch, "dense_decode", kernel.flash_mla_with_kvcache)
    monkeypatch.setattr(workload, "rotation_sets", lambda set_bytes, l2_bytes: 3)


def without_plans(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """Make calls of an op that need no device: with plans of nothing, and a workspace of 64 bytes."""
    record = OPERATIONS[op]

    def arguments(case: Any, tensors: Any, space: torch.Tensor | None) -> dict[str, Any]:
        planned = replace(case, metadata="object") if hasattr(case, "metadata") else case
        return record.arguments(planned, tensors, space)

    plan = None if record.plan is None else lambda case, tensors: (torch.empty(0), torch.empty(0))
    changed = replace(record, arguments=arguments, plan=plan, workspace_bytes=lambda case, tensors: 64)
    monkeypatch.setitem(OPERATIONS, op, changed)


def with_function(monkeypatch: pytest.MonkeyPatch, op: str, function: Callable[..., Any]) -> None:
    """Put a function in the place of the public one of an op."""
    monkeypatch.setitem(OPERATIONS, op, replace(OPERATIONS[op], function=function))


def bench(state: Callable[[], dict[str, Any]] = lambda: {"sm_mhz": 1980.0}, baselines: tuple[Baseline, ...] = ()) -> Bench:
    """Return a bench on the CPU with the fake stopwatch."""
    return Bench(
        device=torch.device("cpu"),
        stopwatch=FakeStopwatch(),
        ceilings=Ceilings(lambda: None, 790e9, lambda: None, 2.15e9, lambda: None, 1.6e9),
        l2_bytes=50 << 20,
        state=state,
        kernel_times=lambda recording: {"dense_decode": 90.0},
        load_us=1.0,
        baselines=baselines,
        baseline_kernel_times=lambda recording: {"their_kernel": 80.0},
    )


class InProcess:
    """Stands in for a Worker: answers in this process."""

    def __init__(self, work: Work) -> None:
        self.answer = work.make(lambda step: None)

    def ask(self, task: Task, seconds: float) -> Any:
        return self.answer(task)[0]

    def kill(self) -> None:
        pass


def asking(of: Bench) -> Ask:
    """Return what answers tasks on this bench, in this process."""
    work = row_worker(lambda: of, lambda step: None)
    return lambda task, seconds: work(task)[0]


def small_case(
    name: str = "X.small",
    *,
    lengths: tuple[int, ...] = (70, 3, 0),
    s_q: int = 2,
    h_q: int = 4,
    priority: int = 1,
    operands: str = LATENT,
) -> Case:
    """Return a case that the reference computes at once."""
    row, case = name.split(".")
    shape = DecodeShape(lengths=lengths, s_q=s_q, h_q=h_q, operands=operands)
    return replace(load("dense_decode")[0], row=row, case=case, shape=shape, priority=priority, roof_us=1.0, goal_us=None)


def case_of(op: str, shape: Shape, name: str = "X.small") -> Case:
    """Return a case of an op with a shape of its own."""
    row, case = name.split(".")
    return replace(load(op)[0], row=row, case=case, shape=shape, roof_us=1.0, goal_us=None)

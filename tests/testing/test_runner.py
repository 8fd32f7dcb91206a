"""The runner finds a kernel right when it is right, and every planted fault makes it fail.

The kernel is a stand-in here: the reference, with a fault. What runs cases on the simulated device is tested in tests/cli.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_mla import reference
from cute_mla.runtime.errors import ArtifactError
from cute_mla.testing import runner
from cute_mla.testing.cases.base import BaseCase
from cute_mla.testing.operations import OPERATIONS
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase, make_dense_decode_tensors
from cute_mla.testing.processes import Loss
from cute_mla.testing.runner import Record, Schedule, Target, run_case, schedules

Fault = Callable[[Tensor, Tensor, Tensor], object]  # changes out, lse and workspace as a faulty kernel would

CASE = DenseDecodeCase(batch=2, lengths=(70, 0), h_q=4, outputs="strided")
SIM = Target("sm90", "sim")


class StandIn:
    """Takes the place of API and device: computes the reference, then applies a fault."""

    def __init__(self) -> None:
        self.fault: Fault = lambda out, lse, workspace: None
        self.findings: list[str] = []
        self.schedules: list[str] = []

    def decode(self, q: Tensor, k_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert kwargs["out"].isnan().all()
        assert kwargs["lse"].isnan().all()
        expected = reference.dense_decode(q, k_cache, block_table, cache_seqlens, causal=kwargs["causal"])
        kwargs["out"].copy_(expected[0])
        kwargs["lse"].copy_(expected[1])
        self.fault(kwargs["out"], kwargs["lse"], kwargs["workspace"])
        return kwargs["out"], kwargs["lse"]

    @contextmanager
    def simulate(
        self, arch: str, sm_count: int | None, *, schedule: str, seed: int, on_finding: str, code: str, ignored: Collection[str]
    ) -> Iterator[Any]:
        assert (on_finding, ignored) == ("collect", ())
        self.schedules.append(schedule)
        yield SimpleNamespace(findings=self.findings)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Return a stand-in kernel without faults, until one is planted."""
    stand_in = StandIn()
    artifacts = SimpleNamespace(entry=lambda *key: SimpleNamespace(cubin_sha256="0123"))
    stood_in = replace(OPERATIONS["dense_decode"], function=stand_in.decode, workspace_bytes=lambda case, tensors: 64)
    monkeypatch.setitem(OPERATIONS, "dense_decode", stood_in)
    monkeypatch.setattr(runner, "simulate", stand_in.simulate)
    monkeypatch.setattr(runner, "load_artifacts", lambda: artifacts)
    return stand_in


def run(case: BaseCase = CASE, target: Target = SIM, reduced: str = "") -> Record:
    (record,) = run_case(case, target, reduced)
    return record


def test_a_right_kernel_passes(kernel: StandIn) -> None:
    record = run()
    assert record.status == "passed", record.reason
    assert record.passed is True
    assert record.reason == ""
    assert record.out_max_abs is not None
    assert 0 < record.out_max_abs < 1e-3
    assert record.out_cos_diff is not None
    assert 0 < record.out_cos_diff < 2e-6
    assert record.out_cos_limit == 4e-6
    assert record.lse_max_abs == 0
    assert record.max_logits_max_abs is record.lse_indexer_max_abs is None
    assert record.seconds > 0


def test_a_record_says_what_ran(kernel: StandIn) -> None:
    record = run(replace(CASE, seed=3, sm_count=5))
    assert list(asdict(record)) == [
        *("op", "arch", "case", "config", "device", "schedule", "seed", "sm_count", "kernel_sha256", "status", "reason", "passed"),
        *("out_max_abs", "out_cos_diff", "out_cos_limit", "lse_max_abs", "max_logits_max_abs", "lse_indexer_max_abs"),
        *("findings", "seconds", "code", "kernel"),
    ]
    assert (record.op, record.arch, record.device, record.schedule, record.code) == ("dense_decode", "sm90", "sim", "round_robin", "ptx")
    assert record.case == replace(CASE, seed=3, sm_count=5).id
    assert (record.config, record.seed, record.sm_count, record.kernel_sha256) == ("bf16_cluster1", 3, 5, "0123")


@pytest.mark.parametrize(("arch", "config", "sm_count"), [("sm90", "bf16_cluster1", 132), ("sm100", "bf16_few_heads", 148)])
def test_a_record_says_which_variant_ran_on_which_board(kernel: StandIn, arch: str, config: str, sm_count: int) -> None:
    record = run(target=Target(arch, "sim"))
    assert (record.arch, record.config, record.sm_count) == (arch, config, sm_count)


def spoil_an_element(out: Tensor, lse: Tensor, workspace: Tensor) -> None:
    out[0, 0, 3, 511] += 0.1


def write_beside(tensor: Tensor, elements: int) -> None:
    tensor.as_strided((1,), (1,), tensor.storage_offset() + elements).fill_(0)


def raise_an_error(out: Tensor, lse: Tensor, workspace: Tensor) -> None:
    raise RuntimeError("warp 3 went home\nand more")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (spoil_an_element, "out: 1 of 4096 elements out of bounds, worst at [0, 0, 3, 511]"),
        (lambda out, lse, workspace: out[0, 0, 3, 511].fill_(float("nan")), "out: 1 misplaced NaN"),
        (lambda out, lse, workspace: lse[0, 1, 0].mul_(1.4427), "lse: 1 of 8 elements out of bounds"),
        (
            lambda out, lse, workspace: lse[1].fill_(float("-inf")),
            "lse: 4 misplaced NaN or infinity, first at [1, 0, 0]: -inf, expected inf",
        ),
        (lambda out, lse, workspace: write_beside(out, -1), "memory between the rows of out was written"),
        (lambda out, lse, workspace: write_beside(lse, -1), "memory between the rows of lse was written"),
        (lambda out, lse, workspace: write_beside(workspace, 64), "memory next to the workspace was written"),
        (lambda out, lse, workspace: write_beside(workspace, -1), "memory next to the workspace was written"),
        (raise_an_error, "RuntimeError: warp 3 went home"),
    ],
)
def test_a_planted_fault_fails(kernel: StandIn, fault: Fault, reason: str) -> None:
    kernel.fault = fault
    record = run()
    assert record.status == "failed"
    assert record.passed is False
    assert record.reason.startswith(reason)


def test_a_finding_fails_a_right_answer(kernel: StandIn) -> None:
    kernel.findings = ["read of poisoned byte", "another"]
    record = run()
    assert record.status == "failed"
    assert record.findings == ["read of poisoned byte", "another"]
    assert record.reason == "2 findings, first read of poisoned byte"


@pytest.mark.parametrize(
    ("findings", "reason"),
    [
        (["block_table: block_table[0, 1] is -1"], ""),
        (["block_table: one", "block_table: two"], ""),
        ([], "no finding block_table"),
        (["block_table: one", "race: two", "race: three"], "2 findings, first race: two"),
        (["race: of block_table: one"], "1 findings, first race: of block_table: one; no finding block_table"),
    ],
)
def test_a_case_with_wrong_operands_has_their_finding_and_no_other(kernel: StandIn, findings: list[str], reason: str) -> None:
    kernel.findings = findings
    record = run(replace(CASE, broken=True))
    assert (record.reason, record.passed) == (reason, not reason)
    assert record.findings == [finding for finding in findings if finding.startswith("race")]


def test_other_bits_under_another_schedule_fail(kernel: StandIn) -> None:
    def differ(out: Tensor, lse: Tensor, workspace: Tensor) -> None:
        if kernel.schedules[-1] == "lazy":
            out[0, 0, 0, 0] = torch.nextafter(out[0, 0, 0, 0], torch.tensor(1.0, dtype=out.dtype))

    kernel.fault = differ
    records = run_case(CASE, Target("sm90", "sim", schedules(3, 0)))
    assert [record.schedule for record in records] == ["round_robin", "lazy", "random"]
    assert [record.status for record in records] == ["passed", "failed", "passed"]
    assert records[1].reason == "other bits than under the first schedule"


def test_an_output_that_is_not_the_one_given_fails(kernel: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        out, lse = kernel.decode(*args, **kwargs)
        return out.clone(), lse

    monkeypatch.setitem(OPERATIONS, "dense_decode", replace(OPERATIONS["dense_decode"], function=decode))
    assert run().reason == "the out returned is not the out given"


def test_a_gpu_runs_a_case_once_and_is_waited_for(kernel: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str | torch.device] = []

    def decode(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        calls.append("call")
        return kernel.decode(*args, **kwargs)

    monkeypatch.setitem(OPERATIONS, "dense_decode", replace(OPERATIONS["dense_decode"], function=decode))

    def made_on_cpu(case: Any, device: str | torch.device) -> Any:
        calls.append(device)
        return make_dense_decode_tensors(case, "cpu")

    on_cpu = replace(OPERATIONS["dense_decode"], make_tensors=made_on_cpu)
    monkeypatch.setitem(OPERATIONS, "dense_decode", on_cpu)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: SimpleNamespace(multi_processor_count=114))
    record = run(target=Target("sm90", "cuda", schedules(3, 0)))
    assert calls == ["cuda", "call", "synchronize"]
    assert (record.device, record.schedule, record.sm_count, record.passed) == ("cuda", None, 114, True)


@pytest.fixture
def gpu(kernel: StandIn, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the errors that the stand-in of a GPU raises, one for each call from now on."""
    errors: list[str] = []

    def synchronize() -> None:
        if errors:
            raise RuntimeError(errors[0])

    def decode(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        results = kernel.decode(*args, **kwargs)
        synchronize()
        return results

    on_cpu = replace(OPERATIONS["dense_decode"], make_tensors=lambda case, device: make_dense_decode_tensors(case, "cpu"), function=decode)
    monkeypatch.setitem(OPERATIONS, "dense_decode", on_cpu)
    zeros = torch.zeros
    monkeypatch.setattr("torch.zeros", lambda *shape, **options: zeros(*shape, **{**options, "device": "cpu"}))
    monkeypatch.setattr("torch.cuda.synchronize", synchronize)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: SimpleNamespace(multi_processor_count=114))
    return errors


CUDA = Target("sm90", "cuda")
ILLEGAL = "CUDA error: an illegal memory access was encountered"


def test_an_error_that_stays_on_the_gpu_is_a_fault(gpu: list[str], kernel: StandIn) -> None:
    (record,), fit = runner.run_on_gpu((CASE, CUDA, ""))
    assert (record.status, record.passed, fit) == ("passed", True, True)
    kernel.fault = raise_an_error
    (record,), fit = runner.run_on_gpu((CASE, CUDA, ""))
    assert (record.status, record.passed, fit) == ("failed", False, True)
    kernel.fault = lambda out, lse, workspace: gpu.append(ILLEGAL)
    (record,), fit = runner.run_on_gpu((CASE, CUDA, ""))
    assert (record.status, record.passed, fit) == ("faulted", False, False)
    assert (record.kernel, record.case, record.reason) == ("dense_decode_sm90_bf16_cluster1", CASE.id, f"RuntimeError: {ILLEGAL}")


def test_an_error_after_the_case_is_a_fault(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: gpu.append(ILLEGAL))
    (record,), fit = runner.run_on_gpu((CASE, CUDA, "cut"))
    assert (record.status, record.passed, record.reason, fit) == ("faulted", False, f"cut; RuntimeError: {ILLEGAL}", False)


@pytest.mark.parametrize("target", [CUDA, replace(SIM, schedules=schedules(2, 0))])
def test_a_case_without_an_answer_has_records(gpu: list[str], monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    losses = [Loss("hung", "no answer within 20 s"), Loss("died", "exit code 7"), Loss("skipped", "3 of it hung"), []]
    monkeypatch.setattr(runner, "run_jobs", lambda jobs, *_: zip(range(len(jobs)), losses, strict=False))
    results = dict(runner.run_all([(replace(CASE, seed=seed), target, "cut") for seed in range(len(losses))]))
    orders = [None] if target.kind == "cuda" else ["round_robin", "lazy"]
    for index, (status, reason) in enumerate((("hung", "cut; no answer within 20 s"), ("died", "cut; exit code 7"))):
        assert [(record.status, record.passed, record.reason, record.schedule) for record in results[index]] == [
            (status, False, reason, order) for order in orders
        ]
    assert [(record.status, record.passed, record.reason) for record in results[2]] == [("skipped", None, "3 of it hung")]
    assert results[3] == []


def test_a_gpu_gets_a_case_of_each_kernel_first(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run_jobs(jobs: Sequence[Any], groups: Sequence[str], take: Callable[[int], int | None], *_: Any) -> Iterator[tuple[int, Any]]:
        while (index := take(0)) is not None:
            yield index, []

    monkeypatch.setattr(runner, "run_jobs", run_jobs)
    cases = [replace(CASE, dtype=dtype, seed=seed) for dtype in ("bf16", "fp16") for seed in range(2)]
    assert [index for index, _ in runner.run_all([(case, CUDA, "") for case in cases])] == [0, 2, 1, 3]


def test_a_reduced_case_keeps_its_status_and_its_verdict(kernel: StandIn) -> None:
    record = run(reduced="batch 64 cut to 2: budget")
    assert (record.status, record.passed, record.reason) == ("reduced", True, "batch 64 cut to 2: budget")
    kernel.fault = spoil_an_element
    record = run(reduced="batch 64 cut to 2: budget")
    assert (record.status, record.passed) == ("reduced", False)
    assert record.reason.startswith("batch 64 cut to 2: budget; out: 1 of 4096")


def test_a_skipped_case_neither_passes_nor_fails(kernel: StandIn) -> None:
    record = runner.skipped(CASE, SIM, "large")
    assert (record.status, record.passed, record.reason, record.out_max_abs) == ("skipped", None, "large", None)


def test_missing_kernels_are_not_a_failed_case(kernel: StandIn) -> None:
    def missing(out: Tensor, lse: Tensor, workspace: Tensor) -> None:
        raise ArtifactError("no manifest")

    kernel.fault = missing
    with pytest.raises(ArtifactError):
        run()


def test_schedules_repeat_with_other_seeds() -> None:
    assert [str(schedule) for schedule in schedules(6, 0)] == [
        *("round_robin", "lazy", "random", "adversarial"),
        *("round_robin@1", "lazy@1"),
    ]
    assert schedules(1, 9) == (Schedule("round_robin", 9),)


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    """A pool's workers would otherwise go on with the queue of a command that is gone."""
    program = tmp_path / "parent.py"
    program.write_text(
        "import os, signal\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from multiprocessing import get_context\n"
        "from cute_mla.testing.runner import start_worker\n"
        "if __name__ == '__main__':\n"
        "    pool = ProcessPoolExecutor(1, mp_context=get_context('spawn'), initializer=start_worker)\n"
        "    print(pool.submit(os.getpid).result(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=120, check=False)
    worker = int(parent.stdout)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and _is_running(worker):
        time.sleep(0.05)
    assert not _is_running(worker)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"

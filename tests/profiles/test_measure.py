"""Measuring a row: what is refused as wrong, what is recorded, and how a budget ends a run."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from cute_mla.profiles.measure.ceilings import Ceilings
from cute_mla.profiles.measure.run_rows import run_rows
from cute_mla.profiles.measure.runner import FAILED, NOT_RUN, TIMED, WRONG, figures, measure_case
from cute_mla.profiles.roofline import Work
from cute_mla.profiles.workloads import make_workload
from cute_mla.profiles.workloads.workload import sample_requests
from tests.profiles.benching import FakeKernel, asking, bench, install, small_case


def test_a_right_kernel_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel()
    install(monkeypatch, kernel)
    record = measure_case(small_case(), bench())
    assert (record["status"], record["reason"]) == (TIMED, "")
    assert record["cold_us"]["median"] == pytest.approx(100.0)
    assert record["warm_us"]["median"] == pytest.approx(50.0)
    assert record["plan_us"]["median"] == pytest.approx(5.0)
    assert record["control_ratio"]["median"] == pytest.approx(1.01)
    assert (record["sets"], record["launches"], record["rounds"]) == (3, 3, 12)  # 2000 us estimated: three launches make 5 ms
    assert record["clocks"] == {"sm_mhz": 1980.0}
    assert record["check"]["samples"] == (0, 1, 2)
    assert record["check"]["out_max_abs"] > 0
    assert len({call["q"] for call in kernel.seen}) == 3  # every set took part
    assert len({call["workspace"] for call in kernel.seen}) == 1
    assert all(call["causal"] for call in kernel.seen)  # two query tokens


def test_one_query_token_is_not_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel()
    install(monkeypatch, kernel)
    assert measure_case(small_case(s_q=1), bench())["status"] == TIMED
    assert not any(call["causal"] for call in kernel.seen)


def off_by_a_little(call: int, out: torch.Tensor, lse: torch.Tensor) -> None:
    out[1] *= 1.02


def wrong_lse(call: int, out: torch.Tensor, lse: torch.Tensor) -> None:
    lse[0] += 0.001


def unwritten(call: int, out: torch.Tensor, lse: torch.Tensor) -> None:
    out[0, 1, 3, 511] = math.nan


@pytest.mark.parametrize(("spoil", "reason"), [(off_by_a_little, r"out\[1\]"), (wrong_lse, r"lse\[0\]"), (unwritten, "NaN")])
def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch, spoil: object, reason: str) -> None:
    kernel = FakeKernel(spoil=spoil)  # type: ignore[arg-type]
    install(monkeypatch, kernel)
    record = measure_case(small_case(), bench())
    assert record["status"] == WRONG
    assert "cold_us" not in record
    assert kernel.calls == 1
    assert re.search(reason, record["reason"])


def test_a_kernel_that_turns_wrong_in_the_timed_graph_loses_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(call: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        if call > 1:
            out[2, 0, 0, 0] = 0.5

    install(monkeypatch, FakeKernel(spoil=spoil))
    record = measure_case(small_case(), bench())
    assert record["status"] == WRONG
    assert record["reason"].startswith("in the timed graph: out[2]")
    assert "cold_us" not in record


def test_a_set_that_the_graph_does_not_write_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first and last set are compared; the others are still looked at for poison."""
    kernel = FakeKernel()
    install(monkeypatch, kernel)
    workload = make_workload(small_case(), torch.device("cpu"), 1)
    workload.poison()
    for operands in (workload.sets[0], workload.sets[2]):
        workload.call(operands)
    outcome = workload.check_sets(workload.sets, [workload.sets[0], workload.sets[-1]])
    assert outcome.reason == "a result has NaN, or was not written everywhere"


def test_results_left_over_from_before_do_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the last replay on this kernel does nothing: what earlier calls wrote would still be right."""

    class Lazy(FakeKernel):
        def flash_mla_with_kvcache(self, *args: Any, **kwargs: Any) -> None:
            if self.calls < 4:
                super().flash_mla_with_kvcache(*args, **kwargs)

    install(monkeypatch, Lazy())
    record = measure_case(small_case(), bench())
    assert (record["status"], record["reason"][:22]) == (WRONG, "in the timed graph: a ")


def test_operands_are_nasty_shuffled_and_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeKernel())
    workload = make_workload(small_case(lengths=(300, 64, 0)), torch.device("cpu"), 1)
    one, same, other = (workload.draw(seed) for seed in (1, 1, 2))
    assert torch.equal(one.k_cache, same.k_cache)
    assert not torch.equal(one.k_cache, other.k_cache)
    assert sorted(one.block_table[one.block_table < 1000].tolist()) == list(range(6))  # each page once
    assert one.block_table[0].tolist() != list(range(5))
    assert one.block_table[1, 1:].tolist() == [2147480000] * 4
    assert one.output_buffers["out"].tensor.isnan().all()
    assert one.k_cache.abs().max() <= 1
    assert one.k_cache.float().std() == pytest.approx(0.1, rel=0.02)


@pytest.mark.parametrize(
    ("lengths", "requests"), [((5,), (0,)), ((5, 9, 1, 7, 7, 7), (0, 1, 2, 3, 5)), ((), ()), ((4,) * 100, (0, 50, 99))]
)
def test_sampled_requests_hold_the_extremes(lengths: tuple[int, ...], requests: tuple[int, ...]) -> None:
    assert sample_requests(lengths) == requests


def test_figures_relate_a_time_to_the_ceilings_of_its_own_run() -> None:
    nothing = lambda: None  # noqa: E731
    ceilings = Ceilings(nothing, 800e6, nothing, 4e6, nothing, 6e6)  # 800 TFLOP/s, 4000 and 6000 GB/s at 1 us
    samples = {"cold": [200.0], "control": [210.0], "matmul": [1.0], "copy": [1.0], "l2_read": [1.0]}
    memory_bound = figures(Work(flops=8e9, bytes=400e6), samples, ceilings)
    assert memory_bound["limit_us"] == pytest.approx(100.0)
    assert memory_bound["fraction_of_limit"] == pytest.approx(0.5)
    assert memory_bound["gbytes_per_s"] == pytest.approx(2000.0)
    assert memory_bound["control_ratio"]["median"] == pytest.approx(1.05)
    assert memory_bound["l2_read_gbytes_per_s"] == pytest.approx(6000.0)
    assert memory_bound["warm_us"] is None
    assert memory_bound["plan_us"] is None
    compute_bound = figures(Work(flops=80e9, bytes=40e6), samples, ceilings)
    assert compute_bound["limit_us"] == pytest.approx(100.0)
    assert compute_bound["tflops"] == pytest.approx(400.0)


class Clock:
    """Advances by `step` seconds each time it is read."""

    def __init__(self, step: float) -> None:
        self.time, self.step = 0.0, step

    def __call__(self) -> float:
        self.time += self.step
        return self.time


def test_a_budget_ends_a_run_by_priority_and_names_what_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeKernel())
    cases = [small_case("A.x", priority=3), small_case("B.x", priority=1), small_case("C.x", priority=2)]
    records = run_rows(cases, asking(bench()), budget_s=7.0, progress=lambda name, records: None, clock=Clock(1.0))
    assert [(record["name"], record["status"]) for record in records] == [("B.x", TIMED), ("C.x", TIMED), ("A.x", NOT_RUN)]
    assert records[2]["reason"] == "the budget of 7 s was used up"
    assert "unavailable" in records[0]["kernel_us"]


def test_without_a_tight_budget_every_row_gets_its_kernel_times(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeKernel())
    steps: list[tuple[str, int]] = []
    progress = lambda name, records: steps.append((name, len(records)))  # noqa: E731
    records = run_rows([small_case("A.x"), small_case("B.x")], asking(bench()), 1000.0, progress, Clock(1.0))
    assert steps == [("A.x", 0), ("B.x", 1), ("A.x kernels", 2), ("B.x kernels", 2)]
    assert all(record["kernel_us"] == {"dense_decode": 90.0} for record in records)


@pytest.mark.parametrize("error", [RuntimeError("an illegal memory access was encountered"), AssertionError("never")])
def test_a_failing_row_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def spoil(call: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        if out.shape[0] == 1:
            raise error

    install(monkeypatch, FakeKernel(spoil=spoil))
    records = run_rows([small_case("A.x", lengths=(5,)), small_case("B.x")], asking(bench()), 1000.0, lambda name, records: None)
    assert [(record["name"], record["status"]) for record in records] == [("A.x", FAILED), ("B.x", TIMED)]
    assert records[0]["reason"] == f"{type(error).__name__}: {error}"

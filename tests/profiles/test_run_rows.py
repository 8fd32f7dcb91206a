"""A run of rows: a row that hangs, faults or dies is a record, and a peer that does so costs its own figure."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from cute_mla.profiles.measure.run_rows import run_rows
from cute_mla.profiles.measure.runner import PEER, TIMED, Bench, Task, row_worker
from cute_mla.testing.processes import START, Loss, Status, Work, Worker
from tests.profiles.benching import FakeBaseline, FakeKernel, bench, install, small_case


def timed(task: Task) -> dict[str, Any]:
    """Return the answer of a child whose baselines are Theirs and Others."""
    if task.timed is not None:
        return {**task.timed, "kernel_us": {"dense_decode": 90.0}}
    peers = {name: {"status": TIMED, "reason": ""} for name in ("Theirs", "Others") if name not in task.left_out}
    return {"name": task.case.name, "status": TIMED, "peers": peers}


def rows(names: str, script: Sequence[Loss | None], budget_s: float = 1000.0) -> tuple[list[dict[str, Any]], list[Task]]:
    """Run rows of these names; the script says what each request loses, and then nothing."""
    left, tasks = list(script), []

    def ask(task: Task, seconds: float) -> Any:
        tasks.append(task)
        return (left.pop(0) if left else None) or timed(task)

    return run_rows([small_case(f"{name}.x") for name in names], ask, budget_s, lambda name, records: None), tasks


def states(records: Sequence[dict[str, Any]]) -> list[str]:
    return [record["status"] for record in records]


@pytest.mark.parametrize("status", ["hung", "faulted", "died"])
def test_a_lost_row_costs_itself(status: Status) -> None:
    lost = Loss(status, "why", "cold")
    for script, expected in (
        ([lost], [status, TIMED, TIMED]),
        ([None, None, lost], [TIMED, TIMED, status]),
        ([lost, lost], [status, status, TIMED]),
    ):
        records, _ = rows("ABC", script)
        assert states(records) == expected
        assert {record["reason"] for record in records if record["status"] == status} == {"in step cold: why"}
        assert all(record["seconds"] >= 0 for record in records)


@pytest.mark.parametrize("status", ["hung", "faulted", "died"])
def test_a_lost_peer_costs_its_own_figure(status: Status) -> None:
    records, tasks = rows("AB", [Loss(status, "why", PEER + "Theirs")])
    assert states(records) == [TIMED, TIMED]
    assert records[0]["peers"] == {
        "Others": {"status": TIMED, "reason": ""},
        "Theirs": {"status": status, "reason": "in step peer Theirs: why"},
    }
    assert records[1]["peers"]["Theirs"]["status"] == TIMED
    assert [task.left_out for task in tasks[:3]] == [frozenset(), {"Theirs"}, frozenset()]


def test_two_peers_may_be_lost_in_a_row_and_ours_too() -> None:
    records, _ = rows("A", [Loss("hung", "a", PEER + "Theirs"), Loss("died", "b", PEER + "Others")])
    assert {name: peer["status"] for name, peer in records[0]["peers"].items()} == {"Theirs": "hung", "Others": "died"}
    records, _ = rows("A", [Loss("hung", "a", PEER + "Theirs"), Loss("died", "b", "cold")])
    assert states(records) == ["died"]


def test_what_was_lost_too_often_is_left_out() -> None:
    records, tasks = rows("ABCDE", [Loss("hung", "a", "cold")] * 3)
    assert states(records) == ["hung"] * 3 + ["not_run"] * 2
    assert records[-1]["reason"] == "3 rows of dense_decode were lost"
    assert len(tasks) == 3
    peer = Loss("hung", "a", PEER + "Theirs")
    records, _ = rows("ABC", [peer, None, peer, None])
    assert [record["peers"]["Theirs"]["status"] for record in records] == ["hung", "hung", "not_run"]


def test_two_starts_that_fail_end_the_run() -> None:
    records, tasks = rows("AB", [Loss("faulted", "no GPU", START)])
    assert states(records) == [TIMED, TIMED]
    records, tasks = rows("AB", [Loss("faulted", "no GPU", START)] * 2)
    assert (states(records), len(tasks)) == (["not_run"] * 2, 2)
    assert records[1]["reason"] == "2 processes did not start: no GPU"


def test_the_end_of_the_budget_is_no_fault() -> None:
    records, _ = rows("AB", [None, Loss("skipped", "its time was over", "cold")])
    assert [(record["status"], record["reason"]) for record in records[1:]] == [("not_run", "in step cold: its time was over")]


def test_lost_kernel_times_leave_the_row_its_time() -> None:
    for lost, ours, theirs in (
        (Loss("hung", "why", "kernels"), {"unavailable": "in step kernels: why"}, None),
        (Loss("died", "why", PEER + "Theirs"), {"dense_decode": 90.0}, {"unavailable": "in step peer Theirs: why"}),
    ):
        (record,), _ = rows("A", [None, lost])
        assert (record["status"], record["kernel_us"], record["peers"]["Theirs"].get("kernel_us")) == (TIMED, ours, theirs)
        assert record["peers"]["Theirs"]["status"] == TIMED


@pytest.mark.parametrize(("culprit", "blamed"), [("Theirs", "peer Theirs"), ("Others", "peer Others"), ("ours", "set-up")])
def test_a_sticky_fault_is_raised_in_the_step_that_caused_it(monkeypatch: pytest.MonkeyPatch, culprit: str, blamed: str) -> None:
    """An asynchronous fault shows in the next call that waits, which may belong to somebody else."""
    broken: list[str] = []

    def fault(name: str) -> Callable[..., Any]:
        return lambda call, *results: broken.append(name) if name == culprit else results[0]

    def probe() -> None:
        if broken:
            raise RuntimeError("CUDA error: an illegal memory access")

    install(monkeypatch, FakeKernel(spoil=fault("ours")))
    peers = tuple(FakeBaseline(name=name, spoil=fault(name)) for name in ("Theirs", "Others"))
    steps: list[str] = []
    work = row_worker(lambda: replace(bench(baselines=peers), probe=probe), steps.append)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        work(Task(small_case()))
    assert steps[-1] == blamed
    with pytest.raises(RuntimeError, match="illegal memory access"):
        work(Task(small_case()))  # the process is of no more use


def test_every_step_has_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeKernel())
    steps: list[str] = []
    work = row_worker(lambda: bench(baselines=(FakeBaseline(),)), steps.append)
    record, _ = work(Task(small_case()))
    assert steps[0] == "set-up"
    assert steps[-2:] == ["clocks", "check"]
    found = Counter(steps)
    assert found["peer Theirs"] == 1 + 2 + 1 + 12  # its admission, estimate, recording and rounds
    assert (found["cold"], found["matmul"]) == (1 + 1 + 12, 1 + 12)
    assert work(Task(small_case(), frozenset({"Theirs"})))[0]["peers"] == {}
    steps.clear()
    assert work(Task(small_case(), timed=record))[0]["kernel_us"] == {"dense_decode": 90.0}
    assert steps == ["set-up", "kernels", "peer Theirs", "peer Theirs"]


class Dying(FakeBaseline):
    """A baseline that ends its process when it is imported."""

    def version(self) -> str:
        os._exit(11)


def bench_in_child() -> Bench:
    """Make the fake bench in a child."""
    install(pytest.MonkeyPatch(), FakeKernel())
    return bench(baselines=(Dying(),))


def test_rows_are_measured_in_a_child() -> None:
    worker = Worker(Work(partial(row_worker, bench_in_child), step_seconds=20.0))
    try:
        record = worker.ask(Task(small_case(), frozenset({"Theirs"})), 60.0)
        assert (record["status"], record["peers"]) == (TIMED, {})
        assert worker.ask(Task(small_case()), 60.0) == Loss("died", "the process ended with exit code 11", "peer Theirs")
    finally:
        worker.kill()

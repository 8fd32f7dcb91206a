"""Worker processes survive jobs that hang, end their process, fault or answer late: the others are answered, by fresh processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cute_mla.testing.processes import MOST_LOSSES, START, Loss, Work, Worker, run_jobs
from tests.support import unruly
from tests.support.tree import ROOT

SECONDS = 1.0  # of a job
WORK = Work(unruly.make, step_seconds=SECONDS, start_seconds=60)
LOSSES = {
    "hang": Loss("hung", "no answer within 1 s"),
    "late": Loss("hung", "no answer within 1 s"),
    "exit": Loss("died", "the process ended with exit code 7"),
    "kill": Loss("died", "signal 9 (Killed) ended the process"),
    "raise": Loss("faulted", "RuntimeError: a mistake of the harness"),
}


def outcomes(
    jobs: Sequence[str],
    work: Work = WORK,
    number: int = 1,
    groups: Sequence[str] = (),
    on_start: Callable[[Any], None] = lambda job: None,
) -> list[Any]:
    """Return what became of each job; answers without the process's id."""
    order = iter(range(len(jobs)))
    found = dict(run_jobs(jobs, groups or jobs, lambda worker: next(order, None), work, number, on_start))
    return [found[index].split()[0] if isinstance(found[index], str) else found[index] for index in range(len(jobs))]


@pytest.mark.parametrize("place", [0, pytest.param(1, marks=pytest.mark.slow), 2], ids=["first", "twice in the middle", "last"])
@pytest.mark.parametrize("job", [*LOSSES, "fault"])
def test_a_lost_job_costs_only_itself(job: str, place: int) -> None:
    jobs = [[job, "right", "wrong"], ["right", job, job, "wrong"], ["right", "wrong", job]][place]
    expected = {**LOSSES, "fault": "faulted"}
    begin = time.monotonic()
    assert outcomes(jobs) == [expected.get(name, name) for name in jobs]
    assert time.monotonic() - begin < 10


def test_a_process_answers_many_jobs_and_a_faulted_one_no_more() -> None:
    order = iter(range(4))
    found = dict(run_jobs(["a", "fault", "b", "c"], "abcd", lambda worker: next(order, None), WORK, 1, lambda job: None))
    first, faulted, third, fourth = (found[index].split()[1] for index in range(4))
    assert first == faulted != third == fourth


def test_the_time_limit_holds_while_others_go_on() -> None:
    order = iter(range(4))
    ended = {}
    for index, answer in run_jobs(["a", "b", "hang", "c"], "abcd", lambda worker: next(order, None), WORK, 2, lambda job: None):
        ended[index] = time.monotonic(), answer
    (_, hung), (other, _) = ended[2], ended[3]
    assert hung == LOSSES["hang"]
    assert other < ended[2][0]
    assert SECONDS <= ended[2][0] - min(ended[0][0], ended[1][0]) < SECONDS + 2


def test_the_start_of_a_process_does_not_count() -> None:
    assert outcomes(["right", "exit", "wrong"], replace(WORK, make=unruly.start_slowly)) == ["right", LOSSES["exit"], "wrong"]


def test_after_three_losses_the_others_of_the_group_are_left_out() -> None:
    started: list[str] = []
    jobs, groups = ["kill", "right", "fault", "exit", "right", "right"], ["a", "a", "a", "a", "b", "a"]
    left_out = Loss("skipped", "3 cases of a hung, faulted or died")
    assert MOST_LOSSES == 3
    assert outcomes(jobs, groups=groups, on_start=started.append) == [LOSSES["kill"], "right", "faulted", LOSSES["exit"], "right", left_out]
    assert started == jobs[:5]


@pytest.mark.parametrize(
    ("make", "first"),
    [
        (unruly.hang_at_the_start, Loss("hung", "no answer within 0.5 s", START)),
        (unruly.die_at_the_start, Loss("died", "the process ended with exit code 5", START)),
        (unruly.raise_at_the_start, Loss("faulted", "RuntimeError: no GPU", START)),
    ],
)
def test_without_any_process_the_jobs_are_left_out(make: Callable[[Any], Any], first: Loss) -> None:
    work = replace(WORK, make=make, start_seconds=0.5 if first.status == "hung" else 60)
    assert Worker(work).ask("a", 60) == first
    first = replace(first, reason=f"no process started in 3 trials: {first.reason}")
    assert outcomes(["a", "b", "c"], work) == [first, *[Loss("skipped", "no process for it starts")] * 2]


def test_a_process_that_does_not_start_is_started_again(tmp_path: Path) -> None:
    assert outcomes(["right"], replace(WORK, make=partial(unruly.start_at_the_second_trial, tmp_path / "mark"))) == ["right"]


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(WORK)
    yield made
    made.kill()


@pytest.mark.parametrize("job", LOSSES)
def test_a_job_that_is_waited_for_costs_only_itself(worker: Worker, job: str) -> None:
    answers = [worker.ask(name, 30) for name in (job, "right", job, job, "right", "right")]
    assert [answer if isinstance(answer, Loss) else "right" for answer in answers] == [
        LOSSES[job], "right", LOSSES[job], LOSSES[job], "right", "right",
    ]  # fmt: skip
    assert answers[-1] == answers[-2] != answers[1]  # one process answers many


def test_a_limit_is_one_of_a_step_and_one_of_the_job(worker: Worker) -> None:
    assert worker.ask("steps", 30).startswith("steps ")  # 1.5 s
    assert worker.ask("exit in a step", 30) == replace(LOSSES["exit"], step="two")
    assert worker.ask("right", 30).startswith("right ")
    begin = time.monotonic()
    assert worker.ask("steps", 0.5) == Loss("skipped", "its time was over", "step1")
    assert worker.ask("right", 0) == Loss("skipped", "its time was over", START)
    assert time.monotonic() - begin < 2.5


def test_a_process_that_ends_between_jobs_costs_none(worker: Worker) -> None:
    process = int(worker.ask("right", 30).split()[1])
    os.kill(process, signal.SIGKILL)
    time.sleep(0.3)
    assert worker.ask("right", 30).startswith("right ")


PARENT = """
import signal

from cute_mla.testing.processes import Work, Worker
from tests.support import unruly

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has jobs in the background ignore it
    worker = Worker(Work(unruly.make))
    print(worker.ask("right", 30), flush=True)
    try:
        worker.ask("hang", 30)
    finally:
        worker.kill()
"""


@pytest.mark.parametrize("whole_group", [True, False], ids=["Ctrl-C", "only the parent is killed"])
def test_a_process_that_hangs_ends_with_its_parent(tmp_path: Path, whole_group: bool) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    command = [sys.executable, str(tmp_path / "parent.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment, process_group=0
    ) as parent:
        assert parent.stdout is not None
        process = Path("/proc") / parent.stdout.readline().split()[1]
        time.sleep(0.2)
        begin = time.monotonic()
        if whole_group:
            os.killpg(parent.pid, signal.SIGINT)
        else:
            parent.kill()
        parent.wait(5)
        while process.exists() and time.monotonic() - begin < 5:
            time.sleep(0.02)
        assert time.monotonic() - begin < 2

"""Worker processes survive jobs that hang, end their process, fault or answer late: the others are answered, by fresh processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cute_mla.testing.processes import MOST_LOSSES, Loss, Work, end_with_parent, run_jobs
from tests.support import unruly

SECONDS = 1.0  # of a job
WORK = Work(end_with_parent, unruly.answer, job_seconds=SECONDS, start_seconds=60)
LOSSES = {
    "hang": Loss("hung", "no answer within 1 s"),
    "late": Loss("hung", "no answer within 1 s"),
    "exit": Loss("died", "the process ended with exit code 7"),
    "kill": Loss("died", "signal 9 (Killed) ended the process"),
    "raise": Loss("died", "the process ended with exit code 1"),
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


@pytest.mark.parametrize("place", [0, 1, 2], ids=["first", "twice in the middle", "last"])
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
    assert outcomes(["right", "exit", "wrong"], replace(WORK, prepare=unruly.start_slowly)) == ["right", LOSSES["exit"], "wrong"]


def test_after_three_losses_the_others_of_the_group_are_left_out() -> None:
    started: list[str] = []
    jobs, groups = ["kill", "right", "fault", "exit", "right", "right"], ["a", "a", "a", "a", "b", "a"]
    left_out = Loss("skipped", "3 cases of a hung, faulted or died")
    assert MOST_LOSSES == 3
    assert outcomes(jobs, groups=groups, on_start=started.append) == [LOSSES["kill"], "right", "faulted", LOSSES["exit"], "right", left_out]
    assert started == jobs[:5]


@pytest.mark.parametrize(
    ("prepare", "first"),
    [
        (unruly.hang_at_the_start, Loss("hung", "no process started in 3 trials: no answer within 0.5 s")),
        (unruly.die_at_the_start, Loss("died", "no process started in 3 trials: the process ended with exit code 5")),
    ],
)
def test_without_any_process_the_jobs_are_left_out(prepare: Callable[[], None], first: Loss) -> None:
    work = replace(WORK, prepare=prepare, start_seconds=0.5 if first.status == "hung" else 60)
    assert outcomes(["a", "b", "c"], work) == [first, *[Loss("skipped", "no process for it starts")] * 2]


def test_a_process_that_does_not_start_is_started_again(tmp_path: Path) -> None:
    assert outcomes(["right"], replace(WORK, prepare=partial(unruly.start_at_the_second_trial, tmp_path / "mark"))) == ["right"]

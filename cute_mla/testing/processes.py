"""Worker processes that run one job at a time within a time limit: a job that hangs, faults or ends its process costs only itself.

run_jobs spreads jobs over processes. They belong to groups: after MOST_LOSSES lost jobs of a group, its others are left out.
Worker.ask runs one job and waits for it.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from threading import Thread, current_thread, main_thread
from typing import Any, Literal, TypeAlias

GPU_START_SECONDS = 60.0  # limit of the start of a process that uses a GPU
MOST_LOSSES = 3  # of a group of jobs, and of starts of a worker in a row

START = "start"  # the step before a process begins its job

Status: TypeAlias = Literal["hung", "faulted", "died", "failed", "skipped"]
Step: TypeAlias = Callable[[str], None]  # tells the parent what the process is about to do

_SPAWN = get_context("spawn")
_LONGEST_WAIT = 60.0  # seconds: select takes no infinite time


@dataclass(frozen=True)
class Work:
    """Functions of the worker processes, which pickle must find in a module.

    make: called once in each process; what it returns takes each job, and returns the answer and whether the process can take another job.
    An exception of either ends the process, and the job is faulted. step_seconds: limit of each step of a job, which has one unless it
    calls Step. start_seconds: limit of the start with `make`.
    """

    make: Callable[[Step], Callable[[Any], tuple[Any, bool]]]
    step_seconds: float = inf
    start_seconds: float = inf


def prepared(prepare: Callable[[], None], answer: Callable[[Any], tuple[Any, bool]], step: Step) -> Callable[[Any], tuple[Any, bool]]:
    """Make the workers of jobs that have one step, and need nothing but a preparation of the process."""
    prepare()
    return answer


@dataclass(frozen=True)
class Loss:
    """End of a job without an answer. step: the last one begun, "" for a job without steps, START if the process did not begin it.

    status: hung, a step ran past its limit; skipped, the job was left out or the time of the whole job was over.
    """

    status: Status
    reason: str
    step: str = ""


def run_jobs(
    jobs: Sequence[Any], groups: Sequence[str], take: Callable[[int], int | None], work: Work, number: int, on_start: Callable[[Any], None]
) -> Iterator[tuple[int, Any]]:
    """Run jobs in `number` processes; yield the index of each job and its answer, or its Loss, as it ends.

    take: returns the index of the next job of a worker, None when none is left. on_start: takes each job before it starts.
    A process that does not start is started again for the same job. An exception or closing the iterator ends the processes at once.
    """
    workers = [Worker(work, position) for position in range(number)]
    free, busy = list(workers), list[Worker]()
    losses: Counter[str] = Counter()
    try:
        while free or busy:
            while free and (index := take(free[0].number)) is not None:
                if losses[groups[index]] >= MOST_LOSSES:
                    yield index, Loss("skipped", f"{MOST_LOSSES} cases of {groups[index]} hung, faulted or died")
                    continue
                on_start(jobs[index])
                busy.append(free.pop(0))
                busy[-1].give(jobs[index], index)
            free.clear()  # nothing is left to take
            if busy:
                wait([worker.connection for worker in busy], min(max(min(worker.seconds_left for worker in busy), 0), _LONGEST_WAIT))
            for worker in list(busy):
                answer = worker.outcome()
                if answer is None:
                    continue
                if not worker.begun and worker.failed_starts < MOST_LOSSES:
                    worker.give(jobs[worker.index], worker.index)
                    continue
                busy.remove(worker)
                if worker.begun:
                    free.append(worker)
                else:
                    answer = replace(answer, reason=f"no process started in {worker.failed_starts} trials: {answer.reason}")
                losses[groups[worker.index]] += worker.process is None
                yield worker.index, answer
        while (index := take(0)) is not None:
            yield index, Loss("skipped", "no process for it starts")
    finally:
        processes = [worker.process for worker in workers if worker.process is not None]
        for worker in workers:
            worker.kill()
        for process in processes:
            process.join(1)


class Worker:
    """A process, started with its first job and again with the first job after its end."""

    def __init__(self, work: Work, number: int = 0) -> None:
        self.work, self.number = work, number
        self.process: SpawnProcess | None = None
        self.connection: Connection[Any, Any]
        self.index, self.deadline, self.failed_starts = -1, inf, 0
        self.step = START

    @property
    def begun(self) -> bool:
        """Return whether the process has taken the job."""
        return self.step != START

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the job is lost in its present step."""
        return self.deadline - time.monotonic()

    def ask(self, job: Any, seconds: float) -> Any:
        """Return the answer of a job, or its Loss. seconds: limit of the whole job, with the start of a process."""
        end = time.monotonic() + seconds
        self.give(job)
        while (answer := self.outcome()) is None:
            left = end - time.monotonic()
            if left <= 0:
                return self._lose("skipped", "its time was over")
            wait([self.connection], min(max(min(self.seconds_left, left), 0), _LONGEST_WAIT))
        return answer

    def give(self, job: Any, index: int = 0) -> None:
        """Send a job to the process, which says when it begins."""
        if self.process is not None and not self.process.is_alive():
            self.kill()
        if self.process is None:
            self.connection, theirs = _SPAWN.Pipe()
            process = _SPAWN.Process(target=_serve, args=(theirs, self.work), daemon=True)
            with _interrupts_held():
                process.start()
                self.process = process
            theirs.close()
        self.index, self.step, self.deadline = index, START, time.monotonic() + self.work.start_seconds
        with suppress(OSError):  # of a process that has died since: `outcome` finds out
            self.connection.send(job)

    def outcome(self) -> Any:
        """Return the answer or the Loss of the job, None as long as it runs."""
        try:
            while self.connection.poll():
                kind, *content = self.connection.recv()
                if kind == "faulted":
                    return self._lose(kind, *content)
                if kind == "answer":
                    answer, fit = content
                    if not fit:
                        self.kill()
                    return answer
                (self.step,) = content
                self.deadline, self.failed_starts = time.monotonic() + self.work.step_seconds, 0
        except (EOFError, OSError):
            assert self.process is not None
            self.process.join(1)
            return self._lose("died", _ending(self.process.exitcode))
        if self.seconds_left > 0:
            return None
        return self._lose("hung", f"no answer within {self.work.step_seconds if self.begun else self.work.start_seconds:g} s")

    def _lose(self, status: Status, reason: str) -> Loss:
        self.kill()
        self.failed_starts += not self.begun
        return Loss(status, reason, self.step)

    def kill(self) -> None:
        """End the process, without waiting for its end: the driver may take seconds to end a kernel."""
        if self.process is not None:
            self.process.kill()
            self.connection.close()
            self.process = None


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {-code} ({signal.strsignal(-code)}) ended the process"
    return f"the process ended with exit code {code}"


def _serve(connection: Connection[Any, Any], work: Work) -> None:
    """Answer jobs until an exception. The process then ends without any clean-up, which may hang on a broken device."""
    end_with_parent()
    try:
        answer = work.make(lambda step: connection.send(("step", step)))
        while True:
            job = connection.recv()
            connection.send(("step", ""))
            connection.send(("answer", *answer(job)))
    except BaseException as error:
        traceback.print_exc()
        connection.send(("faulted", f"{type(error).__name__}: {error}".splitlines()[0]))
    finally:
        os._exit(1)


@cache
def end_with_parent() -> None:
    """End this process with its parent: workers of a killed parent would go on."""
    Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back until the end. Processes started inside never get it, though a terminal sends it to all: this process ends them.

    They inherit a mask that blocks the signal. This process would lose a signal that it ignored in the meantime.
    """
    if current_thread() is not main_thread():
        yield
        return
    resource_tracker.ensure_running()  # its start would unblock the signal
    held: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: held.append(number))  # in case that another thread takes it
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
    if held:
        signal.raise_signal(signal.SIGINT)

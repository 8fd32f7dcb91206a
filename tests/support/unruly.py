"""Worker processes whose jobs hang, end their process, fault, or answer late. The module loads no torch, to start fast."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

from cute_mla.testing.processes import Step

Answer: TypeAlias = Callable[[str], tuple[str, bool]]

_faults: list[str] = []  # of this process


def make(step: Step) -> Answer:
    """Return the function that takes jobs."""
    return partial(answer, step)


def answer(step: Step, job: str) -> tuple[str, bool]:
    """Do what the job says and return it with the process's id. After a fault, every later call of the process raises."""
    if _faults:
        raise RuntimeError(_faults[0])
    if job == "hang":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        time.sleep(600)
    if job == "late":
        time.sleep(2)
    if job == "exit":
        os._exit(7)
    if job == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if job == "raise":
        raise RuntimeError("a mistake of the harness\nand more")
    if job == "fault":
        _faults.append("an illegal memory access was encountered")
        return f"faulted {os.getpid()}", False
    if job == "steps":
        for number in range(5):
            step(f"step{number}")
            time.sleep(0.3)
    if job == "exit in a step":
        step("one")
        step("two")
        os._exit(7)
    return f"{job} {os.getpid()}", True


def start_slowly(step: Step) -> Answer:
    """Start for longer than a job may take."""
    time.sleep(1.5)
    return make(step)


def hang_at_the_start(step: Step) -> Answer:
    """Never be ready."""
    time.sleep(600)
    return make(step)


def die_at_the_start(step: Step) -> Answer:
    """End before the first job."""
    os._exit(5)


def raise_at_the_start(step: Step) -> Answer:
    """Fail before the first job."""
    raise RuntimeError("no GPU")


def start_at_the_second_trial(mark: Path, step: Step) -> Answer:
    """End at the start, but for the process that finds the mark of an earlier one."""
    if not mark.exists():
        mark.touch()
        os._exit(5)
    return make(step)

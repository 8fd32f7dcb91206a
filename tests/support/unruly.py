"""Functions for worker processes whose jobs hang, end their process, fault, or answer late. The module loads no torch, to start fast."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from cute_mla.testing.processes import end_with_parent

_faults: list[str] = []  # of this process


def answer(job: str) -> tuple[str, bool]:
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
        raise RuntimeError("a mistake of the harness")
    if job == "fault":
        _faults.append("an illegal memory access was encountered")
        return f"faulted {os.getpid()}", False
    return f"{job} {os.getpid()}", True


def start_slowly() -> None:
    """Start for longer than a job may take."""
    end_with_parent()
    time.sleep(1.5)


def hang_at_the_start() -> None:
    """Never be ready."""
    end_with_parent()
    time.sleep(600)


def die_at_the_start() -> None:
    """End before the first job."""
    os._exit(5)


def start_at_the_second_trial(mark: Path) -> None:
    """End at the start, but for the process that finds the mark of an earlier one."""
    end_with_parent()
    if not mark.exists():
        mark.touch()
        os._exit(5)

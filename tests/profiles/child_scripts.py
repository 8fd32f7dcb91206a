"""Children that answer, hang, die and fault as their requests say. Nothing heavy is imported, so that they start fast."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from cute_mla.profiles.measure.children import Step


def scripted(step: Step) -> Callable[[str], object]:
    """Return what does as it is told. After `sticky` every later call raises, as after an illegal access."""
    broken: list[str] = []

    def probe() -> None:
        if broken:
            raise RuntimeError("CUDA error: an illegal memory access\nsecond line")

    def work(request: str) -> object:
        step("first")
        step("second")
        kind, _, value = request.partition(" ")
        if kind == "hang":
            time.sleep(60)
        elif kind == "late":
            time.sleep(float(value))
        elif kind == "steps":
            for _ in range(6):
                time.sleep(0.3)
                step("another")
        elif kind == "exit":
            os._exit(7)
        elif kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "sticky":
            broken.append(request)
        probe()
        return {"answer": value, "pid": os.getpid()}

    return work


def unable(step: Step) -> Callable[[str], object]:
    """Fail to start."""
    raise RuntimeError("no GPU")


def dying(step: Step) -> Callable[[str], object]:
    """Die in the start."""
    os._exit(3)

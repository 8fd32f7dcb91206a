"""Child processes that answer one request at a time: a hang, a fault of the device or a death costs one request, and no more."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

from ...testing.processes import end_with_parent

Step: TypeAlias = Callable[[str], None]  # tells the parent what the child is about to do
Make: TypeAlias = Callable[[Step], Callable[[Any], Any]]  # called in the child; returns what answers its requests

HUNG, FAULTED, DIED, CUT = "hung", "faulted", "died", "cut"
START = "start"  # the step before the first request
_MOST_START_S = 60.0
_MOST_KILL_S = 2.0


@dataclass(frozen=True)
class Lost:
    """A request without an answer. step: the last that the child began.

    status: hung, a step ran past its limit; faulted, an exception left the child's code; died; cut, the time for the request was over.
    """

    status: str
    step: str
    reason: str


class Child:
    """A spawned process that answers requests. After a lost request the next one starts a fresh process.

    make: picklable; called once in each process. A process that stops before its first request has lost it in the step START.
    """

    def __init__(self, make: Make) -> None:
        self._make = make
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ask(self, request: Any, step_s: float, seconds: float) -> Any:
        """Return the answer, or Lost. step_s: limit of each step in seconds; seconds: limit of the whole request, with the start."""
        end = time.monotonic() + seconds
        if self._process is None or not self._process.is_alive():
            self.close()
            self._start()
            begun = self._answer(START, _MOST_START_S, end)
            if isinstance(begun, Lost):
                return begun
        assert self._pipe is not None
        try:
            self._pipe.send(request)
        except OSError:
            return self._died("request")
        return self._answer("request", step_s, end)

    def close(self) -> None:
        """Kill the process at once, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.join(_MOST_KILL_S)
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def _start(self) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._make), daemon=True)
        process.start()
        self._process = process
        theirs.close()

    def _answer(self, step: str, step_s: float, end: float) -> Any:
        assert self._pipe is not None
        assert self._process is not None
        while True:
            left = end - time.monotonic()
            if not wait([self._pipe, self._process.sentinel], max(min(step_s, left), 0.0)):
                self.close()
                return Lost(CUT, step, "its time was over") if left < step_s else Lost(HUNG, step, f"no end within {step_s:g} s")
            if not self._pipe.poll():
                return self._died(step)
            try:
                kind, content = self._pipe.recv()
            except (EOFError, OSError):
                return self._died(step)
            if kind == "step":
                step = content
            elif kind == FAULTED:
                self.close()
                return Lost(FAULTED, step, content)
            else:
                return content

    def _died(self, step: str) -> Lost:
        assert self._process is not None
        self._process.join(_MOST_KILL_S)
        code = self._process.exitcode
        self.close()
        return Lost(DIED, step, f"ended by signal {-code}" if code is not None and code < 0 else f"ended with status {code}")


def _serve(pipe: Connection, make: Make) -> None:
    """Answer requests until an exception. The process then ends without any clean-up, which may hang on a broken device."""
    end_with_parent()
    try:
        work = make(lambda step: pipe.send(("step", step)))
        answer = None
        while True:
            pipe.send(("answer", answer))
            answer = work(pipe.recv())
    except BaseException as error:
        pipe.send((FAULTED, f"{type(error).__name__}: {error}".splitlines()[0]))
    finally:
        os._exit(1)

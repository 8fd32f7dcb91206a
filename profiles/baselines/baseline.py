"""Protocol of a library that is timed beside ours on the same operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from ..rows import Case
from ..workloads.workload import Results, Workload

Run: TypeAlias = Callable[[], Results]  # computes one operand set; returns results by name, in the shapes of our own


class Baseline(Protocol):
    """A library that may run beside ours."""

    @property
    def name(self) -> str:
        """Name of the library in tables."""
        ...

    @property
    def ops(self) -> tuple[str, ...]:
        """Ops whose benchmark rows the library can run."""
        ...

    def version(self) -> str:
        """Return the installed version. ImportError if the library is not installed."""
        ...

    def unsupported_reason(self, case: Case) -> str:
        """Return why the library does not support a case, or "" if it does."""
        ...

    def runs(self, workload: Workload) -> list[Run]:
        """Return a run for each operand set. Layouts are converted and plans made here or in the first run, outside the timing."""
        ...

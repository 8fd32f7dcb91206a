"""What another library needs to be to run beside ours on the same operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from ..rows import Case
from ..subjects.subject import Results, Subject

Run: TypeAlias = Callable[[], Results]  # computes one operand set: results by name, in the shapes of ours


class Peer(Protocol):
    """A library, by the name that tables have. ops: of its benchmark rows."""

    @property
    def name(self) -> str: ...

    @property
    def ops(self) -> tuple[str, ...]: ...

    def version(self) -> str:
        """The version that is installed. ImportError if none is."""
        ...

    def refusal(self, case: Case) -> str:
        """Why it does not do what the case asks for, or "" if it does."""
        ...

    def runs(self, subject: Subject[Any]) -> list[Run]:
        """A run for each operand set. Layouts are changed here, and plans made here or by a first run: neither is timed."""
        ...

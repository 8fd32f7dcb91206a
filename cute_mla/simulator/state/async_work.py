"""Asynchronous copies that have been issued and have not yet taken effect.

A PendingCopy completes by itself at some time; a copy that signals an mbarrier is one. A GroupedCopy has two steps, reading its source and
writing its destination; the wait of its thread or warp forces one or both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .barriers import Mbarrier
from .memory import SharedMemory
from .origin import Origin


@dataclass
class PendingCopy:
    """Work that completes by itself at some time.

    barriers: the mbarriers it signals. writes: byte ranges [start, stop) of shared memory. what: its name in messages.
    local: it signals only the issuing CTA, so it may complete when that CTA has exited.
    """

    effect: Callable[[], None]
    origin: Origin
    barriers: list[Mbarrier]
    writes: Sequence[tuple[SharedMemory, int, int]] = ()
    done: bool = False
    what: str = "an asynchronous copy"
    local: bool = False

    def complete(self) -> None:
        """Take effect, once."""
        if not self.done:
            self.done = True
            self.effect()


def _nothing() -> None:
    """Take no step."""


@dataclass
class GroupedCopy:
    """A copy that a thread waits for by group. read takes its source, write stores it; each runs once, in this order.

    source: shared bytes [start, stop) that it reads. stage: 0 issued, 1 source read, 2 stored. waited: a thread has waited for the read,
    whenever that happened. serial: number of a cp.async among those of its warp (clocks.py).
    """

    read: Callable[[], None]
    write: Callable[[], None]
    origin: Origin
    source: tuple[int, int] = (0, 0)
    stage: int = 0
    waited: bool = False
    serial: int = 0

    def advance(self, stage: int) -> None:
        """Go through the steps up to stage (1: source read, 2: stored)."""
        if self.stage < 1 <= stage:
            self.stage = 1
            self.read()
        if self.stage < 2 <= stage:
            self.stage = 2
            self.write()
            self.read = self.write = _nothing  # the addresses and data of the copy are let go


@dataclass
class CopyGroups:
    """Bulk groups of one thread, or cp.async groups of one warp. late: cp.async copies that an arrival may have to complete, in order."""

    open: list[GroupedCopy] = field(default_factory=list)
    committed: list[list[GroupedCopy]] = field(default_factory=list)
    late: list[GroupedCopy] = field(default_factory=list)

    def unstored(self) -> list[GroupedCopy]:
        """Return the cp.async copies that have not been stored; forget the others."""
        self.late = [copy for copy in self.late if copy.stage < 2]
        return list(self.late)

    def commit(self) -> None:
        """Close the open group, empty or not."""
        self.committed.append(self.open)
        self.open = []

    def wait(self, remaining: int, stage: int) -> list[GroupedCopy]:
        """Complete all but the newest `remaining` groups up to a stage. Return the copies that were waited for the first time."""
        stop = len(self.committed) - remaining
        done = []
        for group in self.committed[: max(stop, 0)]:
            for copy in group:
                if not copy.waited:
                    done.append(copy)
                copy.waited = True
                copy.advance(stage)
        if stage == 2 and stop > 0:
            del self.committed[:stop]
            self.unstored()
        return done

    def unfinished(self) -> list[GroupedCopy]:
        """Return the copies whose source may still be read, as far as the thread knows."""
        return [copy for group in (*self.committed, self.open) for copy in group if not copy.waited]

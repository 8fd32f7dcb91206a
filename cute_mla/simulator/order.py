"""Who knows that what is done: vector clocks of the warps of a cluster.

Each warp knows, of every other warp, of every tensor core and of the copies of every CTA, how far that one is. Arriving at a barrier hands
this knowledge over to those that wait for the phase. An access is ordered after another one if its warp knows that the other is done.

Where the hardware could order less, knowledge is given generously, so that nothing is reported that a kernel did order: lanes of a warp
share it, every barrier (relaxed ones too) and every fence and atomic operation hands over all of it, and copies give it at issue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from .barriers import Mbarrier
    from .cta import Cta


Clock = np.ndarray  # (3 * warps of the cluster + 2 * CTAs,) int64


@dataclass
class Knowledge:
    """What a barrier hands over. gathered: from the arrivals of the phase that runs; known: of complete phases."""

    gathered: Clock | None = None
    known: Clock | None = None

    def add(self, clock: Clock) -> None:
        """An arrival."""
        self.gathered = clock.copy() if self.gathered is None else np.maximum(self.gathered, clock, out=self.gathered)

    def complete(self) -> None:
        """The phase is complete."""
        if self.gathered is not None:
            self.known = self.gathered if self.known is None else np.maximum(self.known, self.gathered)
            self.gathered = None


class Carrier(Protocol):
    """A barrier, or whatever else hands over knowledge."""

    knowledge: Knowledge


class Clocks:
    """now: row = what a warp of the cluster knows; columns: warps, tensor cores and copies by CTA rank, and warps twice again.

    The second time, these are the times up to which the warps' ordinary stores can be read by asynchronous work (fence.proxy.async), the
    third time those up to which they have handed tensor memory over (tcgen05.fence::before_thread_sync). after: the third columns, and
    those of the tensor cores, when the warp executed tcgen05.fence::after_thread_sync. tensor_fences: whether the kernel has such fences.
    """

    def __init__(self, ctas: int, warps: int, fenced: bool) -> None:
        self.warps = warps
        self.rows = ctas * warps
        self.ctas = ctas
        self.width = self.rows + 2 * ctas
        self.handed = self.width + self.rows
        self.now = np.zeros((self.rows, self.handed + self.rows), np.int64)
        self.after = np.zeros((self.rows, self.rows + ctas), np.int64)
        self.tensor_fences = fenced
        self.copies = [0] * ctas
        self.memory = Knowledge()

    def row(self, cta: Cta, warp: int) -> int:
        """The row (and column) of a warp."""
        return cta.rank * self.warps + warp

    def core(self, cta: Cta) -> int:
        """The column of a CTA's tensor core."""
        return self.rows + cta.rank

    def copier(self, cta: Cta) -> int:
        """The column of the copies that a CTA issues."""
        return self.rows + self.ctas + cta.rank

    def name(self, column: int) -> str:
        """An actor in words."""
        if column < self.rows:
            rank, warp = divmod(column, self.warps)
            return f"warp {warp} of CTA {rank} of the cluster" if self.ctas > 1 else f"warp {warp}"
        return "an asynchronous copy" if column >= self.rows + self.ctas else "a tensor core"

    def fenced(self, known: Clock) -> Clock:
        """What a clock says of the times that asynchronous work can read up to, by column."""
        return np.concatenate([known[self.width : self.handed], known[self.rows : self.width]])

    def fence(self, cta: Cta, warps: Sequence[int]) -> None:
        """fence.proxy.async: all stores that a warp knows of can be read by asynchronous work now."""
        for warp in warps:
            self.tick(cta, warp)
            row = self.now[cta.rank * self.warps + warp]
            np.maximum(row[self.width : self.handed], row[: self.rows], out=row[self.width : self.handed])

    def before_sync(self, cta: Cta, warps: Sequence[int]) -> None:
        """tcgen05.fence::before_thread_sync: what the warps have done in tensor memory goes with their next arrival."""
        for warp in warps:
            time = self.tick(cta, warp)
            row = self.row(cta, warp)
            self.now[row, self.handed + row] = time

    def after_sync(self, cta: Cta, warps: Sequence[int]) -> None:
        """tcgen05.fence::after_thread_sync: what the warps know now, their next accesses to tensor memory come after."""
        for warp in warps:
            row = self.row(cta, warp)
            self.after[row, : self.rows] = self.now[row, self.handed :]
            self.after[row, self.rows :] = self.now[row, self.rows : self.rows + self.ctas]

    def of(self, cta: Cta, warps: Sequence[int]) -> Clock:
        """What some warps know together."""
        first = cta.rank * self.warps
        if len(warps) == 1:
            return np.asarray(self.now[first + warps[0]])
        return np.asarray(self.now[[first + warp for warp in warps]].max(axis=0))

    def least(self, cta: Cta, warps: Sequence[int], column: int) -> int:
        """How far the least informed of some warps knows an actor to be."""
        first = cta.rank * self.warps
        return min(int(self.now[first + warp, column]) for warp in warps)

    def tick(self, cta: Cta, warp: int) -> int:
        """A warp has finished something: its new time."""
        row = self.row(cta, warp)
        self.now[row, row] += 1
        return int(self.now[row, row])

    def learn(self, cta: Cta, warps: Sequence[int], clock: Clock | None) -> None:
        """Warps get knowledge."""
        if clock is not None:
            first = cta.rank * self.warps
            for warp in warps:
                np.maximum(self.now[first + warp], clock, out=self.now[first + warp])


def arrive(cta: Cta, warps: Sequence[int], barrier: Carrier) -> None:
    """Warps arrive at a barrier (before it counts that)."""
    clocks = cta.cluster.clocks
    for warp in warps:
        clocks.tick(cta, warp)
    barrier.knowledge.add(clocks.of(cta, warps))


def wait(cta: Cta, warps: Sequence[int], barrier: Carrier) -> None:
    """Warps have waited for a complete phase."""
    cta.cluster.clocks.learn(cta, warps, barrier.knowledge.known)


def through_memory(cta: Cta, warps: Sequence[int]) -> None:
    """Warps execute something that may hand over, or receive, through memory: a fence, an atomic operation, a strong load or store."""
    clocks = cta.cluster.clocks
    for warp in warps:
        clocks.tick(cta, warp)
    clocks.memory.add(clocks.of(cta, warps))
    clocks.learn(cta, warps, clocks.memory.gathered)


def fence(cta: Cta, warps: Sequence[int]) -> None:
    """Warps execute fence.proxy.async."""
    cta.cluster.clocks.fence(cta, warps)


def copy(cta: Cta, warp: int, barriers: Sequence[Mbarrier], writes: Sequence[tuple[Cta, int, int]], line: int) -> None:
    """A warp issues a copy that will arrive on barriers."""
    clocks = cta.cluster.clocks
    clocks.tick(cta, warp)
    clocks.copies[cta.rank] += 1
    column, serial = clocks.copier(cta), clocks.copies[cta.rank]
    clock = clocks.of(cta, (warp,)).copy()
    clock[column] = serial
    for barrier in barriers:
        barrier.knowledge.add(clock)
    for target, low, high in writes:
        target.smem.check(low, high, "write of a copy")
        target.trace.store(np.arange(low // 4, -(-high // 4)), column, serial, line)

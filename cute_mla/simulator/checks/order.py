"""Who knows what is done: vector clocks of the warps of a cluster.

Each warp knows how far every agent of the cluster is: the other warps, the cp.async copies of each warp, the tensor cores (of a CTA for
tcgen05, of a warpgroup for wgmma), the copies that signal each mbarrier, and the grid before this one. Arriving at a barrier hands this
knowledge over to those that wait for the phase. An access is ordered after another one if its warp knows that the other is done.

Where the hardware could order less, knowledge is given generously, so that nothing is reported that a kernel did order: lanes of a warp
share it, every arrival (but a relaxed one at the cluster barrier), atomic operation and strong access, fenced or not, hands over all of
it, and copies give it at issue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from ..state.barriers import Mbarrier
    from ..state.cta import Cta


Clock = np.ndarray  # int64, one time for each column of Clocks
COPIERS = 64  # agents for the copies of one CTA's mbarriers; barriers that share one know a little too much
WARPS_OF_CORE = 4  # a warpgroup


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
    """now: row = what a warp of the cluster knows; columns, in this order:

    warps; cp.async copies of each warp; tensor cores by CTA rank; tensor cores of warpgroups; copies by CTA rank and mbarrier; the grid
    before (1 when it is known to be complete); tcgen05.commits by CTA rank. Then the first two blocks again: the times up to which ordinary
    stores can be read by asynchronous work (fence.proxy.async). Then the warps again: the times up to which they have handed tensor memory
    over (tcgen05.fence::before_thread_sync).

    after: the last block, and the tensor cores by CTA, when the warp executed tcgen05.fence::after_thread_sync. issued: how many copies a
    column's agent has been given. tensor_fences: whether the kernel has such fences.
    """

    def __init__(self, ctas: int, warps: int, fenced: bool) -> None:
        self.warps = warps
        self.rows = ctas * warps
        self.ctas = ctas
        self.stores = 2 * self.rows
        self.warpgroups = -(-warps // WARPS_OF_CORE)
        self.copies = self.stores + ctas * (1 + self.warpgroups)
        self.before = self.copies + ctas * COPIERS
        self.width = self.before + 1 + ctas
        self.handed = self.width + self.stores
        self.now = np.zeros((self.rows, self.handed + self.rows), np.int64)
        self.after = np.zeros((self.rows, self.rows + ctas), np.int64)
        self.issued = np.zeros(self.width, np.int64)
        self.diagonal = self.now.reshape(-1)[: self.rows * (self.now.shape[1] + 1) : self.now.shape[1] + 1]  # a view: own times
        self.behind_grid: set[tuple[int, Sequence[int]]] = set()  # (CTA rank, warps) known to come after the grid before
        self.tensor_fences = fenced
        self.memory = Knowledge()

    def row(self, cta: Cta, warp: int) -> int:
        """The row (and column) of a warp."""
        return cta.rank * self.warps + warp

    def rows_of(self, cta: Cta, warps: Sequence[int]) -> slice | list[int]:
        """What indexes the rows of some warps, in ascending order; none of them twice."""
        first = cta.rank * self.warps
        if warps and warps[-1] - warps[0] == len(warps) - 1:
            return slice(first + warps[0], first + warps[-1] + 1)
        return [first + warp for warp in warps]

    def core(self, cta: Cta) -> int:
        """The column of a CTA's tensor core."""
        return self.stores + cta.rank

    def matrix_core(self, cta: Cta, warp: int) -> int:
        """The column of a warpgroup's tensor core."""
        return self.stores + self.ctas + cta.rank * self.warpgroups + warp // WARPS_OF_CORE

    def committer(self, cta: Cta) -> int:
        """The column of a CTA's tcgen05.commits, which have happened when it says so: what they cover is another question."""
        return self.before + 1 + cta.rank

    def copier(self, rank: int, offset: int) -> int:
        """The column of the copies that signal the mbarrier at an offset of a CTA's shared memory."""
        return self.copies + rank * COPIERS + offset // 8 % COPIERS

    def own_copier(self, row: int) -> int:
        """The column of a warp's cp.async copies."""
        return self.rows + row

    def is_copier(self, column: int) -> bool:
        """Whether a column belongs to something that writes shared memory asynchronously."""
        return column >= self.rows

    def name(self, column: int) -> str:
        """An actor in words."""
        if column < self.rows:
            rank, warp = divmod(column, self.warps)
            return f"warp {warp} of CTA {rank} of the cluster" if self.ctas > 1 else f"warp {warp}"
        if column < self.stores:
            return f"a cp.async of {self.name(column - self.rows)}"
        return "an asynchronous copy" if column >= self.copies else "a tensor core"

    def fenced(self, known: Clock) -> Clock:
        """What a clock says of the times that asynchronous work can read up to, by column."""
        return np.concatenate([known[self.width : self.handed], known[self.stores : self.width]])

    def fence(self, cta: Cta, warps: Sequence[int]) -> None:
        """fence.proxy.async: all stores that a warp knows of can be read by asynchronous work now."""
        for warp in warps:
            self.tick(cta, warp)
            row = self.now[cta.rank * self.warps + warp]
            np.maximum(row[self.width : self.handed], row[: self.stores], out=row[self.width : self.handed])

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
            self.after[row, self.rows :] = self.now[row, self.stores : self.stores + self.ctas]

    def of(self, cta: Cta, warps: Sequence[int]) -> Clock:
        """What some warps know together."""
        if len(warps) == 1:
            return np.asarray(self.now[cta.rank * self.warps + warps[0]])
        return np.asarray(np.maximum.reduce(self.now[self.rows_of(cta, warps)]))

    def least(self, cta: Cta, warps: Sequence[int], column: int) -> int:
        """How far the least informed of some warps knows an actor to be."""
        return min(self.now[self.rows_of(cta, warps), column].tolist())

    def tick(self, cta: Cta, warp: int) -> int:
        """A warp has finished something: its new time."""
        row = self.row(cta, warp)
        self.now[row, row] += 1
        return int(self.now[row, row])

    def tick_all(self, cta: Cta, warps: Sequence[int]) -> None:
        """Warps have finished something."""
        rows = self.rows_of(cta, warps)
        self.diagonal[rows] += 1

    def issue(self, column: int) -> int:
        """An agent is given one more copy: its number."""
        self.issued[column] += 1
        return int(self.issued[column])

    def learn(self, cta: Cta, warps: Sequence[int], clock: Clock | None) -> None:
        """Warps get knowledge."""
        if clock is None:
            return
        rows = self.rows_of(cta, warps)
        if isinstance(rows, slice):
            np.maximum(self.now[rows], clock, out=self.now[rows])
        else:
            self.now[rows] = np.maximum(self.now[rows], clock)

    def note(self, cta: Cta, warps: Sequence[int], column: int, time: int) -> None:
        """Warps know that an agent has got to a time."""
        for warp in warps:
            row = self.now[self.row(cta, warp)]
            row[column] = max(int(row[column]), time)


def hand_over(cta: Cta, warps: Sequence[int]) -> None:
    """Warps are about to arrive: what they have done goes with it."""
    cta.cluster.clocks.tick_all(cta, warps)


def arrive(cta: Cta, warps: Sequence[int], barrier: Carrier, release: bool = True) -> None:
    """Warps arrive at a barrier (before it counts that). release: what they have done since they last handed over goes with it."""
    if release:
        hand_over(cta, warps)
    barrier.knowledge.add(cta.cluster.clocks.of(cta, warps))


def wait(cta: Cta, warps: Sequence[int], barrier: Carrier) -> None:
    """Warps have waited for a complete phase."""
    cta.cluster.clocks.learn(cta, warps, barrier.knowledge.known)


def through_memory(cta: Cta, warps: Sequence[int]) -> None:
    """Warps execute something that may hand over, or receive, through memory: an atomic operation, a strong load or store."""
    clocks = cta.cluster.clocks
    clocks.tick_all(cta, warps)
    clocks.memory.add(clocks.of(cta, warps))
    clocks.learn(cta, warps, clocks.memory.gathered)
    cta.machine.events.through_memory(cta.cluster.number)


def fence(cta: Cta, warps: Sequence[int]) -> None:
    """Warps execute fence.proxy.async."""
    cta.cluster.clocks.fence(cta, warps)


def copy(cta: Cta, warp: int, barriers: Sequence[Mbarrier], writes: Sequence[tuple[Cta, int, int]], line: int) -> list[tuple[int, int]]:
    """A warp issues a copy that will arrive on barriers, on one for each piece [low, high) that it writes.

    Returns the agent (column) that has it for each barrier, and its number there.
    """
    clocks = cta.cluster.clocks
    clocks.tick(cta, warp)
    numbers = []
    for barrier in barriers:
        clock = clocks.of(cta, (warp,)).copy()
        number = clock[barrier.column] = clocks.issue(barrier.column)
        barrier.knowledge.add(clock)
        numbers.append((barrier.column, int(number)))
    for (target, low, high), (column, number) in zip(writes, numbers, strict=True):
        target.smem.check(low, high, "write of a copy")
        target.trace.store(slice(low // 4, -(-high // 4)), column, number, line)
    return numbers


def arrive_behind_copies(cta: Cta, warp: int, barrier: Mbarrier) -> None:
    """A warp's cp.async copies will arrive on a barrier when they are done."""
    clocks = cta.cluster.clocks
    clocks.tick(cta, warp)
    clock = clocks.of(cta, (warp,)).copy()
    column = clocks.own_copier(clocks.row(cta, warp))
    clock[column] = clocks.issued[column]
    barrier.knowledge.add(clock)

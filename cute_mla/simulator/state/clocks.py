"""Vector clocks of the warps of a cluster: what each warp knows to be done.

Each warp knows how far every agent of the cluster is. The agents are the warps, the cp.async copies of each warp, the tensor core of each
CTA (tcgen05) and of each warpgroup (wgmma), the copies that signal each mbarrier, and the grid before this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Clock = np.ndarray  # int64, one time for each column of Clocks
COPIERS = 64  # agents for the copies of one CTA's mbarriers; barriers that share one know a little too much
WARPS_OF_CORE = 4  # a warpgroup


@dataclass
class Knowledge:
    """Knowledge that a barrier hands over. gathered: from the arrivals of the phase that runs; known: from complete phases."""

    gathered: Clock | None = None
    known: Clock | None = None

    def add(self, clock: Clock) -> None:
        """Gather the knowledge of an arrival."""
        self.gathered = clock.copy() if self.gathered is None else np.maximum(self.gathered, clock, out=self.gathered)

    def complete(self) -> None:
        """Complete the phase: gathered knowledge is known."""
        if self.gathered is not None:
            self.known = self.gathered if self.known is None else np.maximum(self.known, self.gathered)
            self.gathered = None


class Carrier(Protocol):
    """A barrier, or anything else that hands over knowledge."""

    knowledge: Knowledge


class Clocks:
    """Clocks of all warps of a cluster.

    now: a row is the knowledge of a warp. Its columns are agents, in this order: warps; cp.async copies of each warp; tensor cores by CTA
    rank; tensor cores of warpgroups; copies by CTA rank and mbarrier; the grid before (1 when it is known to be complete); tcgen05.commits
    by CTA rank. Then the first two blocks again: the times up to which asynchronous work can read ordinary stores (fence.proxy.async).
    Then the warps again: the times up to which they have handed tensor memory over (tcgen05.fence::before_thread_sync).

    after: the last block, and the tensor cores by CTA, when the warp executed tcgen05.fence::after_thread_sync. issued: how many copies a
    column's agent has been given. tensor_fences: the kernel has such fences. memory: knowledge exchanged through memory.
    diagonal: view of the warps' own times. behind_grid: (CTA rank, warps) that have been found to know the grid before to be complete.
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
        step = self.now.shape[1] + 1
        self.diagonal = self.now.reshape(-1)[: self.rows * step : step]
        self.behind_grid: set[tuple[int, Sequence[int]]] = set()
        self.tensor_fences = fenced
        self.memory = Knowledge()

    def row(self, rank: int, warp: int) -> int:
        """Return the row (and column) of a warp."""
        return rank * self.warps + warp

    def rows_of(self, rank: int, warps: Sequence[int]) -> slice | list[int]:
        """Return an index of the rows of some warps, which are in ascending order."""
        first = rank * self.warps
        if warps and warps[-1] - warps[0] == len(warps) - 1:
            return slice(first + warps[0], first + warps[-1] + 1)
        return [first + warp for warp in warps]

    def core(self, rank: int) -> int:
        """Return the column of a CTA's tensor core."""
        return self.stores + rank

    def matrix_core(self, rank: int, warp: int) -> int:
        """Return the column of a warpgroup's tensor core."""
        return self.stores + self.ctas + rank * self.warpgroups + warp // WARPS_OF_CORE

    def committer(self, rank: int) -> int:
        """Return the column of a CTA's tcgen05.commits. It says which commits have happened, not what they cover."""
        return self.before + 1 + rank

    def copier(self, rank: int, offset: int) -> int:
        """Return the column of the copies that signal the mbarrier at an offset of a CTA's shared memory."""
        return self.copies + rank * COPIERS + offset // 8 % COPIERS

    def own_copier(self, row: int) -> int:
        """Return the column of a warp's cp.async copies."""
        return self.rows + row

    def is_copier(self, column: int) -> bool:
        """Return whether a column belongs to something that writes shared memory asynchronously."""
        return column >= self.rows

    def name(self, column: int) -> str:
        """Return the name of an agent in words."""
        if column < self.rows:
            rank, warp = divmod(column, self.warps)
            return f"warp {warp} of CTA {rank} of the cluster" if self.ctas > 1 else f"warp {warp}"
        if column < self.stores:
            return f"a cp.async of {self.name(column - self.rows)}"
        return "an asynchronous copy" if column >= self.copies else "a tensor core"

    def fenced(self, known: Clock) -> Clock:
        """Return the times up to which asynchronous work can read the stores of each column, as a clock knows them."""
        return np.concatenate([known[self.width : self.handed], known[self.stores : self.width]])

    def fence(self, rank: int, warps: Sequence[int]) -> None:
        """Let asynchronous work read all stores that warps know of (fence.proxy.async)."""
        for warp in warps:
            self.tick(rank, warp)
            row = self.now[rank * self.warps + warp]
            np.maximum(row[self.width : self.handed], row[: self.stores], out=row[self.width : self.handed])

    def before_sync(self, rank: int, warps: Sequence[int]) -> None:
        """Let the next arrival of warps hand over their work in tensor memory (tcgen05.fence::before_thread_sync)."""
        for warp in warps:
            time = self.tick(rank, warp)
            row = self.row(rank, warp)
            self.now[row, self.handed + row] = time

    def after_sync(self, rank: int, warps: Sequence[int]) -> None:
        """Order the next accesses of warps to tensor memory after all that they know (tcgen05.fence::after_thread_sync)."""
        for warp in warps:
            row = self.row(rank, warp)
            self.after[row, : self.rows] = self.now[row, self.handed :]
            self.after[row, self.rows :] = self.now[row, self.stores : self.stores + self.ctas]

    def of(self, rank: int, warps: Sequence[int]) -> Clock:
        """Return the knowledge of some warps together."""
        if len(warps) == 1:
            return np.asarray(self.now[rank * self.warps + warps[0]])
        return np.asarray(np.maximum.reduce(self.now[self.rows_of(rank, warps)]))

    def least(self, rank: int, warps: Sequence[int], column: int) -> int:
        """Return the time of an agent that all of some warps know of."""
        return int(min(self.now[self.rows_of(rank, warps), column].tolist()))

    def tick(self, rank: int, warp: int) -> int:
        """Advance the time of a warp, which has finished something; return it."""
        row = self.row(rank, warp)
        self.now[row, row] += 1
        return int(self.now[row, row])

    def tick_all(self, rank: int, warps: Sequence[int]) -> None:
        """Advance the times of warps, which have finished something."""
        self.diagonal[self.rows_of(rank, warps)] += 1

    def issue(self, column: int) -> int:
        """Give an agent one more copy; return its number."""
        self.issued[column] += 1
        return int(self.issued[column])

    def learn(self, rank: int, warps: Sequence[int], clock: Clock | None) -> None:
        """Add a clock (None: nothing) to the knowledge of warps."""
        if clock is None:
            return
        rows = self.rows_of(rank, warps)
        if isinstance(rows, slice):
            np.maximum(self.now[rows], clock, out=self.now[rows])
        else:
            self.now[rows] = np.maximum(self.now[rows], clock)

    def note(self, rank: int, warps: Sequence[int], column: int, time: int) -> None:
        """Record that warps know an agent to have got to a time."""
        for warp in warps:
            row = self.now[self.row(rank, warp)]
            row[column] = max(int(row[column]), time)

"""History of global memory: the last store and the last load of each unit of a buffer, over all clusters of a launch."""

from __future__ import annotations

import numpy as np

from .access import GlobalAccess
from .memory import Buffer

LARGE_BYTES = 1 << 30  # a buffer of this size has sparse entries: arrays would take up to 8 bytes for each of its bytes


class SparseEntries:
    """Entries of a large buffer, of which only the chunks that are accessed take memory. Indexed by units, like an array of int32."""

    def __init__(self) -> None:
        self._each = 1 << 8  # units of a chunk: rows that lie far apart have one each
        self._rows: dict[int, int] = {}  # by the number of a chunk, its place among the values
        self._values = np.zeros(0, np.int32)

    def __getitem__(self, units: np.ndarray | int) -> np.ndarray:
        places = self._places(units)  # first: this may replace the values
        return np.asarray(self._values[places])

    def __setitem__(self, units: np.ndarray, values: np.ndarray | int) -> None:
        places = self._places(units)
        self._values[places] = values

    def refine(self, factor: int) -> None:
        """Go on with units smaller by this factor."""
        self._values = np.repeat(self._values, factor)
        self._each *= factor

    def _places(self, units: np.ndarray | int) -> np.ndarray:
        units = np.asarray(units)
        chunks, which = np.unique(units // self._each, return_inverse=True)
        new = [chunk for chunk in chunks.tolist() if chunk not in self._rows]
        if new:
            self._rows.update(zip(new, range(len(self._rows), len(self._rows) + len(new)), strict=True))
            lacking = len(self._rows) * self._each - len(self._values)
            if lacking > 0:  # at least double, so that all growth together copies each value about once
                self._values = np.concatenate((self._values, np.zeros(max(lacking, len(self._values)), np.int32)))
        first = np.array([self._rows[chunk] for chunk in chunks.tolist()]) * self._each
        return np.asarray(first[which.reshape(units.shape)] + units % self._each)


class GlobalTrace:
    """Last accesses to each unit of a buffer. stores, loads: entries of the launch's EventLog, 0 for none.

    A store makes its units forget who has read them. is_read: some load has been recorded.
    """

    def __init__(self, buffer: Buffer, unit: int) -> None:
        self.buffer = buffer
        self.unit = unit
        units = -(-buffer.nbytes // unit)
        self.stores: np.ndarray | SparseEntries
        self.loads: np.ndarray | SparseEntries
        if buffer.nbytes < LARGE_BYTES:
            self.stores, self.loads = np.zeros(units, np.int32), np.zeros(units, np.int32)
        else:
            self.stores, self.loads = SparseEntries(), SparseEntries()
        self.is_read = False

    def refine(self, unit: int) -> None:
        """Go on with smaller units."""
        factor = self.unit // unit
        for name in ("stores", "loads"):
            entries = getattr(self, name)
            if isinstance(entries, SparseEntries):
                entries.refine(factor)
            else:
                setattr(self, name, np.repeat(entries, factor))
        self.unit = unit

    def units(self, access: GlobalAccess) -> np.ndarray:
        """Return the units that accesses touch, shape (accesses, units)."""
        first = (access.low - self.buffer.address) // self.unit
        return first + access.pattern.index(self.unit, access.nbytes // self.unit)

    def take(self, access: GlobalAccess, entries: np.ndarray | SparseEntries) -> np.ndarray:
        """Return the entries (stores or loads) of the units that accesses touch, shape (accesses, units)."""
        if isinstance(entries, SparseEntries):
            return entries[self.units(access)]
        return access.take(entries, self.buffer.address, self.unit, access.nbytes // self.unit)

    def put(self, access: GlobalAccess, entries: np.ndarray | SparseEntries, new: np.ndarray | int) -> None:
        """Set the entries (stores or loads) of the units that accesses touch."""
        if isinstance(entries, SparseEntries):
            entries[self.units(access)] = new
            return
        access.put(entries, self.buffer.address, self.unit, access.nbytes // self.unit, new)


class EventLog:
    """Accesses of a launch to the memory that it writes, and the events that order its clusters.

    An entry stands for an access by one warp; entry 0 stands for none. agent: the warp, numbered over all clusters from 1. time: of that
    warp. event: how many events came before. line: PTX line.
    strong: when each cluster last executed an atomic operation or a strong access.
    """

    def __init__(self) -> None:
        self.now = 0
        self.strong: dict[int, int] = {}
        self.traces: dict[int, GlobalTrace] = {}
        self.length = 1
        self.agent, self.time, self.event, self.line = (np.zeros(1024, np.int64) for _ in range(4))

    def through_memory(self, cluster: int) -> None:
        """Record that a cluster executes an atomic operation, or a strong load or store."""
        self.now += 1
        self.strong[cluster] = self.now

    def add(self, agents: list[int], times: list[int], line: int) -> int:
        """Enter an access by some warps. Return the first of their entries, which are in the order of the warps."""
        start, stop = self.length, self.length + len(agents)
        while stop > len(self.agent):
            self.agent, self.time, self.event, self.line = (
                np.concatenate([array, np.zeros_like(array)]) for array in (self.agent, self.time, self.event, self.line)
            )
        self.agent[start:stop] = agents
        self.time[start:stop] = times
        self.event[start:stop] = self.now
        self.line[start:stop] = line
        self.length = stop
        return start

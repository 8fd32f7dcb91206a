"""History of global memory: the last store and the last load of each unit of a buffer, over all clusters of a launch."""

from __future__ import annotations

import numpy as np

from .access import GlobalAccess
from .memory import Buffer


class GlobalTrace:
    """Last accesses to each unit of a buffer. stores, loads: entries of the launch's EventLog, 0 for none.

    A store makes its units forget who has read them. is_read: some load has been recorded.
    """

    def __init__(self, buffer: Buffer, unit: int) -> None:
        self.buffer = buffer
        self.unit = unit
        units = -(-buffer.nbytes // unit)
        self.stores, self.loads = np.zeros(units, np.int32), np.zeros(units, np.int32)
        self.is_read = False

    def refine(self, unit: int) -> None:
        """Go on with smaller units."""
        self.stores, self.loads = (np.repeat(array, self.unit // unit) for array in (self.stores, self.loads))
        self.unit = unit

    def units(self, access: GlobalAccess) -> np.ndarray:
        """Return the units that accesses touch, shape (accesses, units)."""
        first = (access.low - self.buffer.address) // self.unit
        return first + access.pattern.index(self.unit, access.nbytes // self.unit)

    def take(self, access: GlobalAccess, entries: np.ndarray) -> np.ndarray:
        """Return the entries (stores or loads) of the units that accesses touch, shape (accesses, units)."""
        return access.take(entries, self.buffer.address, self.unit, access.nbytes // self.unit)

    def put(self, access: GlobalAccess, entries: np.ndarray, new: np.ndarray | int) -> None:
        """Set the entries (stores or loads) of the units that accesses touch."""
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

"""History of global memory: the last writer and the last reader of each unit of a buffer, over all clusters of a launch."""

from __future__ import annotations

import numpy as np

from .memory import Buffer


class GlobalTrace:
    """Last accesses to each unit of a buffer. writer, reader: agents (0: none); written, read: their times.

    event: how many events of the launch (EventLog) came before that write. line: PTX line of the write.
    """

    def __init__(self, buffer: Buffer, unit: int) -> None:
        self.buffer = buffer
        self.unit = unit
        units = -(-buffer.nbytes // unit)
        self.writer, self.reader = np.zeros(units, np.int64), np.zeros(units, np.int64)
        self.written, self.read, self.event, self.line = (np.zeros(units, np.int32) for _ in range(4))

    def refine(self, unit: int) -> None:
        """Go on with smaller units."""
        for name in ("writer", "reader", "written", "read", "event", "line"):
            setattr(self, name, np.repeat(getattr(self, name), self.unit // unit))
        self.unit = unit

    def units(self, addresses: np.ndarray, nbytes: int) -> np.ndarray:
        """Return the units that accesses of nbytes touch, shape (accesses, units)."""
        if nbytes < self.unit:
            self.refine(nbytes)
        first = (addresses - np.uint64(self.buffer.address)).astype(np.int64) // self.unit
        return first[:, None] + np.arange(nbytes // self.unit)


class EventLog:
    """Events that order the clusters of a launch. strong: when each cluster last executed an atomic operation or a strong access."""

    def __init__(self) -> None:
        self.now = 0
        self.strong: dict[int, int] = {}
        self.traces: dict[int, GlobalTrace] = {}

    def through_memory(self, cluster: int) -> None:
        """Record that a cluster executes an atomic operation, or a strong load or store."""
        self.now += 1
        self.strong[cluster] = self.now

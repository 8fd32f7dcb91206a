"""History of global memory: the last writer and the last reader of each unit of a buffer, over all clusters of a launch."""

from __future__ import annotations

import numpy as np

from .memory import Buffer

CHUNK_BYTES = 1 << 16  # of a large buffer, whose trace begins with the first access to a chunk
_ARRAYS = ("writer", "reader", "written", "read", "event", "line")
LARGE_BYTES = 1 << 30  # a trace has 32 bytes a unit, too much for all of a larger buffer


class GlobalTrace:
    """Last accesses to each unit of a buffer. writer, reader: agents (0: none); written, read: their times.

    event: how many events of the launch (EventLog) came before that write. line: PTX line of the write.
    rows: of a large buffer, by the chunks that were accessed, the place of their units in these arrays; None for other buffers.
    """

    def __init__(self, buffer: Buffer, unit: int) -> None:
        self.buffer = buffer
        self.unit = unit
        self.rows: dict[int, int] | None = {} if buffer.nbytes >= LARGE_BYTES else None
        units = -(-buffer.nbytes // unit) if self.rows is None else 0
        self.writer, self.reader = np.zeros(units, np.int64), np.zeros(units, np.int64)
        self.written, self.read, self.event, self.line = (np.zeros(units, np.int32) for _ in range(4))

    def refine(self, unit: int) -> None:
        """Go on with smaller units."""
        for name in _ARRAYS:
            setattr(self, name, np.repeat(getattr(self, name), self.unit // unit))
        self.unit = unit

    def units(self, addresses: np.ndarray, nbytes: int) -> np.ndarray:
        """Return the units that accesses of nbytes touch, shape (accesses, units)."""
        if nbytes < self.unit:
            self.refine(nbytes)
        first = (addresses - np.uint64(self.buffer.address)).astype(np.int64) // self.unit
        units = first[:, None] + np.arange(nbytes // self.unit)
        return units if self.rows is None else self._places(units, self.rows)

    def _places(self, units: np.ndarray, rows: dict[int, int]) -> np.ndarray:
        """Return the places of units of a large buffer, and add the chunks that have none yet."""
        each = CHUNK_BYTES // self.unit
        chunks, which = np.unique(units // each, return_inverse=True)
        new = [chunk for chunk in chunks.tolist() if chunk not in rows]
        if new:
            rows.update(zip(new, range(len(rows), len(rows) + len(new)), strict=True))
            for name in _ARRAYS:
                array = getattr(self, name)
                setattr(self, name, np.concatenate((array, np.zeros(len(new) * each, array.dtype))))
        first = np.array([rows[chunk] for chunk in chunks.tolist()]) * each
        return np.asarray(first[which.reshape(units.shape)] + units % each)


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

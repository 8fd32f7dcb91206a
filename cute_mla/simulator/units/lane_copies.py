"""cp.async copies of a warp: 4, 8 or 16 bytes of each lane from global to shared memory."""

from __future__ import annotations

import numpy as np

from ..state.access import GlobalAccess, SharedPattern
from ..state.memory import GlobalMemory, SharedMemory


class LaneCopies:
    """One cp.async instruction of some lanes. Read and write are separate steps: the copy may do either late.

    addresses: global, one per lane. counts: bytes to read for each lane; the rest of its size bytes becomes zero. pattern: destinations.
    """

    def __init__(self, memory: GlobalMemory, addresses: np.ndarray, counts: np.ndarray, pattern: SharedPattern, size: int) -> None:
        self.memory = memory
        self.addresses = addresses
        self.counts = counts
        self.pattern = pattern
        self.size = size
        self.data: np.ndarray = np.empty(0)
        self.valid: np.ndarray = np.empty(0)

    def read(self) -> None:
        """Take the bytes, shape (lanes, size), with their shadow. Raises Fault where one lies outside every buffer."""
        shape = (len(self.addresses), self.size)
        self.data, self.valid = np.zeros(shape, np.uint8), np.ones(shape, np.uint8)
        lanes = np.flatnonzero(self.counts)
        if len(lanes) and not (bool((self.counts[lanes] == self.size).all()) and self._read_at_once(lanes)):
            for lane in lanes.tolist():
                self._read_lane(lane)

    def _read_at_once(self, lanes: np.ndarray) -> bool:
        """Read whole pieces of one buffer; False when they do not lie in one."""
        access = GlobalAccess(self.addresses[lanes], self.size)
        buffer = self.memory.find(access.low, access.high)
        if buffer is None or buffer.address % self.size:
            return False
        units = buffer.units(self.size)
        self.data.view(units.dtype)[lanes] = access.take(units, buffer.address, self.size, 1)
        if buffer.valid is not None:
            self.valid.view(units.dtype)[lanes] = access.take(buffer.valid_units(self.size), buffer.address, self.size, 1)
        return True

    def _read_lane(self, lane: int) -> None:
        address, count = int(self.addresses[lane]), int(self.counts[lane])
        buffer = self.memory.require(address, address + count, False)
        start = address - buffer.address
        self.data[lane, :count] = buffer.data[start : start + count]
        if buffer.valid is not None:
            self.valid[lane, :count] = buffer.valid[start : start + count]

    def write(self, smem: SharedMemory) -> None:
        """Store what was read. Of lanes with one destination the last one wins. Raises Fault for bytes outside shared memory."""
        for offset in self.pattern.offsets.tolist() if self.pattern.high + self.size > smem.nbytes else ():
            smem.check(offset, offset + self.size, "cp.async write")
        index, units = self.pattern.index(self.size), smem.views[self.size]
        units[index] = self.data.view(units.dtype)[:, 0]
        smem.valid_views[self.size][index] = self.valid.view(units.dtype)[:, 0]
        self.data = self.valid = np.empty(0)

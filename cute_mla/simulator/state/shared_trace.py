"""History of a CTA's shared memory: the last writer and the readers of each 32-bit word."""

from __future__ import annotations

import numpy as np

from .access import WORD

WHOLE = 0xF  # all bytes of a word


class SharedTrace:
    """Last accesses to each word of one CTA's shared memory. writer: column of a clock, -1 for none; line: PTX line, 0 unknown.

    warps: of the CTA. readers: bit mask of those that have read it since it was written; far: times of reads by warps of other CTAs, by
    row. have_read: warps of the CTA that have read anything. parts: which bytes the last writer wrote, from the first store of less than a
    word on. narrow_reads: there were loads of less.
    """

    def __init__(self, nbytes: int, warps: int) -> None:
        words = -(-nbytes // WORD) + 64  # vector accesses near the end
        self.writer = np.full(words, -1, np.int32)
        self.written = np.zeros(words, np.int32)
        self.line = np.zeros(words, np.int32)
        self.read = np.zeros((warps, words), np.int32)
        self.readers = np.zeros(words, np.int64)
        self.have_read: set[int] = set()
        self.far: dict[int, np.ndarray] = {}
        self.parts: np.ndarray | None = None
        self.narrow_reads = False

    @property
    def nbytes(self) -> int:
        """Return the bytes of the arrays that are always there."""
        return self.writer.nbytes + self.written.nbytes + self.line.nbytes + self.read.nbytes + self.readers.nbytes

    def reset(self) -> None:
        """Forget everything."""
        self.writer.fill(-1)
        self.written.fill(0)
        for warp in self.have_read:
            self.read[warp].fill(0)
        self.have_read.clear()
        self.readers.fill(0)
        self.far = {}
        self.parts = None
        self.narrow_reads = False

    def store(self, words: np.ndarray | slice, column: np.ndarray | int, time: np.ndarray | int, line: int) -> None:
        """Record that words are written."""
        self.writer[words] = column
        self.written[words] = time
        self.line[words] = line
        self.readers[words] = 0
        for times in self.far.values():
            times[words] = 0
        if self.parts is not None:
            self.parts[words] = WHOLE

    def store_parts(self, words: np.ndarray, column: np.ndarray | int, time: np.ndarray | int, line: int, masks: np.ndarray) -> None:
        """Record that some bytes (bit masks) of words are written."""
        if self.parts is None:
            self.parts = np.full(len(self.writer), WHOLE, np.uint8)
        same = (self.writer[words] == column) & (self.written[words] == time)
        held = np.where(same, self.parts[words], 0)
        self.store(words, column, time, line)
        self.parts[words] = held
        mine = self.writer[words] == column  # one of several warps that store at once is remembered
        np.bitwise_or.at(self.parts, words, np.where(mine, masks, 0).astype(np.uint8))

    def note_read(self, warp: int, words: np.ndarray | slice, time: int) -> None:
        """Record that a warp of the CTA has read words."""
        self.have_read.add(warp)
        self.read[warp][words] = time
        self.readers[words] |= 1 << warp

    def note_reads(self, warps: np.ndarray, words: np.ndarray, times: np.ndarray, distinct: bool) -> None:
        """Record that each of some warps (one a row) has read words, shape (rows, words). distinct: no word occurs twice."""
        members = set(warps.tolist())
        self.have_read |= members
        self.read[warps[:, None], words] = times
        if distinct:
            self.readers[words] |= (1 << warps)[:, None]
            return
        for warp in members:
            self.readers[words[warps == warp]] |= 1 << warp

"""Races on shared memory: accesses that nothing orders after an earlier one of another warp.

Each 32-bit word remembers its last writer (a warp, or the copies of a CTA) with the writer's time, and for each warp the time of its last
read; order.py says what a warp knows of the others' times. Ordinary stores reach tensor cores and bulk copies only through
fence.proxy.async, by the writer before it arrives or by the reader after it has waited; clocks keep a second time for that. Stores over
stores are left out (several threads may write the same value), and so are atomic operations among themselves, the lanes of one warp, and
loads of another CTA's shared memory as what a store must not overwrite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .findings import Fault
from .registers import WARP

if TYPE_CHECKING:
    from .cta import Cta
    from .order import Clocks
    from .registers import Window
    from .wgmma import Operand

WORD = 4


class Trace:
    """What happened last to each word of one CTA's shared memory. writer: column of a clock, -1 for none; line: PTX line, 0 unknown.

    warps: of the CTA. readers: bit mask of those that have read it since it was written.
    """

    def __init__(self, nbytes: int, warps: int) -> None:
        words = -(-nbytes // WORD) + 64  # vector accesses near the end
        self.writer = np.full(words, -1, np.int32)
        self.written = np.zeros(words, np.int32)
        self.line = np.zeros(words, np.int32)
        self.read = np.zeros((warps, words), np.int32)
        self.readers = np.zeros(words, np.int64)

    def reset(self) -> None:
        """Forget everything."""
        self.writer.fill(-1)
        self.written.fill(0)
        self.read.fill(0)
        self.readers.fill(0)

    def store(self, words: np.ndarray, column: np.ndarray | int, time: np.ndarray | int, line: int) -> None:
        """Words are written."""
        self.writer[words] = column
        self.written[words] = time
        self.line[words] = line
        self.readers[words] = 0


def words_of(offsets: np.ndarray, nbytes: int) -> np.ndarray:
    """The words that accesses of nbytes at offsets touch: (accesses, words)."""
    first = offsets // WORD
    return first[:, None] + np.arange(max(nbytes // WORD, 1))


def access(w: Window, target: Cta, index: np.ndarray | None, offsets: np.ndarray, nbytes: int, write: bool) -> None:
    """Lanes (index: positions in the window, None for all) access nbytes each at offsets of target's shared memory."""
    lanes = w.lanes if index is None else w.lanes[index]
    accesses(w, target, lanes // WARP, offsets, nbytes, write)


def accesses(w: Window, target: Cta, warps: np.ndarray, offsets: np.ndarray, nbytes: int, write: bool) -> None:
    """Warps (one of each access) access nbytes each at offsets of target's shared memory. Raises findings for races."""
    trace, clocks = target.trace, target.cluster.clocks
    words = words_of(offsets, nbytes)
    row = (w.cta.rank * clocks.warps + warps)[:, None]
    time = clocks.now[row, row] + 1
    if write:
        check_readers(w, target, clocks, words, row)
        trace.store(words, row, time, w.cta.machine.line_of_caller())
        return
    writer = trace.writer[words]
    bad = (writer >= 0) & (writer != row) & (clocks.now[row, writer] < trace.written[words])
    if np.count_nonzero(bad):
        place = tuple(int(part) for part in np.argwhere(bad)[0])
        report(w, "a load reads", target, clocks, int(words[place]))
    if target is w.cta:
        trace.read[warps[:, None], words] = time
        for warp in w.warps:
            trace.readers[words if len(w.warps) == 1 else words[warps == warp]] |= 1 << warp


def check_readers(w: Window, target: Cta, clocks: Clocks, words: np.ndarray, row: np.ndarray) -> None:
    """A finding when lanes store where another warp may still read."""
    trace = target.trace
    flat = words.reshape(-1)
    rows = np.broadcast_to(row, words.shape).reshape(-1)
    mask = int(np.bitwise_or.reduce(trace.readers[flat]))
    for warp in range(clocks.warps) if mask else ():
        if mask >> warp & 1:
            reader = clocks.row(target, warp)
            late = (trace.read[warp, flat] > clocks.now[rows, reader]) & (rows != reader)
            if np.count_nonzero(late):
                first = int(np.flatnonzero(late)[0])
                who, where = clocks.name(int(rows[first])), f"shared memory at {int(flat[first]) * WORD:#x}"
                message = f"a store of {who} overwrites {where} that {clocks.name(reader)} may still read: nothing orders the two"
                w.cta.report(w, "race", message)
                return


def report(w: Window, what: str, target: Cta, clocks: Clocks, word: int) -> None:
    """The finding about a word whose last writer may come later."""
    trace = target.trace
    writer, line = clocks.name(int(trace.writer[word])), int(trace.line[word])
    where = f"shared memory at {word * WORD:#x}"
    written = f"{writer} writes{f' (PTX line {line})' if line else ''}"
    w.cta.report(w, "race", f"{what} {where} that {written}: nothing orders the two")


def check_source(w: Window, target: Cta, words: np.ndarray, what: str, warp: int) -> None:
    """A finding when asynchronous work reads words (1-d) whose writers it does not know to be done, or not fenced.

    warp: that issues it. Raises Fault for words behind the end of shared memory.
    """
    trace, clocks = target.trace, target.cluster.clocks
    if int(words[-1]) * WORD >= target.smem.nbytes:
        end = (int(words[-1]) + 1) * WORD
        raise Fault("out_of_bounds", f"{what} reads up to {end:#x}, beyond the CTA's shared memory of {target.smem.nbytes:#x}")
    row = clocks.row(w.cta, warp)
    known = clocks.now[row]
    writer, written = trace.writer[words], trace.written[words]
    bad = clocks.fenced(known)[writer] < written
    bad &= writer >= 0
    if not np.count_nonzero(bad):
        return
    late = bad & (known[writer] < written) & (writer != row)
    if np.count_nonzero(late):
        word = int(words[np.flatnonzero(late)[0]])
        if int(trace.writer[word]) >= clocks.rows:
            line = int(trace.line[word])
            copy = f"an asynchronous copy{f' (PTX line {line})' if line else ''}"
            w.cta.report(w, "missing_wait", f"{what} reads shared memory that {copy} writes, without a wait for it")
        else:
            report(w, f"{what} reads", target, clocks, word)
        return
    word = int(words[np.flatnonzero(bad)[0]])
    line = int(trace.line[word])
    store = f"a store{f' (PTX line {line})' if line else ''} of {clocks.name(int(trace.writer[word]))}"
    w.cta.report(w, "missing_fence", f"{what} reads shared memory at {word * WORD:#x} behind {store} without fence.proxy.async between")


def check_range(w: Window, source: tuple[int, int], what: str, warp: int) -> None:
    """As check_source, for bytes [start, stop) of the warp's own CTA."""
    check_source(w, w.cta, np.arange(source[0] // WORD, -(-source[1] // WORD)), what, warp)


def check_overwrite(w: Window, warp: int, target: Cta, low: int, high: int) -> None:
    """A finding when a warp issues a copy to bytes that another one may still read."""
    trace, clocks = target.trace, target.cluster.clocks
    row = clocks.row(w.cta, warp)
    part = slice(low // WORD, -(-high // WORD))
    mask = int(np.bitwise_or.reduce(trace.readers[part]))
    for number in range(clocks.warps) if mask else ():
        reader = clocks.row(target, number)
        if mask >> number & 1 and reader != row and int(trace.read[number, part].max()) > clocks.now[row, reader]:
            name = clocks.name(reader)
            w.cta.report(w, "race", f"an asynchronous copy overwrites shared memory that {name} may still read: nothing orders the two")
            return


def operand_words(where: Operand) -> np.ndarray:
    """The words of an operand, ascending."""
    words = where.words
    if words is None:
        words = where.words = (where.touched[:, None] * 4 + np.arange(4)).reshape(-1)
    return words

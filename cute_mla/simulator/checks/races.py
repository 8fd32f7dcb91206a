"""Races on shared memory: accesses that nothing orders after an earlier one of another agent.

Each 32-bit word remembers its last writer (a warp, its cp.async copies, or the copies of an mbarrier) with the writer's time, and for each
warp the time of its last read; order.py says what a warp knows of the others' times. Ordinary stores reach tensor cores and bulk copies
only through fence.proxy.async, by the writer before it arrives or by the reader after it has waited; clocks keep a second time for that.

Left out: stores that leave the same value, atomic operations among themselves, the lanes of one warp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..findings import Fault
from ..state.access import WORD

if TYPE_CHECKING:
    from ..numerics.wgmma import Operand
    from ..state.access import SharedPattern
    from ..state.cta import Cta
    from ..state.registers import Window
    from .order import Clocks

WHOLE = 0xF  # all bytes of a word


class Trace:
    """What happened last to each word of one CTA's shared memory. writer: column of a clock, -1 for none; line: PTX line, 0 unknown.

    warps: of the CTA. readers: bit mask of those that have read it since it was written; far: times of reads by warps of other CTAs, by
    row. parts: which bytes the last writer wrote, from the first store of less than a word on. narrow_reads: there were loads of less.
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
        """Bytes of the arrays that are always there."""
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
        """Words are written."""
        self.writer[words] = column
        self.written[words] = time
        self.line[words] = line
        self.readers[words] = 0
        for times in self.far.values():
            times[words] = 0
        if self.parts is not None:
            self.parts[words] = WHOLE

    def store_parts(self, words: np.ndarray, column: np.ndarray | int, time: np.ndarray | int, line: int, masks: np.ndarray) -> None:
        """Some bytes (bit masks) of words are written."""
        if self.parts is None:
            self.parts = np.full(len(self.writer), WHOLE, np.uint8)
        same = (self.writer[words] == column) & (self.written[words] == time)
        kept = np.where(same, self.parts[words], 0)
        self.store(words, column, time, line)
        self.parts[words] = kept
        mine = self.writer[words] == column  # of several warps that store at once, one is remembered
        np.bitwise_or.at(self.parts, words, np.where(mine, masks, 0).astype(np.uint8))

    def note_read(self, warp: int, words: np.ndarray | slice, time: int) -> None:
        """A warp of the CTA has read words."""
        self.have_read.add(warp)
        self.read[warp][words] = time
        self.readers[words] |= 1 << warp


class Overwrite:
    """Words that a store overwrites though nothing orders it after their writers: a race unless it leaves the same values."""

    def __init__(self, target: Cta, words: np.ndarray, rows: np.ndarray, writers: np.ndarray) -> None:
        self.target = target
        self.words = words
        self.rows = rows
        self.writers = writers
        self.lines = target.trace.line[words]
        self.before = target.smem.views[WORD].take(words)

    def check(self, w: Window) -> None:
        """A finding when the store has changed something."""
        changed = self.target.smem.views[WORD].take(self.words) != self.before
        if np.count_nonzero(changed):
            self.fail(w, int(np.flatnonzero(changed)[0]))

    def fail(self, w: Window, place: int = 0) -> None:
        """The finding about one of the words."""
        clocks = self.target.cluster.clocks
        who, line = clocks.name(int(self.rows[place])), int(self.lines[place])
        what = f"{clocks.name(int(self.writers[place]))} writes{f' (PTX line {line})' if line else ''}"
        where = f"shared memory at {int(self.words[place]) * WORD:#x}"
        w.cta.report(w, "race", f"a store of {who} overwrites {where} that {what}: nothing orders the two")


def access(w: Window, target: Cta, index: np.ndarray | None, pattern: SharedPattern, nbytes: int, write: bool) -> Overwrite | None:
    """Lanes (index: positions in the window, None for all) access nbytes each in target's shared memory."""
    return accesses(w, target, w.lane_warps if index is None else w.lane_warps[index], pattern, nbytes, write)


def accesses(w: Window, target: Cta, warps: np.ndarray, pattern: SharedPattern, nbytes: int, write: bool) -> Overwrite | None:
    """Warps (one of each access) access nbytes each in target's shared memory; stores say so before they happen.

    Raises findings for races. Returns what a store must check when it has happened, if anything.
    """
    clocks = target.cluster.clocks
    words = pattern.words(nbytes)
    row: np.ndarray | int
    if len(w.warps) == 1:
        row = w.cta.rank * clocks.warps + w.warps[0]
        time = clocks.now[row, row] + 1
    else:
        row = (w.cta.rank * clocks.warps + warps)[:, None]
        time = clocks.now[row, row] + 1
    masks = pattern.part_masks(nbytes) if nbytes < WORD else None
    late = unknown_writers(target, clocks, words, row, masks)
    if write:
        found = None if late is None else overwritten(w, target, words, row, late)
        check_readers(w, target, clocks, words, row, nbytes < WORD)
        record(target, words, row, time, w.cta.machine.line_of_caller(), masks)
        return found
    if late is not None:
        report(w, "a load reads", target, clocks, int(words[late][0]))
    note_reads(w, target, warps, words, row, time, pattern.distinct(nbytes))
    target.trace.narrow_reads |= masks is not None
    return None


def record(target: Cta, words: np.ndarray, row: np.ndarray | int, time: np.ndarray | int, line: int, masks: np.ndarray | None) -> None:
    """Words are written by warps, or by copies of them."""
    if masks is None:
        target.trace.store(words, row, time, line)
    else:
        target.trace.store_parts(words, row, time, line, masks)


def unknown_writers(
    target: Cta, clocks: Clocks, words: np.ndarray, row: np.ndarray | int, masks: np.ndarray | None = None
) -> np.ndarray | None:
    """Which words were last written by somebody else whom their warps do not know to be done; None for none."""
    trace = target.trace
    writer = trace.writer.take(words)
    known = clocks.now[row].take(writer) if isinstance(row, int) else clocks.now[row, writer]
    late = known < trace.written.take(words)
    if not np.count_nonzero(late):
        return None
    late &= writer != row
    if trace.parts is not None:
        late &= (trace.parts.take(words) & (WHOLE if masks is None else masks)) != 0
    return late if np.count_nonzero(late) else None


def overwritten(w: Window, target: Cta, words: np.ndarray, row: np.ndarray | int, late: np.ndarray) -> Overwrite | None:
    """A finding when a store overwrites what a copy still writes; what is left to be looked at when it has happened."""
    where = words[late]
    writers = target.trace.writer.take(where)
    clocks = target.cluster.clocks
    copies = writers >= clocks.rows
    if np.count_nonzero(copies):
        report(w, "a store overwrites", target, clocks, int(where[copies][0]))
        return None
    return Overwrite(target, where, np.broadcast_to(row, words.shape)[late], writers)


def note_reads(
    w: Window, target: Cta, warps: np.ndarray, words: np.ndarray, row: np.ndarray | int, time: np.ndarray | int, distinct: bool
) -> None:
    """Warps have read words. distinct: none of them twice."""
    trace = target.trace
    if target is not w.cta:
        for reader in np.unique(row):
            times = trace.far.setdefault(int(reader), np.zeros(len(trace.writer), np.int32))
            part = words if isinstance(row, int) else words[row[:, 0] == reader]
            times[part] = target.cluster.clocks.now[reader, reader] + 1
    elif isinstance(row, int):
        trace.note_read(w.warps[0], words, int(time))
    else:
        trace.have_read.update(w.warps)
        trace.read[warps[:, None], words] = time
        if distinct:
            trace.readers[words] |= (1 << warps)[:, None]
            return
        for warp in w.warps:
            trace.readers[words[warps == warp]] |= 1 << warp


def check_readers(w: Window, target: Cta, clocks: Clocks, words: np.ndarray, row: np.ndarray | int, narrow: bool) -> None:
    """A finding when lanes store where another warp may still read."""
    trace = target.trace
    if narrow and trace.narrow_reads:
        return  # other bytes of the word, perhaps
    for reader, times in reads(target, words):
        known = clocks.now[row, reader]
        late = (times.take(words) > known) & (np.asarray(row) != reader)
        if np.count_nonzero(late):
            place = tuple(int(part) for part in np.argwhere(late)[0])
            who = clocks.name(int(np.broadcast_to(row, words.shape)[place]))
            where = f"shared memory at {int(words[place]) * WORD:#x}"
            message = f"a store of {who} overwrites {where} that {clocks.name(reader)} may still read: nothing orders the two"
            w.cta.report(w, "race", message)
            return


def reads(target: Cta, words: np.ndarray | slice) -> list[tuple[int, np.ndarray]]:
    """Who may have read some of these words since they were written: row, and the times of its reads of all words."""
    trace, clocks = target.trace, target.cluster.clocks
    mask = int(np.bitwise_or.reduce(trace.readers[words], axis=None))
    found = list(trace.far.items()) if trace.far else []
    warp = 0
    while mask:
        if mask & 1:
            found.append((clocks.row(target, warp), trace.read[warp]))
        mask >>= 1
        warp += 1
    return found


def report(w: Window, what: str, target: Cta, clocks: Clocks, word: int) -> None:
    """The finding about a word whose last writer may come later."""
    trace = target.trace
    column, line = int(trace.writer[word]), int(trace.line[word])
    place = f" (PTX line {line})" if line else ""
    if clocks.is_copier(column):
        message = f"{what} shared memory at {word * WORD:#x} that {clocks.name(column)}{place} writes, without a wait for it"
        w.cta.report(w, "missing_wait", message)
    else:
        message = f"{what} shared memory at {word * WORD:#x} that {clocks.name(column)} writes{place}: nothing orders the two"
        w.cta.report(w, "race", message)


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
    writer, written = trace.writer.take(words), trace.written.take(words)
    bad = clocks.fenced(known).take(writer) < written
    if not np.count_nonzero(bad):
        return
    late = bad & (known.take(writer) < written) & (writer != row)
    if np.count_nonzero(late):
        report(w, f"{what} reads", target, clocks, int(words[np.flatnonzero(late)[0]]))
        return
    word = int(words[np.flatnonzero(bad)[0]])
    line = int(trace.line[word])
    store = f"a store{f' (PTX line {line})' if line else ''} of {clocks.name(int(trace.writer[word]))}"
    w.cta.report(w, "missing_fence", f"{what} reads shared memory at {word * WORD:#x} behind {store} without fence.proxy.async between")


def check_range(w: Window, source: tuple[int, int], what: str, warp: int) -> None:
    """As check_source, for bytes [start, stop) of the warp's own CTA."""
    check_source(w, w.cta, np.arange(source[0] // WORD, -(-source[1] // WORD)), what, warp)


def check_overwrite(w: Window, warp: int, target: Cta, low: int, high: int) -> None:
    """A finding when a warp issues a copy to bytes that another one may still read, or that anything may still write."""
    trace, clocks = target.trace, target.cluster.clocks
    row = clocks.row(w.cta, warp)
    part = slice(low // WORD, -(-high // WORD))
    for reader, times in reads(target, part):
        if reader != row and int(times[part].max()) > clocks.now[row, reader]:
            message = f"an asynchronous copy overwrites shared memory that {clocks.name(reader)} may still read: nothing orders the two"
            w.cta.report(w, "race", message)
            return
    writer = trace.writer[part]
    late = clocks.now[row].take(writer) < trace.written[part]
    if np.count_nonzero(late):
        late &= writer != row
        if np.count_nonzero(late):
            report(w, "an asynchronous copy overwrites", target, clocks, part.start + int(np.flatnonzero(late)[0]))


def copy_async(w: Window, pattern: SharedPattern, nbytes: int) -> None:
    """Lanes issue cp.async copies to their CTA's shared memory: stores that are done when the warp has waited for them."""
    cta = w.cta
    clocks = cta.cluster.clocks
    warps = w.lane_warps
    words = pattern.words(nbytes)
    row = (cta.rank * clocks.warps + warps)[:, None]
    late = unknown_writers(cta, clocks, words, row)
    if late is not None:
        late &= cta.trace.writer.take(words) != clocks.own_copier(0) + row
        if np.count_nonzero(late):
            report(w, "a cp.async overwrites", cta, clocks, int(words[late][0]))
    check_readers(w, cta, clocks, words, row, False)
    origin = cta.machine.origin(w)
    for warp in w.warps:
        own = clocks.own_copier(clocks.row(cta, warp))
        clocks.issue(own)
        cta.cluster.copies[own] = origin
    column = clocks.own_copier(0) + row
    cta.trace.store(words, column, clocks.issued[column], origin.line)


def operand_words(where: Operand) -> np.ndarray:
    """The words of an operand, ascending."""
    words = where.words
    if words is None:
        words = where.words = (where.touched[:, None] * 4 + np.arange(4)).reshape(-1)
    return words

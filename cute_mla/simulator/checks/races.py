"""Races on shared memory: accesses that nothing orders after an earlier one of another agent.

Each 32-bit word remembers its last writer (a warp, its cp.async copies, or the copies of an mbarrier) with the writer's time, and for each
warp the time of its last read (state/shared_trace.py). The clocks (state/clocks.py) give what a warp knows of these times. Ordinary stores
reach tensor cores and bulk copies only through fence.proxy.async, by the writer before it arrives or by the reader after it has waited;
the clocks keep a second time for that.

Left out: stores that leave the same value, atomic operations among themselves, the lanes of one warp, and the reserved shared memory below
a kernel's own, where the code that ptxas makes of an allocation looks at words that other warps change.
"""

from __future__ import annotations

import numpy as np

from ..findings import Fault
from ..frontend.layout import SHARED_BASE
from ..numerics.wgmma import Operand
from ..state.access import WORD, SharedPattern
from ..state.clocks import Clocks
from ..state.cta import Cta
from ..state.shared_trace import WHOLE
from ..state.window import Window

OWN_WORDS = SHARED_BASE // WORD


class Overwrite:
    """Words that a store overwrites, though nothing orders the store after their writers: a race unless it leaves the same values."""

    def __init__(self, target: Cta, words: np.ndarray, rows: np.ndarray, writers: np.ndarray) -> None:
        self.target = target
        self.words = words
        self.rows = rows
        self.writers = writers
        self.lines = target.trace.line[words]
        self.before = target.smem.views[WORD].take(words)

    def check(self, w: Window) -> None:
        """Report a race when the store has changed something."""
        changed = self.target.smem.views[WORD].take(self.words) != self.before
        if np.count_nonzero(changed):
            self.fail(w, int(np.flatnonzero(changed)[0]))

    def fail(self, w: Window, place: int = 0) -> None:
        """Report a race on one of the words (place: its position among them)."""
        clocks = self.target.cluster.clocks
        who, line = clocks.name(int(self.rows[place])), int(self.lines[place])
        what = f"{clocks.name(int(self.writers[place]))} writes{f' (PTX line {line})' if line else ''}"
        where = f"shared memory at {int(self.words[place]) * WORD:#x}"
        w.report("race", f"a store of {who} overwrites {where} that {what}: nothing orders the two")


def access(w: Window, target: Cta, index: np.ndarray | None, pattern: SharedPattern, nbytes: int, write: bool) -> Overwrite | None:
    """Check and record accesses by lanes (index: positions in the window, None for all): as accesses()."""
    return accesses(w, target, w.lane_warps if index is None else w.lane_warps[index], pattern, nbytes, write)


def accesses(w: Window, target: Cta, warps: np.ndarray, pattern: SharedPattern, nbytes: int, write: bool) -> Overwrite | None:
    """Check and record accesses of nbytes each to target's shared memory. warps: the warp of each access.

    Call it before the stores happen. Report races. Return what must be checked when the stores have happened, None for nothing.
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
        record(target, words, row, time, w.line(), masks)
        return found
    if late is not None and int(words[late][0]) >= OWN_WORDS:
        report(w, "a load reads", target, clocks, int(words[late][0]))
    if target is w.cta and not isinstance(row, int):
        target.trace.note_reads(warps, words, time, pattern.distinct(nbytes))
    else:
        note_reads(w, target, words, row, time)
    target.trace.narrow_reads |= masks is not None
    return None


def record(target: Cta, words: np.ndarray, row: np.ndarray | int, time: np.ndarray | int, line: int, masks: np.ndarray | None) -> None:
    """Record that words are written by warps, or by copies of theirs."""
    if masks is None:
        target.trace.store(words, row, time, line)
    else:
        target.trace.store_parts(words, row, time, line, masks)


def unknown_writers(
    target: Cta, clocks: Clocks, words: np.ndarray, row: np.ndarray | int, masks: np.ndarray | None = None
) -> np.ndarray | None:
    """Find the words last written by another agent that their warps do not know to be done; None for none."""
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
    """Report a store over bytes that a copy still writes. Return the words to be checked when the store has happened."""
    where = words[late]
    writers = target.trace.writer.take(where)
    clocks = target.cluster.clocks
    copies = writers >= clocks.rows
    if np.count_nonzero(copies):
        report(w, "a store overwrites", target, clocks, int(where[copies][0]))
        return None
    return Overwrite(target, where, np.broadcast_to(row, words.shape)[late], writers)


def note_reads(w: Window, target: Cta, words: np.ndarray, row: np.ndarray | int, time: int) -> None:
    """Record that one warp has read words of its CTA, or warps have read words of another CTA."""
    trace = target.trace
    if target is not w.cta:
        for reader in np.unique(row):
            times = trace.far.setdefault(int(reader), np.zeros(len(trace.writer), np.int32))
            part = words if isinstance(row, int) else words[row[:, 0] == reader]
            times[part] = target.cluster.clocks.now[reader, reader] + 1
    else:
        trace.note_read(w.warps[0], words, int(time))


def check_readers(w: Window, target: Cta, clocks: Clocks, words: np.ndarray, row: np.ndarray | int, narrow: bool) -> None:
    """Report when lanes store where another warp may still read."""
    trace = target.trace
    if narrow and trace.narrow_reads:
        return  # other bytes of the word, perhaps
    for reader, times in reads(target, words):
        known = clocks.now[row, reader]
        late = (times.take(words) > known) & (np.asarray(row) != reader)
        if np.count_nonzero(late):
            place = tuple(int(part) for part in np.argwhere(late)[0])
            if int(words[place]) < OWN_WORDS:
                return
            who = clocks.name(int(np.broadcast_to(row, words.shape)[place]))
            where = f"shared memory at {int(words[place]) * WORD:#x}"
            message = f"a store of {who} overwrites {where} that {clocks.name(reader)} may still read: nothing orders the two"
            w.report("race", message)
            return


def reads(target: Cta, words: np.ndarray | slice) -> list[tuple[int, np.ndarray]]:
    """Return who may have read some of these words since they were written: row, and the times of its reads of all words."""
    trace, clocks = target.trace, target.cluster.clocks
    mask = int(np.bitwise_or.reduce(trace.readers[words], axis=None))
    found = list(trace.far.items()) if trace.far else []
    warp = 0
    while mask:
        if mask & 1:
            found.append((clocks.row(target.rank, warp), trace.read[warp]))
        mask >>= 1
        warp += 1
    return found


def report(w: Window, what: str, target: Cta, clocks: Clocks, word: int) -> None:
    """Report an access to a word whose last writer may come later."""
    trace = target.trace
    column, line = int(trace.writer[word]), int(trace.line[word])
    place = f" (PTX line {line})" if line else ""
    if clocks.is_copier(column):
        message = f"{what} shared memory at {word * WORD:#x} that {clocks.name(column)}{place} writes, without a wait for it"
        w.report("missing_wait", message)
    else:
        message = f"{what} shared memory at {word * WORD:#x} that {clocks.name(column)} writes{place}: nothing orders the two"
        w.report("race", message)


def check_source(w: Window, target: Cta, words: np.ndarray, what: str, warp: int) -> None:
    """Report when asynchronous work that a warp issues reads words (1-d) whose writers it does not know to be done, or not fenced.

    Raises Fault for words behind the end of shared memory.
    """
    trace, clocks = target.trace, target.cluster.clocks
    if int(words[-1]) * WORD >= target.smem.nbytes:
        end = (int(words[-1]) + 1) * WORD
        raise Fault("out_of_bounds", f"{what} reads up to {end:#x}, beyond the CTA's shared memory of {target.smem.nbytes:#x}")
    row = clocks.row(w.cta.rank, warp)
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
    w.report("missing_fence", f"{what} reads shared memory at {word * WORD:#x} behind {store} without fence.proxy.async between")


def check_range(w: Window, source: tuple[int, int], what: str, warp: int) -> None:
    """Check bytes [start, stop) of the warp's own CTA: as check_source()."""
    check_source(w, w.cta, np.arange(source[0] // WORD, -(-source[1] // WORD)), what, warp)


def check_overwrite(w: Window, warp: int, target: Cta, low: int, high: int) -> None:
    """Report when a warp issues a copy to bytes that another warp may still read, or that any agent may still write."""
    trace, clocks = target.trace, target.cluster.clocks
    row = clocks.row(w.cta.rank, warp)
    part = slice(low // WORD, -(-high // WORD))
    for reader, times in reads(target, part):
        if reader != row and int(times[part].max()) > clocks.now[row, reader]:
            message = f"an asynchronous copy overwrites shared memory that {clocks.name(reader)} may still read: nothing orders the two"
            w.report("race", message)
            return
    writer = trace.writer[part]
    late = clocks.now[row].take(writer) < trace.written[part]
    if np.count_nonzero(late):
        late &= writer != row
        if np.count_nonzero(late):
            report(w, "an asynchronous copy overwrites", target, clocks, part.start + int(np.flatnonzero(late)[0]))


def copy_async(w: Window, pattern: SharedPattern, nbytes: int) -> None:
    """Check and record cp.async copies to the CTA's shared memory: stores that are done when their warp has waited for them."""
    cta = w.cta
    clocks = cta.cluster.clocks
    words = pattern.words(nbytes)
    row = (cta.rank * clocks.warps + w.lane_warps)[:, None]
    late = unknown_writers(cta, clocks, words, row)
    if late is not None:
        late &= cta.trace.writer.take(words) != clocks.own_copier(0) + row
        if np.count_nonzero(late):
            report(w, "a cp.async overwrites", cta, clocks, int(words[late][0]))
    check_readers(w, cta, clocks, words, row, False)
    origin = w.origin()
    for warp in w.warps:
        own = clocks.own_copier(clocks.row(cta.rank, warp))
        clocks.issue(own)
        cta.cluster.copies[own] = origin
    column = clocks.own_copier(0) + row
    cta.trace.store(words, column, clocks.issued[column], origin.line)


def operand_words(where: Operand) -> np.ndarray:
    """Return the words of an operand, ascending; cached in the operand."""
    words = where.words
    if words is None:
        words = where.words = (where.touched[:, None] * 4 + np.arange(4)).reshape(-1)
    return words

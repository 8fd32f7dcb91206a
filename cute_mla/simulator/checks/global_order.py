"""Order of accesses to global memory: among the warps of a launch, and after the grid ahead of it.

Of each buffer that a launch writes, every unit (4, 2 or 1 bytes, as narrow as its accesses are) remembers its last writer and its last
reader since. Warps of one cluster are ordered by their clocks (order.py); warps of different clusters by what both have executed since that
may hand over through memory. Left out: reads before the first write to a buffer, and what TMA moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..state.registers import WARP

if TYPE_CHECKING:
    from ..engine.machine import Machine
    from ..state.cta import Cta
    from ..state.memory import Buffer
    from ..state.registers import Window


class GlobalTrace:
    """What happened last to each unit of a buffer. writer, reader: agents (0: none); written, read: their times.

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
        """The units that accesses of nbytes touch: (accesses, units)."""
        if nbytes < self.unit:
            self.refine(nbytes)
        first = (addresses - np.uint64(self.buffer.address)).astype(np.int64) // self.unit
        return first[:, None] + np.arange(nbytes // self.unit)


class EventLog:
    """What clusters of a launch know of each other. strong: by cluster, when it last executed an atomic operation or a strong access."""

    def __init__(self) -> None:
        self.now = 0
        self.strong: dict[int, int] = {}
        self.traces: dict[int, GlobalTrace] = {}

    def through_memory(self, cluster: int) -> None:
        """A cluster executes an atomic operation, a strong load or store."""
        self.now += 1
        self.strong[cluster] = self.now


def check_grid(w: Window, warps: Sequence[int]) -> None:
    """A finding when warps access global memory that the grid ahead of this one may still write or read."""
    cta = w.cta
    clocks = cta.cluster.clocks
    if cta.machine.launch.dependent and not clocks.least(cta, warps, clocks.before):
        message = "global memory is accessed before griddepcontrol.wait: the grid ahead of this launch may still be running"
        cta.report(w, "missing_wait", message)


def wait_for_grid(cta: Cta, warps: Sequence[int]) -> None:
    """griddepcontrol.wait"""
    clocks = cta.cluster.clocks
    clocks.note(cta, warps, clocks.before, 1)


def trace_of(machine: Machine, addresses: np.ndarray, nbytes: int, make: bool) -> GlobalTrace | None:
    """The trace of the buffer that all addresses lie in; None where they lie in several, or (unless it is to be made) it has none."""
    traces = machine.events.traces
    if not (traces or make):
        return None
    buffer = machine.memory.find(int(addresses.min()), int(addresses.max()) + nbytes)
    if buffer is None:
        return None
    trace = traces.get(buffer.address)
    if trace is None and make:
        trace = traces[buffer.address] = GlobalTrace(buffer, min(nbytes & -nbytes, 4))
    return trace


def agents(w: Window) -> np.ndarray:
    """Who the lanes of a window are, over all clusters of the launch: (lanes, 1)."""
    clocks = w.cta.cluster.clocks
    return np.asarray(1 + w.cta.cluster.number * clocks.rows + w.cta.rank * clocks.warps + w.lanes // WARP)[:, None]


def unordered(w: Window, mine: np.ndarray, other: np.ndarray, time: np.ndarray, event: np.ndarray) -> np.ndarray:
    """Where accesses of other agents (at their times, behind so many events) are not known to be done by those that access now."""
    late = (other != mine) & (other > 0)
    if not np.count_nonzero(late):
        return late
    cluster, clocks, log = w.cta.cluster, w.cta.cluster.clocks, w.cta.machine.events
    number, row = np.divmod(other - 1, clocks.rows)
    near = number == cluster.number
    known = clocks.now[np.broadcast_to((mine - 1) % clocks.rows, other.shape), row] >= time
    strong = np.array([log.strong.get(index, 0) for index in range(int(number.max()) + 1)])
    handed = (strong[number] > event) & (log.strong.get(cluster.number, 0) > event)
    return np.asarray(late & ~np.where(near, known, handed))


def read(w: Window, addresses: np.ndarray, nbytes: int) -> None:
    """Lanes load nbytes each."""
    check_grid(w, w.warps)
    trace = trace_of(w.cta.machine, addresses, nbytes, False)
    if trace is None:
        return
    units, mine = trace.units(addresses, nbytes), agents(w)
    late = unordered(w, mine, trace.writer[units], trace.written[units], trace.event[units])
    if np.count_nonzero(late):
        report(w, "a load reads", trace, int(units[late][0]))
    trace.reader[units] = mine
    trace.read[units] = own_times(w)


def own_times(w: Window) -> np.ndarray:
    """The time of each lane's warp: (lanes, 1)."""
    clocks = w.cta.cluster.clocks
    rows = w.cta.rank * clocks.warps + w.lanes // WARP
    return (clocks.now[rows, rows] + 1)[:, None]


class Overwrite:
    """Units that a store overwrites though nothing orders it after their writers: a race unless it leaves the same values."""

    def __init__(self, trace: GlobalTrace, units: np.ndarray) -> None:
        self.trace = trace
        self.units = units
        self.lines = trace.line[units]
        self.before = self.values()

    def values(self) -> np.ndarray:
        """The bytes as they are."""
        where = self.units[:, None] * self.trace.unit + np.arange(self.trace.unit)
        return self.trace.buffer.data[np.minimum(where, self.trace.buffer.nbytes - 1)]

    def check(self, w: Window) -> None:
        """A finding when the store has changed something."""
        changed = (self.values() != self.before).any(axis=1)
        if np.count_nonzero(changed):
            first = int(np.flatnonzero(changed)[0])
            where = w.cta.machine.memory.describe(self.trace.buffer.address + int(self.units[first]) * self.trace.unit)
            message = f"a store overwrites {where}, that another warp writes (PTX line {self.lines[first]}): nothing orders the two"
            w.cta.report(w, "race", message)


def write(w: Window, addresses: np.ndarray, nbytes: int) -> Overwrite | None:
    """Lanes are about to store nbytes each. Returns what must be checked when they have, if anything."""
    check_grid(w, w.warps)
    trace = trace_of(w.cta.machine, addresses, nbytes, True)
    if trace is None:
        return None
    units, mine = trace.units(addresses, nbytes), agents(w)
    found = None
    late = unordered(w, mine, trace.writer[units], trace.written[units], trace.event[units])
    if np.count_nonzero(late):
        found = Overwrite(trace, units[late])
    late = unordered(w, mine, trace.reader[units], trace.read[units], trace.event[units])
    if np.count_nonzero(late):
        report(w, "a store overwrites what another warp reads:", trace, int(units[late][0]))
    trace.writer[units], trace.written[units] = mine, own_times(w)
    trace.event[units], trace.line[units] = w.cta.machine.events.now, w.cta.machine.line_of_caller()
    trace.reader[units] = 0
    return found


def report(w: Window, what: str, trace: GlobalTrace, unit: int) -> None:
    """The finding about a unit."""
    where = w.cta.machine.memory.describe(trace.buffer.address + unit * trace.unit)
    w.cta.report(w, "race", f"{what} {where}, that another warp writes (PTX line {trace.line[unit]}): nothing orders the two")

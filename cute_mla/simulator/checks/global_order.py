"""Order of accesses to global memory: among the warps of a launch, and after the grid ahead of it.

Of each buffer that a launch writes, every unit (4, 2 or 1 bytes, as narrow as its accesses are) remembers its last writer and its last
reader since. Warps of one cluster are ordered by their clocks (order.py); warps of different clusters by what both have executed since that
may hand over through memory. Left out: reads before the first write to a buffer, and what TMA moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..engine.machine import Machine
    from ..state.access import GlobalAccess
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

    def units(self, access: GlobalAccess) -> np.ndarray:
        """The units that accesses touch: (accesses, units)."""
        first = (access.low - self.buffer.address) // self.unit
        return first + access.pattern.index(self.unit, access.nbytes // self.unit)

    def take(self, access: GlobalAccess, values: np.ndarray) -> np.ndarray:
        """What an array of the trace says of the units that accesses touch."""
        return access.take(values, self.buffer.address, self.unit, access.nbytes // self.unit)

    def put(self, access: GlobalAccess, values: np.ndarray, new: np.ndarray | int) -> None:
        """Note something of these units."""
        access.put(values, self.buffer.address, self.unit, access.nbytes // self.unit, new)


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


def trace_of(machine: Machine, access: GlobalAccess, make: bool) -> GlobalTrace | None:
    """The trace of the buffer that all accesses lie in; None where they lie in several, or (unless it is to be made) it has none."""
    traces = machine.events.traces
    if not (traces or make):
        return None
    buffer = machine.memory.find(access.low, access.high)
    if buffer is None:
        return None
    trace = traces.get(buffer.address)
    if trace is None and make:
        trace = traces[buffer.address] = GlobalTrace(buffer, min(access.nbytes & -access.nbytes, 4))
    if trace is not None and access.nbytes < trace.unit:
        trace.refine(access.nbytes)
    return trace


def agents(w: Window) -> np.ndarray:
    """Who the lanes of a window are, over all clusters of the launch: (lanes, 1)."""
    clocks = w.cta.cluster.clocks
    return np.asarray(1 + w.cta.cluster.number * clocks.rows + w.cta.rank * clocks.warps + w.lane_warps)[:, None]


def unordered(
    w: Window, mine: np.ndarray, access: GlobalAccess, trace: GlobalTrace, who: np.ndarray, when: np.ndarray
) -> np.ndarray | None:
    """Where earlier accesses of other agents are not known to be done by those that access now, or None.

    who, when: arrays of the trace.
    """
    other = trace.take(access, who)
    late = (other != mine) & (other > 0)
    if not np.count_nonzero(late):
        return None
    time, event = trace.take(access, when), trace.take(access, trace.event)
    cluster, clocks, log = w.cta.cluster, w.cta.cluster.clocks, w.cta.machine.events
    number, row = np.divmod(other - 1, clocks.rows)
    near = number == cluster.number
    known = clocks.now[np.broadcast_to((mine - 1) % clocks.rows, other.shape), row] >= time
    strong = np.array([log.strong.get(index, 0) for index in range(int(number.max()) + 1)])
    handed = (strong[number] > event) & (log.strong.get(cluster.number, 0) > event)
    late &= ~np.where(near, known, handed)
    return late if np.count_nonzero(late) else None


def read(w: Window, access: GlobalAccess) -> None:
    """Lanes load."""
    check_grid(w, w.warps)
    trace = trace_of(w.cta.machine, access, False)
    if trace is None:
        return
    mine = agents(w)
    late = unordered(w, mine, access, trace, trace.writer, trace.written)
    if late is not None:
        report(w, "a load reads", trace, int(trace.units(access)[late][0]))
    trace.put(access, trace.reader, mine)
    trace.put(access, trace.read, own_times(w))


def own_times(w: Window) -> np.ndarray:
    """The time of each lane's warp: (lanes, 1)."""
    clocks = w.cta.cluster.clocks
    rows = w.cta.rank * clocks.warps + w.lane_warps
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


def write(w: Window, access: GlobalAccess) -> Overwrite | None:
    """Lanes are about to store. Returns what must be checked when they have, if anything."""
    check_grid(w, w.warps)
    trace = trace_of(w.cta.machine, access, True)
    if trace is None:
        return None
    mine = agents(w)
    found = None
    late = unordered(w, mine, access, trace, trace.writer, trace.written)
    if late is not None:
        found = Overwrite(trace, trace.units(access)[late])
    late = unordered(w, mine, access, trace, trace.reader, trace.read)
    if late is not None:
        report(w, "a store overwrites what another warp reads:", trace, int(trace.units(access)[late][0]))
    trace.put(access, trace.writer, mine)
    trace.put(access, trace.written, own_times(w))
    trace.put(access, trace.event, w.cta.machine.events.now)
    trace.put(access, trace.line, w.cta.machine.line_of_caller())
    trace.put(access, trace.reader, 0)
    return found


def report(w: Window, what: str, trace: GlobalTrace, unit: int) -> None:
    """The finding about a unit."""
    where = w.cta.machine.memory.describe(trace.buffer.address + unit * trace.unit)
    w.cta.report(w, "race", f"{what} {where}, that another warp writes (PTX line {trace.line[unit]}): nothing orders the two")

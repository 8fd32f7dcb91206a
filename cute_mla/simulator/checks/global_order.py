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
    """What happened last to each unit of a buffer. stores, loads: numbers of accesses in the launch's log, 0 for none.

    A store makes its units forget who has read them; is_read: whether any load has been noted.
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
    """The accesses of a launch to memory that it writes, one entry for each warp, and what its clusters know of each other.

    agent: the warp (0 for entry 0, which stands for none). time: of that warp. event: how many events came before. line: PTX line.
    strong: by cluster, when it last executed an atomic operation or a strong access.
    """

    def __init__(self) -> None:
        self.now = 0
        self.strong: dict[int, int] = {}
        self.traces: dict[int, GlobalTrace] = {}
        self.length = 1
        self.agent, self.time, self.event, self.line = (np.zeros(1024, np.int64) for _ in range(4))

    def through_memory(self, cluster: int) -> None:
        """A cluster executes an atomic operation, a strong load or store."""
        self.now += 1
        self.strong[cluster] = self.now

    def add(self, w: Window, line: int) -> np.ndarray:
        """Enter an access by the warps of a window. Returns the entry of each lane: (lanes, 1), or (1, 1) for a single warp."""
        start, stop = self.length, self.length + len(w.warps)
        if stop > len(self.agent):
            for name in ("agent", "time", "event", "line"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        cluster, clocks = w.cta.cluster, w.cta.cluster.clocks
        first = w.cta.rank * clocks.warps
        for entry, warp in enumerate(w.warps, start):
            self.agent[entry] = 1 + cluster.number * clocks.rows + first + warp
            self.time[entry] = clocks.now[first + warp, first + warp] + 1
        self.event[start:stop] = self.now
        self.line[start:stop] = line
        self.length = stop
        return start + w.warp_positions


def check_grid(w: Window, warps: tuple[int, ...]) -> None:
    """A finding when warps access global memory that the grid ahead of this one may still write or read."""
    cta = w.cta
    clocks = cta.cluster.clocks
    if not cta.machine.launch.dependent or (cta.rank, warps) in clocks.behind_grid:
        return
    if clocks.least(cta, warps, clocks.before):
        clocks.behind_grid.add((cta.rank, warps))
    else:
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


def unordered(w: Window, access: GlobalAccess, trace: GlobalTrace, marks: np.ndarray) -> np.ndarray | None:
    """Where earlier accesses of other agents are not known to be done by those that access now, or None. marks: stores or loads."""
    entries = trace.take(access, marks)
    if not np.count_nonzero(entries):
        return None
    log, mine = w.cta.machine.events, agents(w)
    other = log.agent.take(entries)
    late = (other != mine) & (other > 0)
    if not np.count_nonzero(late):
        return None
    time, event = log.time.take(entries), log.event.take(trace.take(access, trace.stores))
    cluster, clocks = w.cta.cluster, w.cta.cluster.clocks
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
    late = unordered(w, access, trace, trace.stores)
    if late is not None:
        report(w, "a load reads", trace, int(trace.units(access)[late][0]))
    trace.put(access, trace.loads, w.cta.machine.events.add(w, 0))
    trace.is_read = True


class Overwrite:
    """Units that a store overwrites though nothing orders it after their writers: a race unless it leaves the same values."""

    def __init__(self, trace: GlobalTrace, units: np.ndarray, lines: np.ndarray) -> None:
        self.trace = trace
        self.units = units
        self.lines = lines
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
    machine = w.cta.machine
    trace = trace_of(machine, access, True)
    if trace is None:
        return None
    found = None
    late = unordered(w, access, trace, trace.stores)
    if late is not None:
        units = trace.units(access)[late]
        found = Overwrite(trace, units, machine.events.line[trace.stores[units]])
    if trace.is_read:
        late = unordered(w, access, trace, trace.loads)
        if late is not None:
            report(w, "a store overwrites what another warp reads:", trace, int(trace.units(access)[late][0]))
        trace.put(access, trace.loads, 0)
    trace.put(access, trace.stores, machine.events.add(w, machine.line_of_caller()))
    return found


def report(w: Window, what: str, trace: GlobalTrace, unit: int) -> None:
    """The finding about a unit."""
    where = w.cta.machine.memory.describe(trace.buffer.address + unit * trace.unit)
    line = w.cta.machine.events.line[trace.stores[unit]]
    w.cta.report(w, "race", f"{what} {where}, that another warp writes (PTX line {line}): nothing orders the two")

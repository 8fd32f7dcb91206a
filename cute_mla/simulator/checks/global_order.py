"""Order of accesses to global memory: among the warps of a launch, and after the grid ahead of it.

Each unit (4, 2 or 1 bytes, as narrow as its accesses) of a buffer that a launch writes remembers its last writer and its last reader since
(state/global_trace.py). Warps of one cluster are ordered by their clocks. Warps of different clusters are ordered by the atomic operations
and strong accesses that both have executed since. Left out: reads before the first write to a buffer, and accesses by TMA.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..state.cta import Cta
from ..state.engine_protocol import Engine
from ..state.global_trace import GlobalTrace
from ..state.registers import WARP
from ..state.window import Window


def check_grid(w: Window, warps: Sequence[int]) -> None:
    """Report when warps access global memory that the grid ahead of this one may still write or read."""
    cta = w.cta
    clocks = cta.cluster.clocks
    if w.engine.dependent and not clocks.least(cta.rank, warps, clocks.before):
        message = "global memory is accessed before griddepcontrol.wait: the grid ahead of this launch may still be running"
        w.report("missing_wait", message)


def wait_for_grid(cta: Cta, warps: Sequence[int]) -> None:
    """Record that warps know the grid ahead to be complete (griddepcontrol.wait)."""
    clocks = cta.cluster.clocks
    clocks.note(cta.rank, warps, clocks.before, 1)


def trace_of(engine: Engine, addresses: np.ndarray, nbytes: int, make: bool) -> GlobalTrace | None:
    """Return the trace of the buffer that holds all addresses; None where they lie in several, or it has none and make is false."""
    traces = engine.events.traces
    if not (traces or make):
        return None
    buffer = engine.memory.find(int(addresses.min()), int(addresses.max()) + nbytes)
    if buffer is None:
        return None
    trace = traces.get(buffer.address)
    if trace is None and make:
        trace = traces[buffer.address] = GlobalTrace(buffer, min(nbytes & -nbytes, 4))
    return trace


def agents(w: Window) -> np.ndarray:
    """Return the agents of the lanes of a window, numbered over all clusters of the launch from 1, shape (lanes, 1)."""
    clocks = w.cta.cluster.clocks
    return np.asarray(1 + w.cta.cluster.number * clocks.rows + w.cta.rank * clocks.warps + w.lanes // WARP)[:, None]


def unordered(w: Window, mine: np.ndarray, other: np.ndarray, time: np.ndarray, event: np.ndarray) -> np.ndarray:
    """Find earlier accesses of other agents (time, event: when) that the agents that access now (mine) do not know to be done."""
    late = (other != mine) & (other > 0)
    if not np.count_nonzero(late):
        return late
    cluster, clocks, log = w.cta.cluster, w.cta.cluster.clocks, w.engine.events
    number, row = np.divmod(other - 1, clocks.rows)
    near = number == cluster.number
    known = clocks.now[np.broadcast_to((mine - 1) % clocks.rows, other.shape), row] >= time
    strong = np.array([log.strong.get(index, 0) for index in range(int(number.max()) + 1)])
    handed = (strong[number] > event) & (log.strong.get(cluster.number, 0) > event)
    return np.asarray(late & ~np.where(near, known, handed))


def read(w: Window, addresses: np.ndarray, nbytes: int) -> None:
    """Check and record loads of nbytes by each lane."""
    check_grid(w, w.warps)
    trace = trace_of(w.engine, addresses, nbytes, False)
    if trace is None:
        return
    units, mine = trace.units(addresses, nbytes), agents(w)
    late = unordered(w, mine, trace.writer[units], trace.written[units], trace.event[units])
    if np.count_nonzero(late):
        report(w, "a load reads", trace, int(units[late][0]))
    trace.reader[units] = mine
    trace.read[units] = own_times(w)


def own_times(w: Window) -> np.ndarray:
    """Return the time of each lane's warp, shape (lanes, 1)."""
    clocks = w.cta.cluster.clocks
    rows = w.cta.rank * clocks.warps + w.lanes // WARP
    return (clocks.now[rows, rows] + 1)[:, None]


class Overwrite:
    """Units that a store overwrites, though nothing orders the store after their writers: a race unless it leaves the same values."""

    def __init__(self, trace: GlobalTrace, units: np.ndarray) -> None:
        self.trace = trace
        self.units = units
        self.lines = trace.line[units]
        self.before = self.values()

    def values(self) -> np.ndarray:
        """Return the bytes of the units as they are, shape (units, bytes)."""
        where = self.units[:, None] * self.trace.unit + np.arange(self.trace.unit)
        return self.trace.buffer.data[np.minimum(where, self.trace.buffer.nbytes - 1)]

    def check(self, w: Window) -> None:
        """Report a race when the store has changed something."""
        changed = (self.values() != self.before).any(axis=1)
        if np.count_nonzero(changed):
            first = int(np.flatnonzero(changed)[0])
            where = w.engine.memory.describe(self.trace.buffer.address + int(self.units[first]) * self.trace.unit)
            message = f"a store overwrites {where}, that another warp writes (PTX line {self.lines[first]}): nothing orders the two"
            w.report("race", message)


def write(w: Window, addresses: np.ndarray, nbytes: int) -> Overwrite | None:
    """Check and record stores of nbytes by each lane, before they happen. Return what must be checked afterwards, None for nothing."""
    check_grid(w, w.warps)
    trace = trace_of(w.engine, addresses, nbytes, True)
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
    trace.event[units], trace.line[units] = w.engine.events.now, w.line()
    trace.reader[units] = 0
    return found


def report(w: Window, what: str, trace: GlobalTrace, unit: int) -> None:
    """Report a race on a unit."""
    where = w.engine.memory.describe(trace.buffer.address + unit * trace.unit)
    w.report("race", f"{what} {where}, that another warp writes (PTX line {trace.line[unit]}): nothing orders the two")

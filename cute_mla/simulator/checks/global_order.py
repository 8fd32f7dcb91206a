"""Order of accesses to global memory: among the warps of a launch, and after the grid ahead of it.

Each unit (4, 2 or 1 bytes, as narrow as its accesses) of a buffer that a launch writes remembers its last writer and its last reader since
(state/global_trace.py). Warps of one cluster are ordered by their clocks. Warps of different clusters are ordered by the atomic operations
and strong accesses that both have executed since. Left out: reads before the first write to a buffer, and accesses by TMA.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..state.access import GlobalAccess
from ..state.cta import Cta
from ..state.engine_protocol import Engine
from ..state.global_trace import GlobalTrace, SparseEntries
from ..state.window import Window


def check_grid(w: Window, warps: tuple[int, ...]) -> None:
    """Report when warps access global memory that the grid ahead of this one may still write or read."""
    cta = w.cta
    clocks = cta.cluster.clocks
    if not w.engine.dependent or (cta.rank, warps) in clocks.behind_grid:
        return
    if clocks.least(cta.rank, warps, clocks.before):
        clocks.behind_grid.add((cta.rank, warps))
        return
    message = "global memory is accessed before griddepcontrol.wait: the grid ahead of this launch may still be running"
    w.report("missing_wait", message)


def wait_for_grid(cta: Cta, warps: Sequence[int]) -> None:
    """Record that warps know the grid ahead to be complete (griddepcontrol.wait)."""
    clocks = cta.cluster.clocks
    clocks.note(cta.rank, warps, clocks.before, 1)


def trace_of(engine: Engine, access: GlobalAccess, make: bool) -> GlobalTrace | None:
    """Return the trace of the buffer that holds all accesses; None where they lie in several, or it has none and make is false."""
    traces = engine.events.traces
    if not (traces or make):
        return None
    buffer = engine.memory.find(access.low, access.high)
    if buffer is None:
        return None
    trace = traces.get(buffer.address)
    if trace is None and make:
        trace = traces[buffer.address] = GlobalTrace(buffer, min(access.nbytes & -access.nbytes, 4))
    if trace is not None and access.nbytes < trace.unit:
        trace.refine(access.nbytes)
    return trace


def agents(w: Window) -> np.ndarray:
    """Return the agents of the lanes of a window, numbered over all clusters of the launch from 1, shape (lanes, 1)."""
    clocks = w.cta.cluster.clocks
    return np.asarray(1 + w.cta.cluster.number * clocks.rows + w.cta.rank * clocks.warps + w.lane_warps)[:, None]


def unordered(w: Window, access: GlobalAccess, trace: GlobalTrace, entries: np.ndarray | SparseEntries) -> np.ndarray | None:
    """Find earlier accesses of other agents that the agents that access now do not know to be done; None for none.

    entries: the trace's stores or loads. Return a mask of the units that are accessed, shape (accesses, units).
    """
    earlier = trace.take(access, entries)
    if not np.count_nonzero(earlier):
        return None
    log, mine = w.engine.events, agents(w)
    other = log.agent.take(earlier)
    late = (other != mine) & (other > 0)
    if not np.count_nonzero(late):
        return None
    time, event = log.time.take(earlier), log.event.take(trace.take(access, trace.stores))
    cluster, clocks = w.cta.cluster, w.cta.cluster.clocks
    number, row = np.divmod(other - 1, clocks.rows)
    near = number == cluster.number
    known = clocks.now[np.broadcast_to((mine - 1) % clocks.rows, other.shape), row] >= time
    strong = np.array([log.strong.get(index, 0) for index in range(int(number.max()) + 1)])
    handed = (strong[number] > event) & (log.strong.get(cluster.number, 0) > event)
    late &= ~np.where(near, known, handed)
    return late if np.count_nonzero(late) else None


def enter(w: Window, line: int) -> np.ndarray:
    """Enter an access by the warps of a window in the log. Return the entry of each lane, shape (lanes, 1), or (1, 1) for a single warp."""
    cluster, clocks = w.cta.cluster, w.cta.cluster.clocks
    first = w.cta.rank * clocks.warps
    base = 1 + cluster.number * clocks.rows + first
    times = [int(clocks.diagonal[first + warp]) + 1 for warp in w.warps]
    return np.asarray(w.engine.events.add([base + warp for warp in w.warps], times, line) + w.warp_positions)


def read(w: Window, access: GlobalAccess) -> None:
    """Check and record loads."""
    check_grid(w, w.warps)
    trace = trace_of(w.engine, access, False)
    if trace is None:
        return
    late = unordered(w, access, trace, trace.stores)
    if late is not None:
        report(w, "a load reads", trace, int(trace.units(access)[late][0]))
    trace.put(access, trace.loads, enter(w, 0))
    trace.is_read = True


class Overwrite:
    """Units that a store overwrites, though nothing orders the store after their writers: a race unless it leaves the same values."""

    def __init__(self, trace: GlobalTrace, units: np.ndarray, lines: np.ndarray) -> None:
        self.trace = trace
        self.units = units
        self.lines = lines
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


def write(w: Window, access: GlobalAccess) -> Overwrite | None:
    """Check and record stores, before they happen. Return what must be checked afterwards, None for nothing."""
    check_grid(w, w.warps)
    log = w.engine.events
    trace = trace_of(w.engine, access, True)
    if trace is None:
        return None
    found = None
    late = unordered(w, access, trace, trace.stores)
    if late is not None:
        units = trace.units(access)[late]
        found = Overwrite(trace, units, log.line[trace.stores[units]])
    if trace.is_read:
        late = unordered(w, access, trace, trace.loads)
        if late is not None:
            report(w, "a store overwrites what another warp reads:", trace, int(trace.units(access)[late][0]))
        trace.put(access, trace.loads, 0)
    trace.put(access, trace.stores, enter(w, w.line()))
    return found


def report(w: Window, what: str, trace: GlobalTrace, unit: int) -> None:
    """Report a race on a unit."""
    where = w.engine.memory.describe(trace.buffer.address + unit * trace.unit)
    line = int(w.engine.events.line[trace.stores[unit]])
    w.report("race", f"{what} {where}, that another warp writes (PTX line {line}): nothing orders the two")

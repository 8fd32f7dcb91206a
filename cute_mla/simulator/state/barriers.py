"""mbarriers, named barriers and the cluster barrier."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..findings import Fault
from .clocks import Clock, Knowledge

MAX_TX = (1 << 20) - 1
MAX_COUNT = (1 << 20) - 1


@dataclass
class BarrierInit:
    """An mbarrier.init by a warp (row of the clocks), done from a time of that warp on.

    fenced: asynchronous work and other CTAs may use the barrier. known: rows of warps that are known to come after it.
    """

    row: int
    time: int
    fenced: bool = False
    known: set[int] = field(default_factory=set)


@dataclass
class Mbarrier:
    """One mbarrier. phase counts completed phases (the hardware keeps its last bit).

    pending: arrivals still missing in this phase. tx: bytes expected and not yet arrived; may be negative for a while.
    column: agent of the copies that signal it (clocks.py). init: its initialisation. passed: warps (rows of the clocks) that have waited
    for the phase before, and the times of agents that come after that. overtaken: a warp that a phase has completed without.
    last, last_but_one: the knowledge that completed the last phase, and the one before it.
    """

    name: str
    count: int
    column: int = 0
    init: BarrierInit | None = None
    pending: int = 0
    tx: int = 0
    phase: int = 0
    knowledge: Knowledge = field(default_factory=Knowledge)
    passed: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    overtaken: int | None = None
    last: Clock | None = None
    last_but_one: Clock | None = None

    def __post_init__(self) -> None:
        self.pending = self.count

    def arrive(self, number: int) -> bool:
        """Count arrivals; return True when they complete the phase. Raises Fault for more arrivals than expected."""
        if number > self.pending:
            raise Fault(
                "barrier_arrivals",
                f"{number} arrivals where only {self.pending} of {self.count} were still missing in phase {self.phase}",
                self.name,
            )
        self.pending -= number
        return self.settle()

    def add_pending(self, number: int) -> None:
        """Expect more arrivals in this phase (cp.async.mbarrier.arrive without noinc). Raises Fault when out of range."""
        self.pending += number
        if self.pending > MAX_COUNT:
            raise Fault("barrier_count", f"pending count {self.pending} is out of range", self.name)

    def expect(self, nbytes: int) -> None:
        """Expect more bytes. Raises Fault when out of range."""
        self.tx += nbytes
        self._check_tx()

    def complete(self, nbytes: int) -> bool:
        """Count bytes that have come; return True when they complete the phase. Raises Fault when out of range."""
        self.tx -= nbytes
        self._check_tx()
        return self.settle()

    def _check_tx(self) -> None:
        if not -MAX_TX <= self.tx <= MAX_TX:
            raise Fault("barrier_tx", f"transaction count {self.tx} is out of range", self.name)

    def settle(self) -> bool:
        """Go to the next phase when nothing is missing; return True when that happened."""
        if self.pending or self.tx:
            return False
        gathered = self.knowledge.gathered
        if self.passed:
            for row, seen in self.passed.items():
                if gathered is None or not any(gathered[column] >= time for column, time in seen):
                    self.overtaken = row
            self.passed.clear()
        self.phase += 1
        self.pending = self.count
        self.last, self.last_but_one = gathered, self.last
        self.knowledge.complete()
        return True

    def state(self) -> str:
        """Return in words what is missing."""
        parts = [f"phase {self.phase}"]
        if self.pending:
            parts.append(f"{self.pending} of {self.count} arrivals missing")
        if self.tx > 0:
            parts.append(f"{self.tx} bytes missing")
        elif self.tx < 0:
            parts.append(f"{-self.tx} bytes more than expected")
        return ", ".join(parts)


@dataclass
class NamedBarrier:
    """One bar.sync barrier. expected: threads of the current round, None between rounds.

    members: last round of each warp (row of the clocks). passers: warps that have waited in the round before, and the time from
    which on they know that it is complete. ahead: warps whose last arrival did not wait. lanes: of warps that have come in part, but for
    those that have exited since.
    """

    name: str
    expected: int | None = None
    arrived: int = 0
    results: list[tuple[object, ...]] = field(default_factory=list)
    rounds: int = 0
    knowledge: Knowledge = field(default_factory=Knowledge)
    members: dict[int, int] = field(default_factory=dict)
    passers: dict[int, int] = field(default_factory=dict)
    ahead: set[int] = field(default_factory=set)
    lanes: dict[int, set[int]] = field(default_factory=dict)

    def arrive(self, threads: int, count: int) -> bool:
        """Count threads that arrive at a barrier of count; return True when the round is complete. Raises Fault for misuse."""
        if count % 32 or count <= 0:
            raise Fault("barrier_count", f"thread count {count} is not a positive multiple of 32", self.name)
        if self.expected is None:
            self.expected = count
        elif self.expected != count:
            raise Fault("barrier_count", f"arrival with thread count {count}, earlier ones in this round gave {self.expected}", self.name)
        self.arrived += threads
        if self.arrived > count:
            raise Fault("barrier_arrivals", f"{self.arrived} threads arrive at a barrier of {count}", self.name)
        return self.arrived == count

    def next_round(self) -> None:
        """Begin the next round. Raises Fault when lanes of a warp are here whose others are not."""
        if self.lanes:
            raise Fault("barrier_arrivals", f"a round ends while lanes of warp {min(self.lanes)} wait for its others", self.name)
        self.expected, self.arrived = None, 0
        self.passers = {}
        self.knowledge.complete()
        self.rounds += 1

    def state(self) -> str:
        """Return in words how far the round is."""
        return f"{self.arrived} of {self.expected} threads have arrived"


@dataclass
class ClusterBarrier:
    """barrier.cluster: all live threads of the cluster. phase counts completed rounds."""

    threads: int
    arrived: int = 0
    exited: int = 0
    phase: int = 0
    knowledge: Knowledge = field(default_factory=Knowledge)

    def arrive(self, threads: int) -> bool:
        """Count threads that arrive; return True when the round is complete."""
        self.arrived += threads
        return self.settle()

    def leave(self, threads: int) -> bool:
        """Count threads that exit, as arrived from now on; return True when that completes the round."""
        self.exited += threads
        return self.settle()

    def settle(self) -> bool:
        """Go to the next round when no thread is missing and some have arrived; return True when that happened."""
        if self.arrived == 0 or self.arrived + self.exited < self.threads:
            return False
        self.arrived = 0
        self.phase += 1
        self.knowledge.complete()
        return True

    def state(self) -> str:
        """Return in words how far the round is."""
        return f"{self.arrived} of {self.threads - self.exited} threads have arrived"


class Question:
    """Question of a warp whether a phase is complete now, which waits for the observer that keeps the time."""

    def __init__(self, barriers: str) -> None:
        self.name = f"the answer whether a phase of {barriers} is complete"

    def state(self) -> str:
        """Return the state as findings show it."""
        return "not answered"

"""Barriers of a cluster in time: mbarriers by phase, named barriers, and the barrier of the cluster."""

from __future__ import annotations

from collections.abc import Callable

Wake = Callable[[int], None]  # called with the clock at which something came true


class Mbarrier:
    """An mbarrier. count: arrivals of a phase. pending, tx: what the open phase still waits for. phase: completed phases."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.pending = count
        self.tx = 0
        self.phase = 0
        self.completed_at = 0
        self._waiters: list[tuple[int, Wake]] = []

    def signal(self, clock: int, arrivals: int, tx: int) -> bool:
        """Count arrivals and expected (positive) or arrived (negative) bytes. True if that completes the phase."""
        self.pending -= arrivals
        self.tx += tx
        if self.pending or self.tx:
            return False
        self.phase += 1
        self.pending = self.count
        self.completed_at = clock
        parity = self.phase & 1
        waiters, self._waiters = self._waiters, []
        for wanted, wake in waiters:
            if wanted != parity:
                wake(clock)
            else:
                self._waiters.append((wanted, wake))
        return True

    def is_complete(self, parity: int) -> bool:
        """Return True if the phase of this parity is complete."""
        return (self.phase & 1) != parity

    def wait(self, parity: int, wake: Wake) -> None:
        """Call wake when the phase of this parity completes."""
        self._waiters.append((parity, wake))

    def lack(self) -> str:
        """Return what the open phase lacks, in words; nothing if nobody waits for it."""
        missing = f"lacks {self.pending} of {self.count} arrivals and {self.tx} bytes in phase {self.phase}"
        return missing if self._waiters else ""


class NamedBarrier:
    """A named barrier, or that of the cluster. expected: threads, or warps. Waiters of a round are woken by its last arrival."""

    def __init__(self) -> None:
        self.arrived = 0
        self._waiters: list[Wake] = []

    def arrive(self, clock: int, number: int, expected: int, wake: Wake | None = None) -> None:
        """Count threads. wake: called at the end of the round."""
        self.arrived += number
        if wake is not None:
            self._waiters.append(wake)
        if self.arrived >= expected:
            self.arrived = 0
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                waiter(clock)

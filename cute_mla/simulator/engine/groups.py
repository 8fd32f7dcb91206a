"""Groups of lanes at one program counter: what the machine schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..state.barriers import ClusterBarrier, Mbarrier, NamedBarrier
from .lane_sets import LaneSet

if TYPE_CHECKING:
    from ..state.cta import Cta
    from ..state.tensor_memory import TensorMemory

READY, BLOCKED, GATHERING, DEAD = "ready", "blocked", "gathering", "dead"


class Group:
    """A convoy: lanes of one CTA that are at the same block.

    partial: some of its warps have live lanes elsewhere. tainted: its registers may hold poison. blocked_on: what it waits
    for. waited: phase of each mbarrier when the group began to wait for it.
    """

    def __init__(self, cta: Cta, lane_set: LaneSet, pc: int, tainted: bool) -> None:
        self.cta = cta
        self.pc = pc
        self.tainted = tainted
        self.state = READY
        self.blocked_on: list[Mbarrier | NamedBarrier | ClusterBarrier | TensorMemory] = []
        self.waited: dict[int, int] = {}
        self.last_failed: tuple[tuple[int, int], ...] = ()
        self.timed_out = False
        self.yielded = False
        self.apart_at = -1  # program counter at which this group must not merge
        self.rejoins = False  # was parted from warps that stand at the same place, and lets them catch up behind it
        self.set_lanes(lane_set)

    def set_lanes(self, lane_set: LaneSet) -> None:
        """Change which lanes belong to the group."""
        self.lane_set = lane_set
        self.lanes = lane_set.lanes
        self.window = lane_set.window
        self.warps = lane_set.warps
        self.refresh_partial()

    def refresh_partial(self) -> None:
        """Recompute whether lanes of these warps are elsewhere."""
        self.partial = not self.lane_set.whole and self.cta.live_lanes(self.warps) != self.lane_set.count

    def block(self, barriers: list[Mbarrier]) -> None:
        """Wait for any of these mbarriers."""
        self.state = BLOCKED
        self.blocked_on = list(barriers)
        for barrier in barriers:
            self.waited.setdefault(id(barrier), barrier.phase)
            barrier.waiters.append(self)

    def block_for_memory(self, memory: TensorMemory) -> None:
        """Wait in tcgen05.alloc."""
        self.state = BLOCKED
        self.blocked_on = [memory]
        memory.waiters.append(self)

    def block_at(self, barrier: NamedBarrier | ClusterBarrier) -> None:
        """Wait inside a barrier (the caller has entered the group there)."""
        self.state = BLOCKED
        self.blocked_on = [barrier]

    def check_lapped(self, barrier: Mbarrier) -> None:
        """A finding when the phase this group waits for has been overtaken by another one."""
        began = self.waited.get(id(barrier))
        if began is not None and barrier.phase - began > 1:
            self.waited[id(barrier)] = barrier.phase
            self.cta.report(
                self.window, "barrier_lapped", f"{barrier.phase - began} phases completed while a wait for one was pending", barrier.name
            )

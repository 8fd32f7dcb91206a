"""Groups of lanes at one program counter: the unit of scheduling."""

from __future__ import annotations

from collections.abc import Sequence

from ..state.barriers import Mbarrier
from ..state.cta import Cta
from ..state.engine_protocol import Waitable
from .lane_sets import LaneSet

READY, BLOCKED, GATHERING, DEAD = "ready", "blocked", "gathering", "dead"


class Group:
    """A convoy: lanes of one CTA that are at the same block.

    siblings: all groups of the CTA, this one included. partial: some of its warps have live lanes elsewhere. tainted: its registers may
    hold poison. blocked_on: what blocks it. waited: phase of each mbarrier (by id) when the group began to wait for it. last_failed: the
    phases that a wait without a time hint has last failed on. timed_out: its next wait answers false. yielded: it has used up a turn.
    apart_at: program counter at which it must not merge, -1 for none. rejoins: it was parted from warps that stand at the same place, and
    lets them catch up behind it.
    """

    def __init__(self, cta: Cta, siblings: list[Group], lane_set: LaneSet, pc: int, tainted: bool) -> None:
        self.cta = cta
        self.siblings = siblings
        self.pc = pc
        self.tainted = tainted
        self.state = READY
        self.blocked_on: list[Waitable] = []
        self.waited: dict[int, int] = {}
        self.last_failed: tuple[tuple[int, int], ...] = ()
        self.timed_out = False
        self.yielded = False
        self.apart_at = -1
        self.rejoins = False
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

    def branch_off(self, lane_set: LaneSet, pc: int) -> Group:
        """Return a new group of the CTA with lanes that were in this one."""
        other = Group(self.cta, self.siblings, lane_set, pc, self.tainted)
        self.siblings.append(other)
        return other

    def become_tainted(self) -> bool:
        """Make the poison rows of the lanes meaningful, all clear; False when they were meaningful before."""
        if self.tainted:
            return False
        self.cta.registers.clear_taint(self.lanes)
        self.tainted = True
        return True

    def may_fail(self, barriers: Sequence[Mbarrier], hint: bool) -> bool:
        """Return True when a wait may answer false: it has timed out, or has no hint and has not failed on these phases yet."""
        if self.timed_out:
            self.timed_out = False
            self.waited = {}
            return True
        key = tuple((id(barrier), barrier.phase) for barrier in barriers)
        if not hint and self.last_failed != key:
            self.last_failed = key
            return True
        return False

    def phases_missed(self, barrier: Mbarrier) -> int:
        """Return how many phases have completed since this group began to wait for one; 0 for up to one."""
        began = self.waited.get(id(barrier))
        if began is None or barrier.phase - began <= 1:
            return 0
        self.waited[id(barrier)] = barrier.phase
        return barrier.phase - began

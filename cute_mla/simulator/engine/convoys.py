"""Convoys: when groups of lanes part, merge, and wait for each other."""

from __future__ import annotations

import numpy as np

from ..codegen.control_flow import Block
from ..codegen.translator import Split
from ..findings import Fault
from ..state.registers import WARP
from .groups import BLOCKED, DEAD, GATHERING, READY, Group
from .policy import Policy
from .schedulers import RoundRobin


class Convoys:
    """Parts and merges groups under a policy."""

    def __init__(self, blocks: list[Block], policy: Policy, scheduler: RoundRobin) -> None:
        self.blocks = blocks
        self.splits = policy.splits_convoys
        self.scheduler = scheduler

    def converge(self, group: Group) -> Group:
        """Merge with groups at the same place. Return the group to run: a part of the same warps that lies behind goes first."""
        merging = not self.splits
        for other in list(group.siblings):
            if other is group or other.state in (BLOCKED, DEAD):
                continue
            shares = group.partial and not group.lane_set.warp_set.isdisjoint(other.warps)
            if other.pc == group.pc and (shares or merging or (other.state == GATHERING and same_warpgroup(group, other))):
                if shares or (other.apart_at != group.pc and group.apart_at != group.pc):
                    self.merge(group, other)
                    if group.partial:  # what has joined may bring lanes of warps of a group that was passed over
                        return self.converge(group)
            elif shares and other.pc < group.pc and other.state == READY and not other.yielded:
                self.scheduler.remove(other)
                self.scheduler.add(group)
                return self.converge(other)
        return group

    def merge(self, group: Group, other: Group) -> None:
        """Join other into group."""
        self.scheduler.remove(other)
        other.state = DEAD
        group.siblings.remove(other)
        if group.tainted != other.tainted:
            group.cta.registers.clear_taint(other.lanes if group.tainted else group.lanes)
            group.tainted = True
        group.set_lanes(group.lane_set.union(other.lane_set))

    def split(self, group: Group, result: Split) -> None:
        """Part the lanes of a group at a branch; it goes on with the part that is behind."""
        taken, fallen = group.lane_set.part(result.mask)
        first, second = ((taken, result.taken), (fallen, result.fallen))
        if result.fallen < result.taken:
            first, second = second, first
        other = group.branch_off(*second)
        group.set_lanes(first[0])
        group.pc = first[1]
        self.scheduler.add(other)

    def scatter(self, group: Group) -> None:
        """Go on warp by warp after an operation of a warpgroup, under policies that split convoys."""
        if group.partial or self.blocks[group.pc].needs == "warpgroup":
            return
        sets = group.lane_set.sets
        warp = group.lanes // WARP
        for number in group.warps[1:]:
            self.scheduler.add(group.branch_off(sets.get(group.lanes[warp == number]), group.pc))
        group.set_lanes(sets.get(group.lanes[warp == group.warps[0]]))

    def must_separate(self, group: Group, number: np.ndarray) -> bool:
        """Part a convoy whose warps name different barriers; True when that happened (the instruction runs again)."""
        if number.ndim == 0 or bool((number == number[0]).all()):
            return False
        mine, rest = group.lane_set.part(number == number[0])
        other = Group(group.cta, group.siblings, rest, group.pc, group.tainted)
        group.set_lanes(mine)
        group.apart_at = other.apart_at = group.pc
        group.rejoins = other.rejoins = not self.splits
        group.siblings.append(other)
        self.scheduler.add(other)
        self.scheduler.add(group)
        return True

    def gathered(self, group: Group, block: Block) -> bool:
        """Return True when all threads that a collective operation needs are here; otherwise the group waits for them.

        Raises Fault when some of them have exited.
        """
        if group.partial and not (block.needs == "warp" and self._leave_incomplete(group)):
            group.state = GATHERING
            return False
        if block.needs == "warpgroup":
            if not group.lane_set.warpgroups:
                group.state = GATHERING
                return False
            if not group.lane_set.whole:
                raise Fault("divergence", "a warpgroup operation after some of its threads have exited")
        return True

    def _leave_incomplete(self, group: Group) -> bool:
        """Go on with the warps whose live lanes are all here; the others wait for theirs, maybe for what these do next. False for none."""
        warps = group.lanes // WARP
        complete = np.bincount(warps) == np.array(group.cta.live[: int(warps[-1]) + 1])
        if not complete[warps].any():
            return False
        mine, rest = group.lane_set.part(complete[warps])
        other = group.branch_off(rest, group.pc)
        other.state = GATHERING
        group.set_lanes(mine)
        group.apart_at = other.apart_at = group.pc
        return True

    def regather(self, siblings: list[Group]) -> None:
        """Let the groups of a CTA look again whether their warps are complete, after some threads have exited."""
        for other in siblings:
            other.refresh_partial()
            if other.state == GATHERING:
                other.state = READY
                self.scheduler.add(other)


def same_warpgroup(group: Group, other: Group) -> bool:
    """Return True when two groups belong to the same warpgroup."""
    return group.warps[0] // 4 == other.warps[0] // 4 and group.warps[-1] // 4 == other.warps[-1] // 4

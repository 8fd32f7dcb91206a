"""Wait lists: the groups that are blocked on each barrier."""

from __future__ import annotations

from collections.abc import Sequence

from ..state.barriers import Mbarrier
from ..state.engine_protocol import Waitable
from .groups import BLOCKED, READY, Group
from .schedulers import RoundRobin


class WaitLists:
    """Blocked groups by barrier, in the order in which they came."""

    def __init__(self, scheduler: RoundRobin) -> None:
        self.scheduler = scheduler
        self._lists: dict[int, list[Group]] = {}  # by id; a barrier with a list is alive, for its groups are blocked on it

    def groups(self, barrier: Waitable) -> Sequence[Group]:
        """Return the groups that are blocked on a barrier."""
        return self._lists.get(id(barrier), ())

    def block(self, group: Group, barriers: Sequence[Waitable]) -> None:
        """Block a group until one of the barriers wakes it."""
        group.state = BLOCKED
        group.blocked_on = list(barriers)
        for barrier in barriers:
            if isinstance(barrier, Mbarrier):
                group.waited.setdefault(id(barrier), barrier.phase)
            self._lists.setdefault(id(barrier), []).append(group)

    def wake(self, barrier: Waitable) -> None:
        """Make the groups that are blocked on a barrier ready."""
        for group in self._lists.pop(id(barrier), ()):
            if group.state == BLOCKED:
                self.leave(group)
                group.state = READY
                self.scheduler.add(group)

    def leave(self, group: Group) -> None:
        """Take a group off the lists of all mbarriers."""
        for barrier in group.blocked_on:
            if isinstance(barrier, Mbarrier):
                waiting = self._lists.get(id(barrier), [])
                if group in waiting:
                    waiting.remove(group)
        group.blocked_on = []

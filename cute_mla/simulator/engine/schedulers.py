"""Schedulers: which ready group runs next, and for how long."""

from __future__ import annotations

from collections import deque

import numpy as np

from .groups import DEAD, READY, Group
from .policy import Policy

SPIN_LIMIT = 200_000  # instructions after which even an adversary lets somebody else run


class RoundRobin:
    """First in, first out."""

    def __init__(self, policy: Policy) -> None:
        self.queue: deque[Group] = deque()
        self.quantum = policy.quantum

    def add(self, group: Group) -> None:
        """Queue a ready group."""
        self.queue.append(group)

    def remove(self, group: Group) -> None:
        """Forget a group, if it is queued."""
        if group in self.queue:
            self.queue.remove(group)

    def take(self) -> Group | None:
        """Take the next ready group, None when there is none."""
        while self.queue:
            group = self.queue.popleft()
            if group.state == READY:
                return group
        return None

    def budget(self) -> int:
        """Return the instructions of one turn."""
        return self.quantum


class Random(RoundRobin):
    """Any ready group, for a random number of instructions."""

    def __init__(self, policy: Policy, rng: np.random.Generator) -> None:
        super().__init__(policy)
        self.ready: list[Group] = []
        self.rng = rng

    def add(self, group: Group) -> None:
        """Queue a ready group."""
        self.ready.append(group)

    def remove(self, group: Group) -> None:
        """Forget a group, if it is queued."""
        if group in self.ready:
            self.ready.remove(group)

    def take(self) -> Group | None:
        """Take a random ready group, None when there is none."""
        while self.ready:
            group = self.ready.pop(int(self.rng.integers(len(self.ready))))
            if group.state == READY:
                return group
        return None

    def budget(self) -> int:
        """Return the instructions of one turn: mostly few, sometimes many."""
        return int(self.rng.integers(1, 1 + int(self.quantum ** self.rng.random())))


class Adversarial(Random):
    """One warp as far as it gets, then the next. The seed fixes the order of warps (seed 0: ascending)."""

    def __init__(self, policy: Policy, rng: np.random.Generator) -> None:
        super().__init__(policy, rng)
        self.order = np.arange(64) if policy.seed == 0 else rng.permutation(64)

    def take(self) -> Group | None:
        """Take the group whose first warp comes first in the order; a group that has used up its turn comes last."""
        self.ready = [group for group in self.ready if group.state != DEAD]
        if not self.ready:
            return None
        best = min(self.ready, key=lambda group: (group.yielded, group.cta.index, int(self.order[group.warps[0] % 64])))
        self.ready.remove(best)
        for group in self.ready:
            group.yielded = False
        return best if best.state == READY else self.take()

    def budget(self) -> int:
        """Return the limit of a turn: until the group blocks, unless it spins."""
        return SPIN_LIMIT


def make_scheduler(policy: Policy, rng: np.random.Generator) -> RoundRobin:
    """Return the scheduler of a policy."""
    if policy.schedule == "random":
        return Random(policy, rng)
    if policy.schedule == "adversarial":
        return Adversarial(policy, rng)
    return RoundRobin(policy)

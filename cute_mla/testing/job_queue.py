"""Order of jobs over workers: jobs of one kernel to one worker, since a worker reads and translates a kernel once; costly kernels first."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence


class JobQueue:
    """Jobs that wait, by kernel. Those of a kernel go from the costliest to the cheapest."""

    def __init__(self, costs: Sequence[float], kernels: Sequence[Hashable]) -> None:
        """Queue job i with a cost and a kernel, for all i."""
        self._costs = costs
        self._waiting: dict[Hashable, deque[int]] = {}
        for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
            self._waiting.setdefault(kernels[index], deque()).append(index)
        self._kernel_of: dict[int, Hashable] = {}

    def take(self, worker: int) -> int | None:
        """Return the next job of a worker; None when no job waits.

        That is a job of its last kernel, else of the costliest kernel that no other worker is at, else of the costliest kernel.
        """
        if not self._waiting:
            return None
        kernel = self._kernel_of.pop(worker, None)
        if kernel not in self._waiting:
            taken = set(self._kernel_of.values())
            free = [candidate for candidate in self._waiting if candidate not in taken]
            kernel = max(free or self._waiting, key=self._cost)
        self._kernel_of[worker] = kernel
        index = self._waiting[kernel].popleft()
        if not self._waiting[kernel]:
            del self._waiting[kernel]
        return index

    def _cost(self, kernel: Hashable) -> float:
        return sum(self._costs[index] for index in self._waiting[kernel])

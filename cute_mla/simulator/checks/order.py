"""Happens-before order: how the clocks of warps (state/clocks.py) learn of each other.

Arriving at a barrier hands a warp's knowledge over to the warps that wait for the phase. An access is ordered after an earlier one when
its warp knows that the earlier one is done.

Where the hardware could order less, knowledge is given generously, so that nothing is reported that a kernel did order. Lanes of a warp
share it. Every arrival (but a relaxed one at the cluster barrier), atomic operation and strong access, fenced or not, hands over all of
it. Copies hand it over at issue.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..state.barriers import Mbarrier
from ..state.clocks import Carrier
from ..state.cta import Cta
from ..state.window import Window


def hand_over(cta: Cta, warps: Sequence[int]) -> None:
    """Let the next arrival of these warps cover what they have done so far."""
    cta.cluster.clocks.tick_all(cta.rank, warps)


def arrive(cta: Cta, warps: Sequence[int], barrier: Carrier, release: bool = True) -> None:
    """Hand the knowledge of warps to a barrier, before the barrier counts their arrival.

    release: their work since they last handed over goes with it.
    """
    if release:
        hand_over(cta, warps)
    barrier.knowledge.add(cta.cluster.clocks.of(cta.rank, warps))


def wait(cta: Cta, warps: Sequence[int], barrier: Carrier) -> None:
    """Give warps that have waited for a complete phase the knowledge of the barrier."""
    cta.cluster.clocks.learn(cta.rank, warps, barrier.knowledge.known)


def through_memory(w: Window) -> None:
    """Exchange knowledge through memory: warps execute an atomic operation, or a strong load or store."""
    cta = w.cta
    clocks = cta.cluster.clocks
    clocks.tick_all(cta.rank, w.warps)
    clocks.memory.add(clocks.of(cta.rank, w.warps))
    clocks.learn(cta.rank, w.warps, clocks.memory.gathered)
    w.engine.events.through_memory(cta.cluster.number)


def fence(cta: Cta, warps: Sequence[int]) -> None:
    """Let asynchronous work read the stores that warps know of (fence.proxy.async)."""
    cta.cluster.clocks.fence(cta.rank, warps)


def copy(cta: Cta, warp: int, barriers: Sequence[Mbarrier], writes: Sequence[tuple[Cta, int, int]], line: int) -> list[tuple[int, int]]:
    """Record a copy that a warp issues and that arrives on barriers, on one for each range [low, high) that it writes.

    Return for each barrier the agent (column) that does the copy, and its number there.
    """
    clocks = cta.cluster.clocks
    clocks.tick(cta.rank, warp)
    numbers = []
    for barrier in barriers:
        clock = clocks.of(cta.rank, (warp,)).copy()
        number = clock[barrier.column] = clocks.issue(barrier.column)
        barrier.knowledge.add(clock)
        numbers.append((barrier.column, int(number)))
    for (target, low, high), (column, number) in zip(writes, numbers, strict=True):
        target.smem.check(low, high, "write of a copy")
        target.trace.store(slice(low // 4, -(-high // 4)), column, number, line)
    return numbers


def arrive_behind_copies(cta: Cta, warp: int, barrier: Mbarrier) -> None:
    """Hand knowledge to a barrier on which a warp's cp.async copies arrive when they are done."""
    clocks = cta.cluster.clocks
    clocks.tick(cta.rank, warp)
    clock = clocks.of(cta.rank, (warp,)).copy()
    column = clocks.own_copier(clocks.row(cta.rank, warp))
    clock[column] = clocks.issued[column]
    barrier.knowledge.add(clock)

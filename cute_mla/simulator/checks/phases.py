"""Checks that barriers are initialised first and that no phase laps a waiter.

The hardware tells phases by one bit. So a warp that is overtaken by a whole phase waits for the wrong one, and a warp that is early by a
phase finds that it need not wait. The check does not depend on the schedule. It demands two things: a phase completes only by arrivals
that know the waits for the phase before, and whoever arrives or waits knows that the phase before is complete.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..state.barriers import BarrierInit, Mbarrier, NamedBarrier
from ..state.clocks import Clock
from ..state.cta import Cta
from ..state.engine_protocol import Engine
from ..state.origin import Origin, instruction_of_caller
from ..state.registers import WARP
from ..state.wgmma_queue import WARPGROUP
from ..state.window import Window

EARLY = "arrives in phase {} and does not know that the one before is complete: the arrival may count there"

# ---------------------------------------------------------------- mbarriers


def note_init(w: Window, barrier: Mbarrier) -> None:
    """Record that a warp initialises an mbarrier."""
    clocks = w.cta.cluster.clocks
    row = clocks.row(w.cta.rank, w.warps[0])
    barrier.init = BarrierInit(row, int(clocks.now[row, row]) + 1, known={row})
    w.cta.cluster.unfenced.append(barrier.init)


def note_fence(cta: Cta, warps: Sequence[int]) -> None:
    """Record a fence that makes mbarrier.inits of these warps visible to asynchronous work and other CTAs, also by a relaxed arrival."""
    for warp in warps:
        cta.cluster.clocks.tick(cta.rank, warp)
    unfenced = cta.cluster.unfenced
    if unfenced:
        rows = [cta.cluster.clocks.row(cta.rank, warp) for warp in warps]
        for init in unfenced:
            init.fenced |= init.row in rows
        cta.cluster.unfenced = [init for init in unfenced if not init.fenced]


def check_use(w: Window, warps: Sequence[int], barrier: Mbarrier, far: bool) -> None:
    """Report when warps use an mbarrier that may not be initialised yet. far: asynchronous work or another CTA signals it."""
    init = barrier.init
    if init is None:
        return
    clocks = w.cta.cluster.clocks
    for warp in warps:
        row = clocks.row(w.cta.rank, warp)
        if row not in init.known:
            if clocks.now[row, init.row] < init.time:
                message = f"use of an mbarrier that {clocks.name(init.row)} initialises: nothing orders the two"
                w.report("race", message, barrier.name)
            init.known.add(row)
    if far and not init.fenced:
        init.fenced = True
        message = "asynchronous work or another CTA signals an mbarrier: no fence.mbarrier_init or fence.proxy.async since its init"
        w.report("missing_fence", message, barrier.name)


def note_wait(cta: Cta, warps: Sequence[int], barrier: Mbarrier) -> None:
    """Record that warps have seen the phase before the current one complete.

    Other warps know that from what these do afterwards, from their next commit, or from a wgmma that any warp of the warpgroup waits for.
    """
    clocks = cta.cluster.clocks
    for warp in warps:
        row = clocks.row(cta.rank, warp)
        barrier.passed[row] = (row, int(clocks.now[row, row]) + 1), next_product(cta, warp)


def next_product(cta: Cta, warp: int) -> tuple[int, int]:
    """Return the agent (a column of the clocks) of a warp's next product or tcgen05.commit, and the number of that there."""
    clocks = cta.cluster.clocks
    if cta.tensor is not None:
        return clocks.committer(cta.rank), int(clocks.issued[clocks.committer(cta.rank)]) + 1
    column = clocks.matrix_core(cta.rank, warp)
    queue = cta.wgmma.get(warp * WARP // WARPGROUP * WARPGROUP)
    if queue is None:
        return column, 1
    return column, queue.serial + sum(1 for _ in queue.unwaited()) + (0 if queue.open else 1)


def check_lapped(w: Window, barrier: Mbarrier) -> None:
    """Report when the phase that the running group waits for has been overtaken by another one."""
    missed = w.engine.phases_missed(barrier)
    if missed:
        w.report("barrier_lapped", f"{missed} phases completed while a wait for one was pending", barrier.name)


def check_arrival(w: Window, warps: Sequence[int], barrier: Mbarrier) -> None:
    """Report when warps arrive at an mbarrier and the phase before may not be complete. Call it before the arrival counts."""
    for warp in warps:
        if not knows(w.cta.cluster.clocks.of(w.cta.rank, (warp,)), barrier.last):
            w.report("barrier_early", f"warp {warp} {EARLY.format(barrier.phase)}", barrier.name)
            return


def check_commit(engine: Engine, origin: Origin, clock: Clock, barrier: Mbarrier) -> None:
    """Report a tcgen05.commit (clock: its knowledge) that arrives when the phase before may not be complete."""
    if not knows(clock, barrier.last):
        engine.report(origin, "barrier_early", f"a tcgen05.commit {EARLY.format(barrier.phase)}", barrier.name)


def check_wait(w: Window, warps: Sequence[int], barrier: Mbarrier) -> None:
    """Report when warps pass a wait by parity and may be so early that the parity is that of two phases before."""
    for warp in warps:
        if not knows(w.cta.cluster.clocks.of(w.cta.rank, (warp,)), barrier.last_but_one):
            message = f"warp {warp} waits for phase {barrier.phase - 1} and does not know that the one before is complete: "
            w.report("barrier_early", message + "until it is, the parity bit lets it pass", barrier.name)
            return


def knows(clock: Clock, phase: Clock | None) -> bool:
    """Return True when a clock has all the knowledge that completed a phase (None: there was no phase)."""
    return phase is None or bool((clock >= phase).all())


def report_overtaken(engine: Engine, cta: Cta, warp: int, barrier: Mbarrier) -> None:
    """Report a phase that has completed without a warp, by the arrival of a warp of a CTA, and forget the one left behind."""
    assert barrier.overtaken is not None
    name = cta.cluster.clocks.name(barrier.overtaken)
    barrier.overtaken = None
    message = f"phase {barrier.phase - 1} can be complete before {name} has seen the end of the one before: no arrival comes after its wait"
    engine.report(Origin(cta.index, warp, instruction_of_caller()), "barrier_lapped", message, barrier.name)


# ---------------------------------------------------------------- named barriers


def note_arrival(w: Window, warps: Sequence[int], barrier: NamedBarrier, waits: bool) -> None:
    """Report when warps arrive at a named barrier and the round before may not be complete. Call it before the arrival counts.

    A warp that has arrived without waiting may wait for the same round (waits): its threads count twice.
    """
    clocks = w.cta.cluster.clocks
    for warp in warps:
        row = clocks.row(w.cta.rank, warp)
        last = barrier.members.get(row)
        again = last == barrier.rounds and not (waits and row in barrier.ahead)
        if again or (last == barrier.rounds - 1 and not knows_round(w.cta, row, barrier)):
            message = f"warp {warp} arrives again before it knows that the round before is complete: nothing orders the two"
            w.report("barrier_lapped", message, barrier.name)
        barrier.members[row] = barrier.rounds
        if not waits:
            barrier.ahead.add(row)
        else:
            barrier.ahead.discard(row)


def knows_round(cta: Cta, row: int, barrier: NamedBarrier) -> bool:
    """Return True when a warp knows some warp that has waited in the last complete round."""
    known = cta.cluster.clocks.now[row]
    return not barrier.passers or row in barrier.passers or any(known[other] >= time for other, time in barrier.passers.items())


def note_round(cta: Cta, warps: Sequence[int], barrier: NamedBarrier) -> None:
    """Record that warps have waited for the round that is complete now."""
    clocks = cta.cluster.clocks
    for warp in warps:
        row = clocks.row(cta.rank, warp)
        barrier.passers[row] = int(clocks.now[row, row]) + 1

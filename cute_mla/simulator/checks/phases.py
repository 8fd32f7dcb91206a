"""Whether barriers are used in order: after their initialisation, and no phase before everybody has seen the one before.

The hardware tells phases by one bit, so a warp that is overtaken by a whole phase waits for the wrong one, and one that is early by a
phase finds that it need not wait. Whether that can happen does not depend on the schedule: a phase may only complete by arrivals that know
that those who waited for the phase before have done so, and who arrives or waits must know that the phase before is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..state.barriers import Made, Mbarrier, NamedBarrier
from ..state.registers import WARP
from .order import WARPS_OF_CORE, Clock

if TYPE_CHECKING:
    from ..state.cta import Cta, Origin
    from ..state.registers import Window


EARLY = "arrives in phase {} and does not know that the one before is complete: the arrival may count there"

# ---------------------------------------------------------------- mbarriers


def note_init(w: Window, barrier: Mbarrier) -> None:
    """A warp initialises an mbarrier."""
    clocks = w.cta.cluster.clocks
    row = clocks.row(w.cta, w.warps[0])
    barrier.made = Made(row, int(clocks.now[row, row]) + 1, known={row})
    w.cta.cluster.unfenced.append(barrier.made)


def note_fence(cta: Cta, warps: Sequence[int]) -> None:
    """Warps execute a fence that makes their mbarrier.init visible to asynchronous work and other CTAs, also by a relaxed arrival."""
    for warp in warps:
        cta.cluster.clocks.tick(cta, warp)
    unfenced = cta.cluster.unfenced
    if unfenced:
        rows = [cta.cluster.clocks.row(cta, warp) for warp in warps]
        for made in unfenced:
            made.fenced |= made.row in rows
        cta.cluster.unfenced = [made for made in unfenced if not made.fenced]


def check_use(w: Window, warps: Sequence[int], barrier: Mbarrier, far: bool) -> None:
    """A finding when warps use an mbarrier that may not be initialised yet. far: asynchronous work or another CTA signals it."""
    made = barrier.made
    if made is None:
        return
    clocks = w.cta.cluster.clocks
    for warp in warps:
        row = clocks.row(w.cta, warp)
        if row not in made.known:
            if clocks.now[row, made.row] < made.time:
                message = f"use of an mbarrier that {clocks.name(made.row)} initialises: nothing orders the two"
                w.cta.report(w, "race", message, barrier.name)
            made.known.add(row)
    if far and not made.fenced:
        made.fenced = True
        message = "asynchronous work or another CTA signals an mbarrier: no fence.mbarrier_init or fence.proxy.async since its init"
        w.cta.report(w, "missing_fence", message, barrier.name)


def note_wait(cta: Cta, warps: Sequence[int], barrier: Mbarrier) -> None:
    """Warps have seen the phase before the current one complete.

    Others know that from what they do afterwards, from a commit of theirs, or from a wgmma that any warp of the warpgroup has waited for.
    """
    clocks = cta.cluster.clocks
    for warp in warps:
        row = clocks.row(cta, warp)
        barrier.passed[row] = (row, int(clocks.now[row, row]) + 1), next_product(cta, warp)


def next_product(cta: Cta, warp: int) -> tuple[int, int]:
    """An agent (a column of the clocks), and the number of the product, or of the tcgen05.commit, that it gets next from a warp."""
    clocks = cta.cluster.clocks
    if cta.tensor is not None:
        return clocks.committer(cta), int(clocks.issued[clocks.committer(cta)]) + 1
    column = clocks.matrix_core(cta, warp)
    pipe = cta.pipes.get(warp // WARPS_OF_CORE * WARPS_OF_CORE * WARP)
    if pipe is None:
        return column, 1
    return column, pipe.serial + sum(1 for _ in pipe.unwaited()) + (0 if pipe.open else 1)


def check_arrival(w: Window, warps: Sequence[int], barrier: Mbarrier) -> None:
    """Warps arrive at an mbarrier (before that counts): a finding when the phase before may not be complete."""
    for warp in warps:
        if not knows(w.cta.cluster.clocks.of(w.cta, (warp,)), barrier.last):
            w.cta.report(w, "barrier_early", f"warp {warp} {EARLY.format(barrier.phase)}", barrier.name)
            return


def check_commit(cta: Cta, origin: Origin, clock: Clock, barrier: Mbarrier) -> None:
    """A tcgen05.commit arrives, with what was known where it was issued: as check_arrival."""
    if not knows(clock, barrier.last):
        cta.machine.report_at(origin, "barrier_early", f"a tcgen05.commit {EARLY.format(barrier.phase)}", barrier.name)


def check_wait(w: Window, warps: Sequence[int], barrier: Mbarrier) -> None:
    """Warps pass a wait by the parity of a phase: a finding when they may also be so early that the parity is that of two phases before."""
    for warp in warps:
        if not knows(w.cta.cluster.clocks.of(w.cta, (warp,)), barrier.last_but_one):
            message = f"warp {warp} waits for phase {barrier.phase - 1} and does not know that the one before is complete: "
            w.cta.report(w, "barrier_early", message + "until it is, the parity bit lets it pass", barrier.name)
            return


def knows(clock: Clock, phase: Clock | None) -> bool:
    """Whether a clock has all that those knew who completed a phase, if there was one."""
    return phase is None or bool((clock >= phase).all())


def overtaken(cta: Cta, barrier: Mbarrier) -> str:
    """What is wrong when a phase has completed without a warp, in words."""
    assert barrier.overtaken is not None
    name = cta.cluster.clocks.name(barrier.overtaken)
    barrier.overtaken = None
    return f"phase {barrier.phase - 1} can be complete before {name} has seen the end of the one before: no arrival comes after its wait"


# ---------------------------------------------------------------- named barriers


def note_arrival(w: Window, warps: Sequence[int], barrier: NamedBarrier) -> None:
    """Warps arrive at a named barrier (before that counts): a finding when the round before may not be complete."""
    clocks = w.cta.cluster.clocks
    for warp in warps:
        row = clocks.row(w.cta, warp)
        last = barrier.members.get(row)
        if last == barrier.rounds or (last == barrier.rounds - 1 and not knows_round(w.cta, row, barrier)):
            message = f"warp {warp} arrives again before it knows that the round before is complete: nothing orders the two"
            w.cta.report(w, "barrier_lapped", message, barrier.name)
        barrier.members[row] = barrier.rounds


def knows_round(cta: Cta, row: int, barrier: NamedBarrier) -> bool:
    """Whether a warp knows somebody who has waited in the last complete round."""
    known = cta.cluster.clocks.now[row]
    return not barrier.passers or row in barrier.passers or any(known[other] >= time for other, time in barrier.passers.items())


def note_round(cta: Cta, warps: Sequence[int], barrier: NamedBarrier) -> None:
    """Warps have waited for the round that is complete now."""
    clocks = cta.cluster.clocks
    for warp in warps:
        row = clocks.row(cta, warp)
        barrier.passers[row] = int(clocks.now[row, row]) + 1

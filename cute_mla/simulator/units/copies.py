"""Issue of copies to shared memory, with the checks that every such copy needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..checks import order, phases, races
from ..state.async_work import PendingCopy
from ..state.barriers import Mbarrier
from ..state.cta import Cta
from ..state.window import Window


def issue(
    w: Window, warp: int, effect: Callable[[], None], barriers: list[Mbarrier], writes: Sequence[tuple[Cta, int, int]]
) -> list[tuple[int, int]]:
    """Begin a copy that a warp issues and that writes shared bytes (CTA, start, stop), one range for each barrier.

    Return for each barrier the agent (a column of the clocks) that does the copy, and its number there.
    """
    for target, low, high in writes:
        races.check_overwrite(w, warp, target, low, high)
    origin = w.origin()
    numbers = order.copy(w.cta, warp, barriers, writes, origin.line)
    for barrier in barriers:
        phases.check_use(w, (warp,), barrier, True)
        w.cta.cluster.copies[barrier.column] = origin
    w.engine.begin(PendingCopy(effect, origin, barriers, [(target.smem, low, high) for target, low, high in writes]))
    return numbers

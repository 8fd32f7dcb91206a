"""Prefetches of machine code: hints without an effect on results. An observer is told which boxes TMA is asked to bring to L2."""

from __future__ import annotations

import numpy as np

from ..isa.emitter import Emitter
from ..isa.table import runtime
from ..isa.tensor_copies import ROWS, place_boxes
from ..state.registers import WARP
from ..state.window import Window
from .asynchronous import leaders, uniform_words
from .listing import Address, SassInstruction
from .operands import pair
from .table import ignored, op

_HINT = "a hint: no effect on results"

ignored(r"CCTL.E.(PF1|PF2|PML2)", _HINT, writes=())
ignored(r"UBLKPF.L2", _HINT, writes=())
ignored(r"UTMACCTL.PF", _HINT, writes=())


@op(r"UTMAPF.L2.[1-5]D", r"UTMAPF.L2.2D.GATHER4", pure=False, taint="own", writes=())
def prefetch_tensor(e: Emitter, ins: SassInstruction) -> None:
    """Emit a TMA prefetch: the coordinates in a run, the address of the map in a pair. GATHER4: a column and four rows."""
    place, plan = ins.operands[:2]
    assert isinstance(place, Address)
    assert isinstance(plan, Address)
    assert plan.uniform is not None
    gather = "GATHER4" in ins.modifiers
    words = uniform_words(e, place, 1 + ROWS if gather else int(ins.modifiers[1][0]))
    uniform_words(e, plan, 2)
    e.line(f"prefetch_tensor_box(w, {words}, {pair(e, plan.uniform)}, {gather})")


@runtime
def prefetch_tensor_box(w: Window, words: tuple[np.ndarray, ...], plan: np.ndarray, gather: bool) -> None:
    """Execute UTMAPF in the first lane of each warp. Raises Fault for boxes that the tensor map does not allow."""
    if w.observer is None:
        return
    window, where = leaders(w)
    for lane, address, *position in zip(window.lanes, plan[where], *(word[where].view(np.int32) for word in words), strict=True):
        boxes = place_boxes(w.engine.tensor_map(int(address)), tuple(map(int, position)), 0, gather)
        w.observer.prefetch(w.cta, int(lane) // WARP, boxes)

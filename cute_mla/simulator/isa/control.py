"""Branches, exits, special registers of a CTA, and instructions that are ignored on purpose."""

from __future__ import annotations

import re

import numpy as np

from ..checks import global_order
from ..findings import Fault
from ..frontend.ptx import Instruction
from ..state.window import Window
from .emitter import Emitter
from .table import ignored, op, runtime

Match = re.Match[str]


@op(r"bra(.uni)?", writes=(), pure=False, control="bra", ends=True)
def branch(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit nothing: the translator writes it with its block."""


@op(r"ret(.uni)?", r"exit", writes=(), pure=False, control="exit", ends=True)
def leave(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit nothing: the translator writes it with its block."""


@op(r"trap", writes=(), pure=False)
def trap(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a fault: the kernel gives up."""
    e.line("trapped()")


@runtime
def trapped() -> None:
    """Raise the Fault of a trap instruction."""
    raise Fault("trap", "the kernel executed a trap")


@runtime
def read_special(w: Window, name: str) -> np.ndarray:
    """Return a special register that is the same for all threads of the CTA, a 0-d array."""
    wide = name in ("clock64", "globaltimer", "gridid")
    value = w.cta.specials.get(name)
    if value is None:  # clocks and timers
        value = w.engine.clock() & ((1 << 64) - 1 if wide else 0xFFFFFFFF)
    return np.array(value, np.uint64 if wide else np.uint32)


ignored(r"setmaxnreg.(inc|dec).sync.aligned.u32", "moves registers between warps: no effect on values", needs="warp")
ignored(r"nanosleep.u32", "only passes time")
ignored(r"griddepcontrol.launch_dependents", "launches run one after the other")


@op(r"griddepcontrol.wait", writes=(), pure=False)
def wait_for_grid(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit the wait for the grid ahead. Launches run one after the other, so it only orders memory."""
    e.line("grid_ended(w)")


@runtime
def grid_ended(w: Window) -> None:
    """Execute griddepcontrol.wait."""
    global_order.wait_for_grid(w.cta, w.warps)

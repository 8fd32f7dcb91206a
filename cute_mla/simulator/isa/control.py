"""Branches, exits, and instructions that are ignored on purpose."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..checks import global_order
from ..findings import Fault
from ..frontend.ptx import Instruction
from .table import ignored, op, runtime

if TYPE_CHECKING:
    from ..state.registers import Window
    from .emitter import Emitter

Match = re.Match[str]


@op(r"bra(.uni)?", writes=(), pure=False, control="bra", ends=True)
def branch(e: Emitter, ins: Instruction, m: Match) -> None:
    """Translated with its block."""


@op(r"ret(.uni)?", r"exit", writes=(), pure=False, control="exit", ends=True)
def leave(e: Emitter, ins: Instruction, m: Match) -> None:
    """Translated with its block."""


@op(r"trap", writes=(), pure=False)
def trap(e: Emitter, ins: Instruction, m: Match) -> None:
    """The kernel gives up."""
    e.line("trapped()")


@runtime
def trapped() -> None:
    """A trap instruction."""
    raise Fault("trap", "the kernel executed a trap")


ignored(r"setmaxnreg.(inc|dec).sync.aligned.u32", "moves registers between warps: no effect on values", needs="warp")
ignored(r"nanosleep.u32", "only passes time")
ignored(r"griddepcontrol.launch_dependents", "launches run one after the other")


@op(r"griddepcontrol.wait", writes=(), pure=False)
def wait_for_grid(e: Emitter, ins: Instruction, m: Match) -> None:
    """The grid ahead has ended, as launches run one after the other: only the order matters."""
    e.line("grid_ended(w)")


@runtime
def grid_ended(w: Window) -> None:
    """griddepcontrol.wait"""
    global_order.wait_for_grid(w.cta, w.warps)

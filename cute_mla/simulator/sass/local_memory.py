"""Local memory of machine code: spilled registers and arrays on the stack, which grows down from its end."""

from __future__ import annotations

import numpy as np

from ..isa.emitter import Emitter
from ..isa.table import runtime
from ..state.local_memory import LocalMemory
from ..state.window import Window
from .listing import SassInstruction
from .memory import emit_load, stored
from .operands import address, memory_operand
from .table import op


@op(r"LDL(.LU)?(.U8|.S8|.U16|.S16|.64|.128)?", pure=False, taint="own", loads=True)
def load(e: Emitter, ins: SassInstruction) -> None:
    """Emit a load from the thread's local memory. LU, the last use, is a hint."""
    emit_load(e, ins, "load_local", address(e, memory_operand(ins, 1)), e.layout.local_bytes)


@op(r"STL(.U8|.S8|.U16|.S16|.64|.128)?", pure=False, taint="own", writes=())
def store(e: Emitter, ins: SassInstruction) -> None:
    """Emit a store to the thread's local memory."""
    values, poison = stored(e, ins)
    e.line(f"store_local(w, {address(e, memory_operand(ins, 0))}, {values}, {poison}, {e.layout.local_bytes})")


@runtime
def load_local(w: Window, place: np.ndarray, size: int, count: int, nbytes: int) -> np.ndarray:
    """Execute LDL. Leave poison in the CTA for the code that stores the registers."""
    values, w.cta.poison = local_memory(w, nbytes).load(w.lanes, place, size, count)
    return values


@runtime
def store_local(w: Window, place: np.ndarray, values: list[np.ndarray], poison: list[np.ndarray | None] | None, nbytes: int) -> None:
    """Execute STL."""
    local_memory(w, nbytes).store(w.lanes, place, values, poison)


def local_memory(w: Window, nbytes: int) -> LocalMemory:
    """Return the local memory of the CTA, made on first use."""
    cta = w.cta
    if cta.local is None:
        cta.local = LocalMemory(cta.registers.threads, nbytes)
    return cta.local

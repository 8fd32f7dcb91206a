"""Asynchronous stores, generic accesses and atomic operations on global memory of machine code."""

from __future__ import annotations

import numpy as np

from ..isa.async_copies import bulk_to_global
from ..isa.emitter import Emitter, Unsupported
from ..isa.table import runtime
from ..isa.tensor_copies import tma_store
from ..state.window import Window
from .accesses import width
from .asynchronous import leaders, uniform_words
from .listing import Address, Register, SassInstruction
from .memory import assign_loaded, emit_load, stored
from .operands import address, memory_operand, pair, source
from .table import op


def policy(ins: SassInstruction, first: int) -> None:
    """Check that the operands from a place on are at most a cache policy, which is a hint."""
    others = ins.operands[first:]
    if len(others) > 1 or not all(isinstance(operand, Address) and operand.space == "desc" for operand in others):
        raise Unsupported(f"operands {others}")


@op(r"UTMASTG.[1-5]D", pure=False, taint="own", writes=())
def store_tensor(e: Emitter, ins: SassInstruction) -> None:
    """Emit a TMA store: the source and the coordinates in a run, the address of the map in a pair."""
    start, plan = ins.operands[:2]
    policy(ins, 2)
    assert isinstance(start, Address)
    assert isinstance(plan, Address)
    assert plan.uniform is not None
    dimensions = int(ins.modifiers[0][0])
    uniform_words(e, plan, 2)
    e.line(f"store_tensor_box(w, {uniform_words(e, start, 1 + dimensions)}, {pair(e, plan.uniform)})")


@runtime
def store_tensor_box(w: Window, words: tuple[np.ndarray, ...], plan: np.ndarray) -> None:
    """Execute UTMASTG in the first lane of each warp."""
    window, where = leaders(w)
    start, *coordinates = (word[where] for word in words)
    tma_store(window, plan[where], tuple(item.view(np.int32) for item in coordinates), start, False, False)


@op(r"UBLKCP.G.S", pure=False, taint="own", writes=())
def store_bytes(e: Emitter, ins: SassInstruction) -> None:
    """Emit a bulk copy from shared to global memory: the destination in a pair, the source, and the bytes / 16."""
    place, start, size = ins.operands[:3]
    policy(ins, 3)
    assert isinstance(place, Address)
    assert isinstance(start, Address)
    assert place.uniform is not None
    uniform_words(e, place, 2)
    e.line(f"store_global_bytes(w, {pair(e, place.uniform)}, {uniform_words(e, start, 1)}[0], {source(e, size, 'u32')})")


@runtime
def store_global_bytes(w: Window, place: np.ndarray, start: np.ndarray, size: np.ndarray) -> None:
    """Execute UBLKCP.G.S in the first lane of each warp."""
    window, where = leaders(w)
    bulk_to_global(window, place[where], start[where], np.broadcast_to(size, (w.n,))[where] << np.uint32(4))


@op(r"UTMACMDFLUSH", pure=False, writes=())
def commit_stores(e: Emitter, ins: SassInstruction) -> None:
    """Emit the end of the threads' groups of asynchronous stores, which DEPBAR waits for."""
    e.line("bulk_commit_group(w)")


@op(r"LD.E(.U8|.S8|.U16|.S16|.64|.128)?", pure=False, taint="own", loads=True)
def load_generic(e: Emitter, ins: SassInstruction) -> None:
    """Emit a load from a generic address."""
    emit_load(e, ins, "load_generic", address(e, memory_operand(ins, 1)))


@op(r"ST.E(.U8|.U16|.64|.128)?", pure=False, taint="own", writes=())
def store_generic(e: Emitter, ins: SassInstruction) -> None:
    """Emit a store to a generic address."""
    values, poison = stored(e, ins)
    e.line(f"store_generic(w, {address(e, memory_operand(ins, 0))}, {values}, {poison})")


@op(r"ATOMG.E.(ADD|AND|OR|XOR|EXCH|(MAX|MIN)(.S32)?).STRONG.(GPU|SYS)", pure=False, taint="own", loads=True)
def change_global(e: Emitter, ins: SassInstruction) -> None:
    """Emit a read-modify-write of a word of global memory that returns the old value; lanes act in order."""
    unused, result, _, value = ins.operands
    if not isinstance(unused, Register) or unused.number is not None:
        raise Unsupported("an atomic operation with a predicate")
    old = e.temp()
    e.line(f"{old} = {atomic(e, ins, 2, value)}")
    assign_loaded(e, ins, old, result)


@op(r"REDG.E.(ADD|AND|OR|XOR|(MAX|MIN)(.S32)?).STRONG.(GPU|SYS)", pure=False, taint="own", writes=())
def reduce_global(e: Emitter, ins: SassInstruction) -> None:
    """Emit a read-modify-write of a word of global memory without a result."""
    e.line(atomic(e, ins, 0, ins.operands[1]))


@op(r"REDG.E.ADD.F32(x2|x4)?.FTZ.RN.STRONG.(GPU|SYS)", pure=False, taint="own", writes=())
def add_floats(e: Emitter, ins: SassInstruction) -> None:
    """Emit the addition of one to four floats to consecutive words of global memory."""
    value = ins.operands[1]
    if not isinstance(value, Register) or value.number is None:
        raise Unsupported(f"an atomic operation with {value}")
    registers = value.registers(width(ins, 1))
    e.check_taint(list(registers), "an atomic operation")
    values = ", ".join(e.row(register, "f32") for register in registers)
    e.line(f"add_floats(w, {address(e, memory_operand(ins, 0))}, 'global', [{values}])")


def atomic(e: Emitter, ins: SassInstruction, place: int, value: object) -> str:
    """Return the call of an atomic operation on global memory."""
    if not isinstance(value, Register):
        raise Unsupported(f"an atomic operation with {value}")
    e.check_taint(list(value.registers()), "an atomic operation")
    where = address(e, memory_operand(ins, place))
    kind = "s32" if "S32" in ins.modifiers else "u32"
    return f"atomic_lanes(w, {where}, {ins.modifiers[1].lower()!r}, 'global', [array({source(e, value, kind)})])"

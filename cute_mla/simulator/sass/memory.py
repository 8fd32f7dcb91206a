"""Loads, stores and fences of machine code."""

from __future__ import annotations

import numpy as np

from ..findings import Fault
from ..frontend.layout import RANK_SHIFT
from ..frontend.ptx import Reg
from ..isa.emitter import Emitter, Unsupported
from ..isa.table import runtime
from ..state.window import Window
from .accesses import width
from .listing import Immediate, Operand, Register, SassInstruction
from .operands import address, constant, memory_operand, source
from .table import ignored, op

_NARROW = {"U8": 1, "S8": 1, "U16": 2, "S16": 2}


def element_bytes(ins: SassInstruction) -> int:
    """Return the bytes of one register's part of an access."""
    return next((_NARROW[word] for word in ins.modifiers if word in _NARROW), 4)


def assign_loaded(e: Emitter, ins: SassInstruction, value: str, *results: Operand) -> None:
    """Store loaded elements, extended to the register, with their poison. results: the destinations, by default the first operand."""
    found: list[tuple[int, Reg]] = []
    count = 0
    for result in results or ins.operands[:1]:
        if not isinstance(result, Register):
            raise Unsupported(f"destination {result}")
        run = width(ins, ins.operands.index(result))
        found += enumerate(result.registers(run), count)
        count += run
    signed = next((word for word in ins.modifiers if word in ("S8", "S16")), None)
    for index, register in found:
        item = f"{value}[{index}]"
        if signed is not None:
            item = f"{item}.view({e.constants.thing(np.dtype(f'i{_NARROW[signed]}'))})"
        e.line(f"{e.dst(register, 's32' if signed else 'u32')}[...] = {item}")
    where = tuple(index for index, _ in found)
    if not found:
        return
    if e.tainted:
        e.line(f"take_poison(w, {where}, ({', '.join(str(e.taint(register)) for _, register in found)},))")
    else:
        rows = tuple((register.bank, e.layout.row(register)) for _, register in found)
        e.line(f"if w.cta.poison is not None: meet_poison(w, {where}, {rows})")


def emit_load(e: Emitter, ins: SassInstruction, function: str, place: str, *more: object) -> None:
    """Emit the call of a function that loads elements from a place, and store what it returns."""
    value = e.temp()
    e.line(f"{value} = {function}({', '.join(map(str, ('w', place, element_bytes(ins), width(ins, 0), *more)))})")
    assign_loaded(e, ins, value)


_STRONG = r".STRONG.(CTA|GPU|SYS)"
_HINTS = r"(.EL|.EF|.NA|.LU)?(.E[FLN]L2)?(.LTC(64|128|256)B)?"


@op(rf"LDG.E{_HINTS}(.U8|.S8|.U16|.S16|.64|.128|.256)?(.CONSTANT|{_STRONG})?", pure=False, taint="own", loads=True)
def load_global(e: Emitter, ins: SassInstruction) -> None:
    """Emit a load from global memory. CONSTANT: through the cache of data that the kernel does not write.

    256: the second destination takes the lower 16 bytes, the first the upper ones.
    """
    if "STRONG" in ins.modifiers:
        e.line("order_memory(w)")
    if "256" in ins.modifiers:
        upper, lower = ins.operands[:2]
        value = e.temp()
        e.line(f"{value} = load_global(w, {address(e, memory_operand(ins, 2))}, 4, 8)")
        assign_loaded(e, ins, value, lower, upper)
        return
    emit_load(e, ins, "load_global", address(e, memory_operand(ins, 1)))


@op(r"LDS(.U8|.S8|.U16|.S16|.64|.128)?", pure=False, taint="own", loads=True)
def load_shared(e: Emitter, ins: SassInstruction) -> None:
    """Emit a load from the CTA's shared memory."""
    emit_load(e, ins, "load_shared", f"own_shared(w, {address(e, memory_operand(ins, 1))})", False)


def stored(e: Emitter, ins: SassInstruction) -> tuple[str, str]:
    """Return the expressions of the stored elements and of their poison. 256: the second operand has the lower 16 bytes."""
    values, marks = [], []
    for index in (1, 2) if "256" in ins.modifiers else (1,):
        operand = ins.operands[index]
        if not isinstance(operand, Register) or operand.negative or operand.inverted or operand.absolute:
            raise Unsupported(f"a store of {operand}")
        registers: tuple[Reg | None, ...] = operand.registers(width(ins, index)) or (None,) * width(ins, index)
        values += [constant(e, "u32", 0) if register is None else e.row(register, "u32") for register in registers]
        marks += [e.taint(register) if e.tainted and register is not None else None for register in registers]
    size = element_bytes(ins)
    if size < 4:
        values = [f"{value}.astype({e.constants.thing(np.dtype(f'u{size}'))})" for value in values]
    return f"[{', '.join(values)}]", f"[{', '.join(map(str, marks))}]" if e.tainted else "None"


@op(rf"STG.E{_HINTS}(.U8|.U16|.64|.128|.256)?({_STRONG})?", pure=False, taint="own", writes=())
def store_global(e: Emitter, ins: SassInstruction) -> None:
    """Emit a store to global memory."""
    values, poison = stored(e, ins)
    e.line(f"store_global(w, {address(e, memory_operand(ins, 0))}, {values}, {poison})")
    if "STRONG" in ins.modifiers:
        e.line("order_memory(w)")


@op(r"STS(.U8|.U16|.64|.128)?", pure=False, taint="own", writes=())
def store_shared(e: Emitter, ins: SassInstruction) -> None:
    """Emit a store to the CTA's shared memory."""
    values, poison = stored(e, ins)
    e.line(f"store_shared(w, own_shared(w, {address(e, memory_operand(ins, 0))}), {values}, {poison}, False)")


@runtime
def own_shared(w: Window, place: np.ndarray) -> np.ndarray:
    """Return shared addresses with the rank of the CTA. Raises Fault for an address of another CTA."""
    rank = place >> np.uint32(RANK_SHIFT)
    if not np.count_nonzero(rank):
        return place | np.uint32(w.cta.rank << RANK_SHIFT) if w.cta.rank else place
    if bool(((rank != 0) & (rank != w.cta.rank)).any()):
        raise Fault("out_of_bounds", "an address of another CTA of the cluster in an instruction on the CTA's own shared memory")
    own: np.ndarray = place & np.uint32((1 << RANK_SHIFT) - 1) | np.uint32(w.cta.rank << RANK_SHIFT)
    return own


@op(r"ATOMS.(ADD|AND|OR|XOR|EXCH|(MAX|MIN)(.S32)?)", pure=False, taint="own", loads=True)
def change_shared(e: Emitter, ins: SassInstruction) -> None:
    """Emit a read-modify-write of a word of shared memory that returns the old value; lanes act in order."""
    _, _, value = ins.operands
    if not isinstance(value, Register):
        raise Unsupported(f"an atomic operation with {value}")
    e.check_taint(list(value.registers()), "an atomic operation")
    old = e.temp()
    place = f"own_shared(w, {address(e, memory_operand(ins, 1))})"
    kind = "s32" if "S32" in ins.modifiers else "u32"
    e.line(f"{old} = atomic_lanes(w, {place}, {ins.modifiers[0].lower()!r}, 'shared', [array({source(e, value, kind)})])")
    assign_loaded(e, ins, old)


@op(r"ATOMS.POPC.INC.32", pure=False, taint="own")
def count_shared(e: Emitter, ins: SassInstruction) -> None:
    """Emit the addition of 1 to a word of shared memory by every lane."""
    result = ins.operands[0]
    if not isinstance(result, Register) or result.number is not None:
        raise Unsupported("a counter with a result")
    place = f"own_shared(w, {address(e, memory_operand(ins, 1))})"
    e.line(f"atomic_lanes(w, {place}, 'add', 'shared', [{constant(e, 'u32', 1)}])")


@op(r"BAR.SYNC.DEFER_BLOCKING", pure=False, taint="own", needs="warp", starts=True, ends=True, writes=())
@op(r"BAR.SYNC.LANES", pure=False, taint="own", starts=True, ends=True, writes=())
def synchronise(e: Emitter, ins: SassInstruction) -> None:
    """Emit an arrival at a named barrier and a wait. LANES: the lanes of a warp may come one by one."""
    e.line(f"if not named_sync(w, {barrier(e, ins)}): return BLOCKED")


@op(r"BAR.ARV", pure=False, taint="own", needs="warp", writes=())
@op(r"BAR.ARV.LANES", pure=False, taint="own", writes=())
def arrive(e: Emitter, ins: SassInstruction) -> None:
    """Emit an arrival at a named barrier without a wait. LANES: the lanes of a warp may come one by one."""
    e.line(f"named_arrive(w, {barrier(e, ins)})")


def barrier(e: Emitter, ins: SassInstruction) -> str:
    """Return the expressions of barrier number and thread count."""
    for operand in ins.operands:
        if isinstance(operand, Register):
            e.check_taint(list(operand.registers()), "a barrier operand")
    terms = [f"array({source(e, operand, 'u32')})" for operand in ins.operands if isinstance(operand, Register | Immediate)]
    return ", ".join((*terms, "None")[:2])


@op(r"ACQBULK", pure=False, writes=())
def wait_for_grid(e: Emitter, ins: SassInstruction) -> None:
    """Emit the wait for the grid ahead. Launches run one after the other, so it only orders memory."""
    e.line("grid_ended(w)")


ignored(r"PREEXIT", "launches run one after the other", writes=())
ignored(r"NOP", "does nothing", writes=())
ignored(r"YIELD", "a hint to the scheduler", writes=())
ignored(r"NANOSLEEP(.SYNCS)?", "only passes time", writes=())


@op(r"BPT.TRAP", pure=False, writes=())
def trap(e: Emitter, ins: SassInstruction) -> None:
    """Emit a fault: the kernel gives up."""
    e.line("trapped()")


@op(r"FOREIGN", pure=False, writes=())
def call_foreign(e: Emitter, ins: SassInstruction) -> None:
    """Emit a fault: a call of a function outside the cubin, such as printf."""
    e.line("called_foreign()")


@runtime
def called_foreign() -> None:
    """Raise the Fault of a call of a function outside the cubin."""
    raise Fault("unsupported", "a call of a function outside the cubin, such as printf")


@op(r"NOWHERE", pure=False, writes=())
def lost(e: Emitter, ins: SassInstruction) -> None:
    """Emit a fault: a return to a place that is behind no call."""
    e.line("returned_nowhere()")


@runtime
def returned_nowhere() -> None:
    """Raise the Fault of a return to a place that is behind no call."""
    raise Fault("trap", "a return to an address that is behind no call")

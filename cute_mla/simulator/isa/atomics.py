"""Atomic operations: read-modify-write, lane by lane."""

from __future__ import annotations

import re

import numpy as np

from ..checks import global_order, order, races
from ..findings import Fault
from ..frontend.ptx import Instruction, Operand, Vec
from ..numerics.elementwise import add_f32, flush_f32
from ..state.access import GlobalAccess, shared_pattern
from ..state.window import Window
from .emitter import Emitter, Unsupported
from .memory_ops import SCOPE, SPACE, in_shared, lanes_of, place_shared, shared_part, store_loaded
from .table import op, registers_of, runtime

Match = re.Match[str]

_BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_ATOMIC = rf"(.(relaxed|acquire|release|acq_rel))?({SCOPE})?{SPACE}"


@op(
    rf"atom{_ATOMIC}.(?P<f>add).(?P<t>[us]32|u64)", rf"atom{_ATOMIC}.(?P<f>exch|cas|and|or|xor).(?P<t>b(32|64))",
    rf"atom{_ATOMIC}.(?P<f>min|max).(?P<t>[us]32)", rf"atom.(?P<space>global|shared){SCOPE}.(?P<f>min|max).(?P<t>[us]32)",
    pure=False, taint="own", loads=True,
)  # fmt: skip
def atomic(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a read-modify-write that returns the old value; lanes act in order."""
    emit_atomic(e, ins, m, ins.operands[0], ins.operands[1], ins.operands[2:])


@op(
    rf"red{_ATOMIC}.(?P<f>add).(?P<t>[us]32|u64)", rf"red{_ATOMIC}.(?P<f>and|or|xor).(?P<t>b(32|64))",
    rf"red{_ATOMIC}.(?P<f>min|max).(?P<t>[us]32)", writes=(), pure=False, taint="own",
)  # fmt: skip
def reduction(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a read-modify-write without a result."""
    emit_atomic(e, ins, m, None, ins.operands[0], ins.operands[1:])


@op(rf"red{_ATOMIC}.add(.v(?P<n>2|4))?.f32", writes=(), pure=False, taint="own")
def add_vector(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit the addition of floats to consecutive words of memory, each atomic by itself."""
    mem, value = ins.operands
    items = value.items if isinstance(value, Vec) else (value,)
    shared = m["space"] is not None and m["space"].startswith("shared")
    if len(items) != int(m["n"] or 1) or (m["n"] and m["space"] != "global"):
        raise Unsupported("vectors of floats are added in global memory, one register for each element")
    e.check_taint(registers_of(mem), "an address")
    e.check_taint(registers_of(value), "an atomic operation")
    values = ", ".join(e.src(item, "f32") for item in items)
    e.line(f"add_floats(w, {e.memory_address(mem, 32 if shared else 64)}, {m['space'] or 'generic'!r}, [{values}])")


@runtime
def add_floats(w: Window, address: np.ndarray, space: str, values: list[np.ndarray]) -> None:
    """Execute red.add.f32 on consecutive words, one after the other."""
    nbytes = 4 * len(values)
    if bool(np.any(address % address.dtype.type(nbytes))):
        raise Fault("misaligned", f"a reduction of {nbytes} bytes at an address that is no multiple of them")
    for index, value in enumerate(values):
        atomic_lanes(w, address + address.dtype.type(4 * index), "add", space, [value])


def emit_atomic(e: Emitter, ins: Instruction, m: Match, d: Operand | None, mem: Operand | None, rest: list[Operand | None]) -> None:
    """Emit the common part of atom and red."""
    shared = m["space"] is not None and m["space"].startswith("shared")
    e.check_taint(registers_of(mem), "an address")
    for operand in rest:
        e.check_taint(registers_of(operand), "an atomic operation")
    kind = m["t"].replace("b", "u")
    values = ", ".join(e.src(operand, kind) for operand in rest)
    space = m["space"] or "generic"
    value = e.temp()
    e.line(f"{value} = atomic_lanes(w, {e.memory_address(mem, 32 if shared else 64)}, {m['f']!r}, {space!r}, [{values}])")
    if d is not None:
        store_loaded(e, (d,), value, f"b{m['t'][1:]}")


@runtime
def atomic_lanes(w: Window, address: np.ndarray, name: str, space: str, values: list[np.ndarray]) -> np.ndarray:
    """Execute an atomic lane by lane; return the old bits, shape (1, lanes)."""
    if space == "generic":
        space = "shared::cluster" if in_shared(address) else "global"
        address = address if space == "global" else shared_part(address)
    address = lanes_of(w, address)
    operands = [np.broadcast_to(value, (w.n,)) for value in values]
    size = values[0].dtype.itemsize
    order.through_memory(w)  # orders atomic operations among themselves
    if space != "global":
        for target, index, pattern in place_shared(w, address, space == "shared::cluster"):
            overwrite = races.access(w, target, index, pattern, size, True)
            if overwrite is not None:
                overwrite.fail(w)
    else:
        global_order.write(w, GlobalAccess(address, size))
    old = np.zeros((1, w.n), f"u{size}")
    for lane in range(w.n):
        where = address[lane : lane + 1]
        before = load_one(w, where, size, space)
        after = operands[-1][lane : lane + 1].view(before.dtype)
        if name == "add" and values[0].dtype == np.float32:
            after = sum_of_floats(before, after, space == "global")
        elif name == "add":
            after = before + after
        elif name in _BITWISE:
            after = _BITWISE[name](before, after)
        elif name in ("min", "max"):
            function = np.minimum if name == "min" else np.maximum
            after = function(before.view(operands[-1].dtype), operands[-1][lane : lane + 1]).view(before.dtype)
        elif name == "cas" and before[0] != operands[0][lane]:
            after = before
        old[0, lane] = before[0]
        store_one(w, where, after, space)
    w.cta.poison = None
    w.engine.note_progress()
    order.through_memory(w)
    return old


def sum_of_floats(first: np.ndarray, second: np.ndarray, flushes: bool) -> np.ndarray:
    """Return the bits of a + b rounded to f32. flushes: denormals count as zero, as the ISA has it for global memory."""
    a, b = first.view(np.float32), second.view(np.float32)
    total = flush_f32(add_f32(flush_f32(a), flush_f32(b))) if flushes else add_f32(a, b)
    result: np.ndarray = total.view(first.dtype)
    return result


def load_one(w: Window, address: np.ndarray, size: int, space: str) -> np.ndarray:
    """Return one element for an atomic; report poison in memory."""
    cta = w.cta
    if space != "global":
        target = cta.peer(int(address[0]) >> 24)
        values, poison = target.smem.load(shared_pattern(address), size, 1)
    else:
        values, poison = w.engine.memory.load(GlobalAccess(address, size), size)
    if poison is not None:
        w.report("poison", "an atomic operation on an undefined value")
    return values[0].copy()


def store_one(w: Window, address: np.ndarray, value: np.ndarray, space: str) -> None:
    """Write back one element of an atomic."""
    cta = w.cta
    if space != "global":
        cta.peer(int(address[0]) >> 24).smem.store(shared_pattern(address), [value])
    else:
        w.engine.memory.store(GlobalAccess(address, value.dtype.itemsize), [value])

"""Loads and stores of registers, and the addresses that they share with other families."""

from __future__ import annotations

import re

import numpy as np

from ..checks import global_order, races, smem_hazards
from ..findings import Fault
from ..frontend.layout import PARAM_WINDOW, SHARED_WINDOW, WINDOW_MASK
from ..frontend.ptx import Instruction, Mem, Operand, Reg, Symbol, Vec
from ..state.access import GlobalAccess, SharedPattern, shared_pattern
from ..state.cta import Cta
from ..state.window import Window
from .emitter import Emitter, Unsupported
from .table import op, registers_of, runtime

Match = re.Match[str]

CACHE = (
    r"(.L1::(evict_normal|evict_unchanged|evict_first|evict_last|no_allocate))?"
    r"(.L2::(evict_normal|evict_last|evict_first))?(.L2::cache_hint)?(.L2::(64|128|256)B)?"
)
STRONG = re.compile(r"\.(volatile|relaxed|acquire|release)\b")
SCOPE = r".(cta|cluster|gpu|sys)"
SPACE = r"(.(?P<space>global|shared|shared::cta|shared::cluster))?"
TYPE = r"(.(?P<v>v2|v4|v8))?.(?P<t>[bus](8|16|32|64)|f32|b128)"


def vector_items(operand: Operand | None, match: Match) -> tuple[Operand | None, ...]:
    """Return the registers of a scalar or vector access; for a 128-bit access its two halves."""
    count = int(match["v"][1:]) if match["v"] else 1
    items = operand.items if isinstance(operand, Vec) else (operand,)
    kind = element_type(match)
    if match["t"] == "b128":
        if count != 1:
            raise Unsupported("a vector of 128-bit elements")
        count = 2
    if len(items) != count:
        raise Unsupported(f"{len(items)} registers for {count} elements")
    nbytes = count * width_of(kind)
    if (nbytes > 16 or count == 8) and not (nbytes == 32 and match.groupdict().get("space") == "global"):
        raise Unsupported("a vector of more than 16 bytes (32 bytes in global memory)")
    return items


def element_type(match: Match) -> str:
    """Return the type of the registers: a 128-bit access has two of 64 bits."""
    return "b64" if match["t"] == "b128" else match["t"]


def width_of(kind: str) -> int:
    """Return the bytes of an element type."""
    return int(kind[1:]) // 8


@op(
    rf"ld(.(weak|volatile|(relaxed|acquire){SCOPE}))?{SPACE}(.(ca|cg|cs|lu|cv))?(.nc)?{CACHE}{TYPE}", rf"ld.(?P<space>param){TYPE}",
    pure=False, taint="own", loads=True,
)  # fmt: skip
def load(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a load into one or several registers. Narrow elements are extended to the register."""
    items = vector_items(ins.operands[0], m)
    mem = ins.operands[1]
    size = width_of(element_type(m))
    if m["space"] == "param":
        load_param(e, items, mem, element_type(m))
        return
    e.check_taint(registers_of(mem), "an address")
    value = e.temp()
    if STRONG.search(ins.opcode):
        e.line("order_memory(w)")
    e.line(f"{value} = {load_call(e, mem, m['space'], f'{size}, {len(items)}')}")
    store_loaded(e, items, value, element_type(m))


def load_call(e: Emitter, mem: Operand | None, space: str | None, rest: str) -> str:
    """Return the expression that loads from an address space."""
    shared = space is not None and space.startswith("shared")
    address = e.memory_address(mem, 32 if shared else 64)
    if shared:
        return f"load_shared(w, {address}, {rest}, {space == 'shared::cluster'})"
    return f"{'load_global' if space == 'global' else 'load_generic'}(w, {address}, {rest})"


def store_loaded(e: Emitter, items: tuple[Operand | None, ...], value: str, kind: str) -> None:
    """Emit the move of loaded elements to registers, with their poison."""
    rows = [e.taint(item) for item in items if item is not None]
    for index, item in enumerate(items):
        if item is not None:
            write_element(e, item, f"{value}[{index}]", kind)
    where = [index for index, item in enumerate(items) if item is not None]
    if e.tainted:
        e.line(f"take_poison(w, {tuple(where)}, ({', '.join(str(row) for row in rows)},))")
    else:
        registers = tuple((item.bank, e.layout.row(item)) for item in items if isinstance(item, Reg))
        e.line(f"if w.cta.poison is not None: meet_poison(w, {tuple(where)}, {e.constants.number(registers)})")


def write_element(e: Emitter, item: Operand, value: str, kind: str) -> None:
    """Emit the store of one loaded element, extended to the register's width."""
    assert isinstance(item, Reg)
    size = width_of(kind)
    width = {"h": 2, "r": 4, "d": 8, "p": 0}[item.bank]
    if width < size:
        raise Unsupported(f"load of {size} bytes into a register of {width}")
    unsigned = {"h": "u16", "r": "u32", "d": "u64"}[item.bank]
    if kind[0] == "s" and size < width:
        value = f"{value}.view({e.constants.thing(np.dtype(f'i{size}'))})"
        unsigned = "s" + unsigned[1:]
    e.line(f"{e.dst(item, unsigned)}[...] = {value}")


def load_param(e: Emitter, items: tuple[Operand | None, ...], mem: Operand | None, kind: str) -> None:
    """Emit ld.param, whose value is the same for all threads."""
    if not isinstance(mem, Mem) or not isinstance(mem.base, Symbol):
        raise Unsupported("ld.param from a computed address")
    size = width_of(kind)
    start = e.layout.params[mem.base.name] + mem.base.offset + mem.offset
    for index, item in enumerate(items):
        if item is not None:
            dtype = e.constants.thing(np.dtype(f"u{size}"))
            write_element(e, item, f"w.cta.param({e.constants.number(start + index * size)}, {dtype})", kind)
            if e.tainted:
                e.line(f"{e.taint(item)}.fill(False)")


@op(rf"st(.(weak|volatile|(relaxed|release){SCOPE}))?{SPACE}(.(wb|cg|cs|wt))?{CACHE}{TYPE}", writes=(), pure=False, taint="own")
def store(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a store of one or several registers."""
    mem = ins.operands[0]
    items = vector_items(ins.operands[1], m)
    size = width_of(element_type(m))
    shared = m["space"] is not None and m["space"].startswith("shared")
    e.check_taint(registers_of(mem), "an address")
    kind = f"u{size * 8}"
    values = ", ".join(byte_source(e, item) if size == 1 else e.src(item, kind) for item in items)
    address = e.memory_address(mem, 32 if shared else 64)
    name = "store_shared" if shared else "store_global" if m["space"] == "global" else "store_generic"
    poison = "None"
    if e.tainted:
        poison = f"[{', '.join(str(e.taint(item)) for item in items)}]"
    reach = f", {m['space'] == 'shared::cluster'}" if shared else ""
    e.line(f"{name}(w, {address}, [{values}], {poison}{reach})")
    if STRONG.search(ins.opcode):
        e.line("order_memory(w)")


def byte_source(e: Emitter, item: Operand | None) -> str:
    """Return the low byte of a register."""
    bank = item.bank if isinstance(item, Reg) else "r"
    return f"{e.src(item, {'h': 'u16', 'r': 'u32', 'd': 'u64'}[bank])}.astype({e.constants.thing(np.dtype('u1'))})"


# ---------------------------------------------------------------- runtime


def lanes_of(w: Window, address: np.ndarray) -> np.ndarray:
    """Return one address per lane."""
    return address if address.ndim else np.broadcast_to(address, (w.n,))


def place_shared(w: Window, address: np.ndarray, cluster: bool) -> list[tuple[Cta, np.ndarray | None, SharedPattern]]:
    """Return the CTAs whose memory the lanes address: (cta, positions or None for all lanes, their addresses).

    cluster: the instruction may reach other CTAs (.shared::cluster). Raises Fault where lanes reach a CTA that they may not.
    """
    cta = w.cta
    address = lanes_of(w, address)
    pattern = shared_pattern(address)
    if not cluster:
        if pattern.rank == cta.rank:
            return [(cta, None, pattern)]
        other = int(pattern.ranks[pattern.ranks != cta.rank][0])
        raise Fault("out_of_bounds", f"an address of CTA {other} of the cluster in an instruction on .shared::cta memory")
    if pattern.rank is not None:
        return [(cta.peer(pattern.rank), None, pattern)]
    parts: list[tuple[Cta, np.ndarray | None, SharedPattern]] = []
    for rank in np.unique(pattern.ranks):
        index = np.flatnonzero(pattern.ranks == rank)
        parts.append((cta.peer(int(rank)), index, shared_pattern(address[index])))
    return parts


@runtime
def load_shared(w: Window, address: np.ndarray, size: int, count: int, cluster: bool) -> np.ndarray:
    """Execute ld.shared. Leave poison in the CTA for the code that stores the registers."""
    cta = w.cta
    parts = place_shared(w, address, cluster)
    if len(parts) == 1:
        target, _, pattern = parts[0]
        values, cta.poison = target.smem.load(pattern, size, count)
    else:
        values = np.zeros((count, w.n), np.dtype(f"u{size}"))
        mask = np.zeros((count, w.n), bool)
        for target, index, pattern in parts:
            part, poison = target.smem.load(pattern, size, count)
            values[:, index] = part
            if poison is not None:
                mask[:, index] = poison
        cta.poison = mask if mask.any() else None
    for target, index, pattern in parts:
        races.access(w, target, index, pattern, size * count, False)
    if w.observer is not None:
        for target, index, pattern in parts:
            w.observer.shared_access(w, target, index, pattern.offsets, size * count, False)
    return values


@runtime
def load_global(w: Window, address: np.ndarray, size: int, count: int) -> np.ndarray:
    """Execute ld.global."""
    cta = w.cta
    address = lanes_of(w, address)
    access = GlobalAccess(address, size * count)
    values, cta.poison = w.engine.memory.load(access, size)
    global_order.read(w, access)
    if w.observer is not None:
        w.observer.global_access(w, address, size * count, False)
    return values


@runtime
def load_generic(w: Window, address: np.ndarray, size: int, count: int) -> np.ndarray:
    """Execute ld from a generic address (all lanes in one space)."""
    return load_shared(w, shared_part(address), size, count, True) if in_shared(address) else load_global(w, address, size, count)


def in_shared(address: np.ndarray) -> bool:
    """Return True when generic addresses lie in the shared window. Raises Fault when only some do, or in the parameter window."""
    window = address >> np.uint64(56)
    first = int(window.flat[0])
    if not bool((window == first).all()):
        raise Fault("unsupported", "one generic access to several address spaces")
    if first == PARAM_WINDOW >> 56:
        raise Fault("unsupported", "generic access to parameters")
    return first == SHARED_WINDOW >> 56


def shared_part(address: np.ndarray) -> np.ndarray:
    """Return the shared address in a generic one."""
    return (address & np.uint64(WINDOW_MASK)).astype(np.uint32)


@runtime
def store_shared(w: Window, address: np.ndarray, values: list[np.ndarray], poison: list[np.ndarray | None] | None, cluster: bool) -> None:
    """Execute st.shared."""
    nbytes = values[0].dtype.itemsize * len(values)
    for target, index, pattern in place_shared(w, address, cluster):
        target.smem.require(pattern, nbytes, "write")
        overwrite = races.access(w, target, index, pattern, nbytes, True)
        if index is None:
            target.smem.store(pattern, values, poison)
        else:
            part = [np.broadcast_to(value, (w.n,))[index] for value in values]
            bad = None if poison is None else [None if mask is None else mask[index] for mask in poison]
            target.smem.store(pattern, part, bad)
        if overwrite is not None:
            overwrite.check(w)
        warps = w.lane_warps if index is None else w.lane_warps[index]
        smem_hazards.check_store(w, warps, target, pattern, nbytes)
        if w.observer is not None:
            w.observer.shared_access(w, target, index, pattern.offsets, nbytes, True)


@runtime
def store_global(w: Window, address: np.ndarray, values: list[np.ndarray], poison: list[np.ndarray | None] | None) -> None:
    """Execute st.global; report a store of poison."""
    address = lanes_of(w, address)
    if poison is not None:
        for mask in poison:
            if mask is not None and np.count_nonzero(mask):
                lane = int(np.flatnonzero(mask)[0])
                w.report("poison", f"an undefined value is stored to {w.engine.memory.describe(int(address[lane]))}")
    nbytes = values[0].dtype.itemsize * len(values)
    access = GlobalAccess(address, nbytes)
    overwrite = global_order.write(w, access)
    w.engine.memory.store(access, values)
    if overwrite is not None:
        overwrite.check(w)
    w.engine.note_progress()
    if w.observer is not None:
        w.observer.global_access(w, address, nbytes, True)


@runtime
def store_generic(w: Window, address: np.ndarray, values: list[np.ndarray], poison: list[np.ndarray | None] | None) -> None:
    """Execute st to a generic address."""
    if in_shared(address):
        store_shared(w, shared_part(address), values, poison, True)
    else:
        store_global(w, address, values, poison)


@runtime
def check_poison(w: Window, what: str, *masks: np.ndarray | None) -> None:
    """Report when any mask is set. what: the decision that depends on it."""
    for mask in masks:
        if mask is not None and np.count_nonzero(mask):
            w.report("poison", f"an undefined value decides {what}")
            return


@runtime
def take_poison(w: Window, where: tuple[int, ...], rows: tuple[np.ndarray, ...]) -> None:
    """Move the poison of a load to its registers, in tainted code."""
    cta = w.cta
    for index, row in zip(where, rows, strict=True):
        row[...] = False if cta.poison is None else cta.poison[index]
    cta.poison = None


@runtime
def meet_poison(w: Window, where: tuple[int, ...], registers: tuple[tuple[str, int], ...]) -> None:
    """Switch a convoy whose plain code has loaded poison to tainted code."""
    cta = w.cta
    poison = cta.poison
    cta.poison = None
    assert poison is not None
    w.become_tainted()
    for index, (bank, slot) in zip(where, registers, strict=True):
        w.taints[bank][slot] |= poison[index]

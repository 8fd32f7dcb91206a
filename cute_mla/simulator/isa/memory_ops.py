"""Loads, stores, matrix loads and stores, atomics, fences and prefetches."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..checks import global_order, order, phases, races, smem_hazards
from ..findings import Fault
from ..frontend.ptx import Instruction, Mem, Operand, Reg, Symbol, Vec
from ..numerics import matrix_fragments
from ..state.access import GlobalAccess, SharedPattern, all_true, shared_pattern
from ..state.registers import WARP, Window
from .conversions import PARAM_WINDOW, SHARED_WINDOW, WINDOW_MASK
from .emitter import Unsupported
from .table import ignored, op, registers_of, runtime

if TYPE_CHECKING:
    from ..state.cta import Cta
    from .emitter import Emitter

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
    """The registers of a scalar or vector access; of a 128-bit one its two halves."""
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
    """The type of the registers: a 128-bit one is two of 64."""
    return "b64" if match["t"] == "b128" else match["t"]


def width_of(kind: str) -> int:
    """Bytes of an element type."""
    return int(kind[1:]) // 8


@op(
    rf"ld(.(weak|volatile|(relaxed|acquire){SCOPE}))?{SPACE}(.(ca|cg|cs|lu|cv))?(.nc)?{CACHE}{TYPE}", rf"ld.(?P<space>param){TYPE}",
    pure=False, taint="own", loads=True,
)  # fmt: skip
def load(e: Emitter, ins: Instruction, m: Match) -> None:
    """Load into one or several registers; narrow elements are extended to the register."""
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
    """The call that loads from an address space."""
    shared = space is not None and space.startswith("shared")
    address = e.memory_address(mem, 32 if shared else 64)
    if shared:
        return f"load_shared(w, {address}, {rest}, {space == 'shared::cluster'})"
    return f"{'load_global' if space == 'global' else 'load_generic'}(w, {address}, {rest})"


def store_loaded(e: Emitter, items: tuple[Operand | None, ...], value: str, kind: str) -> None:
    """Move loaded elements to registers, and their poison."""
    rows = [e.taint(item) for item in items if item is not None]
    for index, item in enumerate(items):
        if item is not None:
            write_element(e, item, f"{value}[{index}]", kind)
    where = [index for index, item in enumerate(items) if item is not None]
    if e.tainted:
        e.line(f"take_poison(w, {tuple(where)}, ({', '.join(str(row) for row in rows)},))")
    else:
        registers = tuple((item.bank, e.layout.slot(item)) for item in items if isinstance(item, Reg))
        e.line(f"if w.cta.poison is not None: meet_poison(w, {tuple(where)}, {registers})")


def write_element(e: Emitter, item: Operand, value: str, kind: str) -> None:
    """Store one loaded element, extending it to the register's width."""
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
    """ld.param: the same for all threads."""
    if not isinstance(mem, Mem) or not isinstance(mem.base, Symbol):
        raise Unsupported("ld.param from a computed address")
    size = width_of(kind)
    start = e.layout.params[mem.base.name] + mem.base.offset + mem.offset
    for index, item in enumerate(items):
        if item is not None:
            dtype = e.constants.thing(np.dtype(f"u{size}"))
            write_element(e, item, f"w.cta.param({start + index * size}, {dtype})", kind)
            if e.tainted:
                e.line(f"{e.taint(item)}.fill(False)")


@op(rf"st(.(weak|volatile|(relaxed|release){SCOPE}))?{SPACE}(.(wb|cg|cs|wt))?{CACHE}{TYPE}", writes=(), pure=False, taint="own")
def store(e: Emitter, ins: Instruction, m: Match) -> None:
    """Store one or several registers."""
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
    """The low byte of a register."""
    bank = item.bank if isinstance(item, Reg) else "r"
    return f"{e.src(item, {'h': 'u16', 'r': 'u32', 'd': 'u64'}[bank])}.astype({e.constants.thing(np.dtype('u1'))})"


# ---------------------------------------------------------------- runtime


def lanes_of(w: Window, address: np.ndarray) -> np.ndarray:
    """One address per lane."""
    return address if address.ndim else np.broadcast_to(address, (w.n,))


def place_shared(w: Window, address: np.ndarray, cluster: bool) -> list[tuple[Cta, np.ndarray | None, SharedPattern]]:
    """Which CTA's memory each lane means: (cta, positions or None for all lanes, their addresses).

    cluster: the instruction may reach other CTAs (.shared::cluster). Raises Fault where one that may not does.
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
def order_proxies(w: Window) -> None:
    """fence.proxy.async"""
    order.fence(w.cta, w.warps)


@runtime
def order_memory(w: Window) -> None:
    """What may hand knowledge over through memory."""
    order.through_memory(w.cta, w.warps)


@runtime
def order_barriers(w: Window) -> None:
    """A fence after mbarrier.init."""
    phases.note_fence(w.cta, w.warps)


@runtime
def load_shared(w: Window, address: np.ndarray, size: int, count: int, cluster: bool) -> np.ndarray:
    """ld.shared; poison is left in the CTA for the code that stores the registers."""
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
    if cta.observer is not None:
        for target, index, pattern in parts:
            cta.observer.shared_access(w, target, index, pattern.offsets, size * count, False)
    return values


@runtime
def load_global(w: Window, address: np.ndarray, size: int, count: int) -> np.ndarray:
    """ld.global."""
    cta = w.cta
    address = lanes_of(w, address)
    access = GlobalAccess(address, size * count)
    values, cta.poison = cta.machine.memory.load(access, size)
    global_order.read(w, access)
    if cta.observer is not None:
        cta.observer.global_access(w, address, size * count, False)
    return values


@runtime
def load_generic(w: Window, address: np.ndarray, size: int, count: int) -> np.ndarray:
    """ld from a generic address (all lanes in one space)."""
    return load_shared(w, shared_part(address), size, count, True) if in_shared(address) else load_global(w, address, size, count)


def in_shared(address: np.ndarray) -> bool:
    """True when generic addresses lie in the shared window. Raises Fault when only some do, or in the parameter window."""
    window = address >> np.uint64(56)
    first = int(window.flat[0])
    if not bool((window == first).all()):
        raise Fault("unsupported", "one generic access to several address spaces")
    if first == PARAM_WINDOW >> 56:
        raise Fault("unsupported", "generic access to parameters")
    return first == SHARED_WINDOW >> 56


def shared_part(address: np.ndarray) -> np.ndarray:
    """The shared address in a generic one."""
    return (address & np.uint64(WINDOW_MASK)).astype(np.uint32)


@runtime
def store_shared(w: Window, address: np.ndarray, values: list[np.ndarray], poison: list[np.ndarray | None] | None, cluster: bool) -> None:
    """st.shared."""
    cta = w.cta
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
        if cta.observer is not None:
            cta.observer.shared_access(w, target, index, pattern.offsets, nbytes, True)


@runtime
def store_global(w: Window, address: np.ndarray, values: list[np.ndarray], poison: list[np.ndarray | None] | None) -> None:
    """st.global; storing poison is a finding."""
    cta = w.cta
    address = lanes_of(w, address)
    if poison is not None:
        for mask in poison:
            if mask is not None and np.count_nonzero(mask):
                lane = int(np.flatnonzero(mask)[0])
                cta.report(w, "poison", f"an undefined value is stored to {cta.machine.memory.describe(int(address[lane]))}")
    nbytes = values[0].dtype.itemsize * len(values)
    access = GlobalAccess(address, nbytes)
    overwrite = global_order.write(w, access)
    cta.machine.memory.store(access, values)
    if overwrite is not None:
        overwrite.check(w)
    cta.machine.progress += 1
    if cta.observer is not None:
        cta.observer.global_access(w, address, nbytes, True)


@runtime
def store_generic(w: Window, address: np.ndarray, values: list[np.ndarray], poison: list[np.ndarray | None] | None) -> None:
    """st to a generic address."""
    if in_shared(address):
        store_shared(w, shared_part(address), values, poison, True)
    else:
        store_global(w, address, values, poison)


@runtime
def check_poison(w: Window, what: str, *masks: np.ndarray | None) -> None:
    """A finding when any mask is set."""
    for mask in masks:
        if mask is not None and np.count_nonzero(mask):
            w.cta.report(w, "poison", f"an undefined value decides {what}")
            return


@runtime
def take_poison(w: Window, where: tuple[int, ...], rows: tuple[np.ndarray, ...]) -> None:
    """Tainted code: the poison of a load goes to its registers."""
    cta = w.cta
    for index, row in zip(where, rows, strict=True):
        row[...] = False if cta.poison is None else cta.poison[index]
    cta.poison = None


@runtime
def meet_poison(w: Window, where: tuple[int, ...], registers: tuple[tuple[str, int], ...]) -> None:
    """Plain code loaded poison: the rest of the convoy's run happens in tainted code."""
    cta = w.cta
    poison = cta.poison
    cta.poison = None
    assert poison is not None
    cta.become_tainted(w)
    for index, (bank, slot) in zip(where, registers, strict=True):
        w.taints[bank][slot] |= poison[index]


# ---------------------------------------------------------------- matrices


@op(r"ldmatrix.sync.aligned.m8n8.x(?P<n>1|2|4)(?P<t>.trans)?.shared(::cta)?.b16", needs="warp", pure=False, taint="own", loads=True)
def load_matrix(e: Emitter, ins: Instruction, m: Match) -> None:
    """8x8 matrices of 16-bit elements from shared memory."""
    items = ins.operands[0].items if isinstance(ins.operands[0], Vec) else (ins.operands[0],)
    e.check_taint(registers_of(ins.operands[1]), "an address")
    value = e.temp()
    e.line(f"{value} = load_matrices(w, {e.memory_address(ins.operands[1], 32)}, {int(m['n'])}, {bool(m['t'])})")
    store_loaded(e, items, value, "b32")


@op(r"ldmatrix.sync.aligned.m16n16.x(?P<n>1|2).trans.shared(::cta)?.b8", needs="warp", pure=False, taint="own", loads=True)
def load_byte_matrix(e: Emitter, ins: Instruction, m: Match) -> None:
    """16x16 matrices of bytes from shared memory, transposed."""
    items = ins.operands[0].items if isinstance(ins.operands[0], Vec) else (ins.operands[0],)
    count = int(m["n"])
    if len(items) != 2 * count:
        raise Unsupported(f"{len(items)} registers for {count} matrices of 16x16 bytes")
    e.check_taint(registers_of(ins.operands[1]), "an address")
    value = e.temp()
    e.line(f"{value} = load_byte_matrices(w, {e.memory_address(ins.operands[1], 32)}, {count})")
    store_loaded(e, items, value, "b32")


@op(r"stmatrix.sync.aligned.m8n8.x(?P<n>1|2|4)(?P<t>.trans)?.shared(::cta)?.b16", needs="warp", writes=(), pure=False, taint="own")
def store_matrix(e: Emitter, ins: Instruction, m: Match) -> None:
    """8x8 matrices of 16-bit elements to shared memory."""
    source = ins.operands[1]
    items = source.items if isinstance(source, Vec) else (source,)
    e.check_taint(registers_of(ins.operands[0]), "an address")
    values = ", ".join(e.src(item, "b32") for item in items)
    poison = f"[{', '.join(str(e.taint(item)) for item in items)}]" if e.tainted else "None"
    e.line(f"store_matrices(w, {e.memory_address(ins.operands[0], 32)}, [{values}], {bool(m['t'])}, {poison})")


def matrix_offsets(w: Window, address: np.ndarray, count: int) -> tuple[SharedPattern, np.ndarray]:
    """The rows that a matrix move accesses, and offsets per (warp, lane). Raises Fault for partial warps, bad addresses or other CTAs."""
    if not w.whole:
        raise Fault("divergence", "a matrix load or store needs all 32 lanes of its warps")
    address = lanes_of(w, address)
    rows = matrix_rows(address, count)
    if rows.rank != w.cta.rank:
        raise Fault("out_of_bounds", "a matrix load or store outside the CTA's own shared memory")
    if rows.bits & 15:
        raise Fault("misaligned", "a matrix row that is not at a multiple of 16 bytes")
    w.cta.smem.check(rows.low, rows.high + 16, "matrix access")
    return rows, shared_pattern(address).offsets.reshape(-1, WARP)


def matrix_rows(address: np.ndarray, count: int) -> SharedPattern:
    """The rows of count matrices for each warp, as accesses: the addresses of its first 8 * count lanes."""
    return shared_pattern(address if 8 * count == WARP else address.reshape(-1, WARP)[:, : 8 * count].ravel())


@runtime
def load_matrices(w: Window, address: np.ndarray, count: int, transposed: bool) -> np.ndarray:
    """ldmatrix of 8x8 matrices."""
    rows, offsets = matrix_offsets(w, address, count)
    return matrices_read(w, rows, lambda memory: matrix_fragments.load_matrices(memory, offsets, count, transposed))


@runtime
def load_byte_matrices(w: Window, address: np.ndarray, count: int) -> np.ndarray:
    """ldmatrix of 16x16 matrices of bytes."""
    rows, offsets = matrix_offsets(w, address, 2 * count)
    return matrices_read(w, rows, lambda memory: matrix_fragments.load_byte_matrices(memory, offsets, count))


def matrices_read(w: Window, rows: SharedPattern, read: Callable[[np.ndarray], list[np.ndarray]]) -> np.ndarray:
    """The registers (registers, lanes) that a function reads from memory; their poison is left in the CTA."""
    cta = w.cta
    values, valid = (np.stack(read(memory)).reshape(-1, w.n) for memory in (cta.smem.data, cta.smem.valid))
    known = valid == 0x01010101
    cta.poison = None if all_true(known) else ~known
    races.accesses(w, cta, np.repeat(w.warps, len(rows.offsets) // len(w.warps)), rows, 16, False)
    if cta.observer is not None:
        cta.observer.shared_access(w, cta, None, rows.offsets, 16, False)
    return values


@runtime
def store_matrices(w: Window, address: np.ndarray, values: list[np.ndarray], transposed: bool, poison: list[np.ndarray] | None) -> None:
    """stmatrix."""
    cta = w.cta
    rows, offsets = matrix_offsets(w, address, len(values))
    shaped = [np.broadcast_to(value, (w.n,)).reshape(-1, WARP) for value in values]
    warps = np.repeat(w.warps, 8 * len(values))
    overwrite = races.accesses(w, cta, warps, rows, 16, True)
    matrix_fragments.store_matrices(cta.smem.data, offsets, shaped, transposed)
    if overwrite is not None:
        overwrite.check(w)
    if poison is None:
        cta.smem.mark_valid(rows, 16)
    else:
        good = np.uint32(0x01010101)
        shadow = [np.where(mask.reshape(-1, WARP), np.uint32(0), good) for mask in poison]
        matrix_fragments.store_matrices(cta.smem.valid, offsets, shadow, transposed)
    smem_hazards.check_store(w, warps, cta, rows, 16)
    if cta.observer is not None:
        cta.observer.shared_access(w, cta, None, rows.offsets, 16, True)


# ---------------------------------------------------------------- atomics

_ATOMIC = rf"(.(relaxed|acquire|release|acq_rel))?({SCOPE})?{SPACE}"


@op(
    rf"atom{_ATOMIC}.(?P<f>add).(?P<t>[us]32|u64)", rf"atom{_ATOMIC}.(?P<f>exch|cas).(?P<t>b(32|64))",
    rf"atom{_ATOMIC}.(?P<f>min|max).(?P<t>[us]32)", rf"atom.(?P<space>global|shared){SCOPE}.(?P<f>min|max).(?P<t>[us]32)",
    pure=False, taint="own", loads=True,
)  # fmt: skip
def atomic(e: Emitter, ins: Instruction, m: Match) -> None:
    """Read-modify-write that returns the old value; lanes act in order."""
    emit_atomic(e, ins, m, ins.operands[0], ins.operands[1], ins.operands[2:])


@op(rf"red{_ATOMIC}.(?P<f>add).(?P<t>[us]32|u64)", writes=(), pure=False, taint="own")
def reduction(e: Emitter, ins: Instruction, m: Match) -> None:
    """Read-modify-write without a result."""
    emit_atomic(e, ins, m, None, ins.operands[0], ins.operands[1:])


def emit_atomic(e: Emitter, ins: Instruction, m: Match, d: Operand | None, mem: Operand | None, rest: list[Operand | None]) -> None:
    """The common part of atom and red."""
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
    """Do an atomic lane by lane; returns the old bits (1, lanes)."""
    if space == "generic":
        space = "shared::cluster" if in_shared(address) else "global"
        address = address if space == "global" else shared_part(address)
    address = lanes_of(w, address)
    operands = [np.broadcast_to(value, (w.n,)) for value in values]
    size = values[0].dtype.itemsize
    order_memory(w)  # so that atomic operations are ordered among themselves
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
        if name == "add":
            after = before + after
        elif name in ("min", "max"):
            function = np.minimum if name == "min" else np.maximum
            after = function(before.view(operands[-1].dtype), operands[-1][lane : lane + 1]).view(before.dtype)
        elif name == "cas" and before[0] != operands[0][lane]:
            after = before
        old[0, lane] = before[0]
        store_one(w, where, after, space)
    w.cta.poison = None
    w.cta.machine.progress += 1
    order_memory(w)
    return old


def load_one(w: Window, address: np.ndarray, size: int, space: str) -> np.ndarray:
    """One element for an atomic; poison in memory is a finding."""
    cta = w.cta
    if space != "global":
        target = cta.peer(int(address[0]) >> 24)
        values, poison = target.smem.load(shared_pattern(address), size, 1)
    else:
        values, poison = cta.machine.memory.load(GlobalAccess(address, size), size)
    if poison is not None:
        cta.report(w, "poison", "an atomic operation on an undefined value")
    return values[0].copy()


def store_one(w: Window, address: np.ndarray, value: np.ndarray, space: str) -> None:
    """Write back one element of an atomic."""
    cta = w.cta
    if space != "global":
        cta.peer(int(address[0]) >> 24).smem.store(shared_pattern(address), [value])
    else:
        cta.machine.memory.store(GlobalAccess(address, value.dtype.itemsize), [value])


# ---------------------------------------------------------------- fences and hints


@op(
    r"fence.proxy.async(.(global|shared::cta|shared::cluster))?",
    rf"fence(.(sc|acq_rel))?{SCOPE}",
    r"fence.mbarrier_init.release.cluster",
    r"membar.(cta|gl|sys)",
    writes=(), pure=False,
)  # fmt: skip
def fence(e: Emitter, ins: Instruction, m: Match) -> None:
    """Without an atomic operation or a strong access, which hand over everything as it is, a fence orders nothing between warps."""
    if ins.opcode.startswith("fence.proxy") and not ins.opcode.endswith("global"):
        e.line("order_proxies(w)")
    if not ins.opcode.endswith((".global", ".cta")):
        e.line("order_barriers(w)")
    e.line(f"if w.cta.observer is not None: w.cta.observer.fence(w, {ins.opcode!r})")


ignored(r"prefetch.(tensormap|param.tensormap|const.tensormap)", "a hint: no effect on results")
ignored(r"prefetch.global.(L1|L2|L2::evict_last|L2::evict_normal)", "a hint: no effect on results")


@op(r"createpolicy.fractional.L2::(evict_last|evict_normal|evict_first|evict_unchanged)(.L2::(evict_first|evict_unchanged))?.b64")
def create_policy(e: Emitter, ins: Instruction, m: Match) -> None:
    """Cache policies have no effect on results: any value will do."""
    e.line(f"{e.dst(ins.operands[0], 'b64')}.fill(0)")

"""ldmatrix, stmatrix and movmatrix: matrices between shared memory and the registers of a warp, or among these."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..checks import races, smem_hazards
from ..findings import Fault
from ..frontend.ptx import Instruction, Vec
from ..numerics import matrix_fragments
from ..state.access import SharedPattern, all_true, shared_pattern
from ..state.registers import WARP
from ..state.window import Window
from .emitter import Emitter, Unsupported
from .memory_ops import lanes_of, store_loaded
from .table import op, registers_of, runtime

Match = re.Match[str]


@op(r"ldmatrix.sync.aligned.m8n8.x(?P<n>1|2|4)(?P<t>.trans)?.shared(::cta)?.b16", needs="warp", pure=False, taint="own", loads=True)
def load_matrix(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a load of 8x8 matrices of 16-bit elements from shared memory."""
    items = ins.operands[0].items if isinstance(ins.operands[0], Vec) else (ins.operands[0],)
    e.check_taint(registers_of(ins.operands[1]), "an address")
    value = e.temp()
    e.line(f"{value} = load_matrices(w, {e.memory_address(ins.operands[1], 32)}, {int(m['n'])}, {bool(m['t'])})")
    store_loaded(e, items, value, "b32")


@op(r"ldmatrix.sync.aligned.m16n16.x(?P<n>1|2).trans.shared(::cta)?.b8", needs="warp", pure=False, taint="own", loads=True)
def load_byte_matrix(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a load of 16x16 matrices of bytes from shared memory, transposed."""
    items = ins.operands[0].items if isinstance(ins.operands[0], Vec) else (ins.operands[0],)
    count = int(m["n"])
    if len(items) != 2 * count:
        raise Unsupported(f"{len(items)} registers for {count} matrices of 16x16 bytes")
    e.check_taint(registers_of(ins.operands[1]), "an address")
    value = e.temp()
    e.line(f"{value} = load_byte_matrices(w, {e.memory_address(ins.operands[1], 32)}, {count})")
    store_loaded(e, items, value, "b32")


@op(
    r"stmatrix.sync.aligned.m8n8.x(?P<n>1|2|4)(?P<t>.trans)?.shared(::cta)?.b16",
    r"stmatrix.sync.aligned.m16n8.x(?P<n>1|2|4)(?P<t>.trans).shared(::cta)?.(?P<b>b8)",
    needs="warp", writes=(), pure=False, taint="own",
)  # fmt: skip
def store_matrix(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a store of 8x8 matrices of 16-bit elements, or of 16x8 matrices of bytes, to shared memory."""
    source = ins.operands[1]
    items = source.items if isinstance(source, Vec) else (source,)
    e.check_taint(registers_of(ins.operands[0]), "an address")
    values = ", ".join(e.src(item, "b32") for item in items)
    poison = f"[{', '.join(str(e.taint(item)) for item in items)}]" if e.tainted else "None"
    layout = "bytes" if "b" in m.groupdict() else "columns" if m["t"] else "rows"
    e.line(f"store_matrices(w, {e.memory_address(ins.operands[0], 32)}, [{values}], {layout!r}, {poison})")


@op(r"movmatrix.sync.aligned.m8n8.trans.b16", needs="warp", pure=False, taint="own")
def transpose_in_registers(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit the transposition of an 8x8 matrix of 16-bit elements. An undefined element poisons the registers that hold it."""
    d, a = ins.operands
    emit_transposed(e, d, e.src(a, "b32"), registers_of(a))


def emit_transposed(e: Emitter, d: Any, value: str, sources: list[Any]) -> None:
    """Emit the transposition of a value to register d. sources: the registers that it comes from."""
    if e.tainted:
        taint = e.taint_of(sources)
        e.line(f"{e.taint(d)}[...] = {f'transpose_poison(w, {taint})' if taint else 'False'}")
    e.line(f"{e.dst(d, 'b32')}[...] = transpose_matrix(w, {value})")


@runtime
def transpose_matrix(w: Window, value: np.ndarray) -> np.ndarray:
    """Execute movmatrix. Raise Fault for partial warps."""
    if not w.whole:
        raise Fault("divergence", "movmatrix needs all 32 lanes of its warps")
    return matrix_fragments.transpose_matrix(lanes_of(w, value).astype(np.uint32).reshape(-1, WARP)).ravel()


@runtime
def transpose_poison(w: Window, poisoned: np.ndarray) -> np.ndarray:
    """Return which lanes have an undefined element of a transposed matrix."""
    return transpose_matrix(w, np.where(poisoned, np.uint32(0xFFFFFFFF), np.uint32(0))) != 0


_STORES: dict[str, Callable[..., None]] = {
    "rows": partial(matrix_fragments.store_matrices, transposed=False),
    "columns": partial(matrix_fragments.store_matrices, transposed=True),
    "bytes": matrix_fragments.store_byte_matrices,
}


def matrix_offsets(w: Window, address: np.ndarray, count: int) -> tuple[SharedPattern, np.ndarray]:
    """Return the rows that a matrix move accesses, and offsets per (warp, lane).

    Raises Fault for partial warps, bad addresses or other CTAs.
    """
    if not w.whole:
        raise Fault("divergence", "a matrix load or store needs all 32 lanes of its warps")
    address = lanes_of(w, address)
    rows = shared_pattern(address if 8 * count == WARP else address.reshape(-1, WARP)[:, : 8 * count].ravel())
    if rows.rank != w.cta.rank:
        raise Fault("out_of_bounds", "a matrix load or store outside the CTA's own shared memory")
    if rows.bits & 15:
        raise Fault("misaligned", "a matrix row that is not at a multiple of 16 bytes")
    w.cta.smem.check(rows.low, rows.high + 16, "matrix access")
    return rows, shared_pattern(address).offsets.reshape(-1, WARP)


@runtime
def load_matrices(w: Window, address: np.ndarray, count: int, transposed: bool) -> np.ndarray:
    """Execute ldmatrix of 8x8 matrices."""
    rows, offsets = matrix_offsets(w, address, count)
    return matrices_read(w, rows, lambda memory: matrix_fragments.load_matrices(memory, offsets, count, transposed))


@runtime
def load_byte_matrices(w: Window, address: np.ndarray, count: int) -> np.ndarray:
    """Execute ldmatrix of 16x16 matrices of bytes."""
    rows, offsets = matrix_offsets(w, address, 2 * count)
    return matrices_read(w, rows, lambda memory: matrix_fragments.load_byte_matrices(memory, offsets, count))


def matrices_read(w: Window, rows: SharedPattern, read: Callable[[np.ndarray], list[np.ndarray]]) -> np.ndarray:
    """Return the registers (registers, lanes) that a function reads from memory. Leave their poison in the CTA."""
    cta = w.cta
    values, valid = (np.stack(read(memory)).reshape(-1, w.n) for memory in (cta.smem.data, cta.smem.valid))
    known = valid == 0x01010101
    cta.poison = None if all_true(known) else ~known
    races.accesses(w, cta, np.repeat(w.warps, len(rows.offsets) // len(w.warps)), rows, 16, False)
    if w.observer is not None:
        w.observer.shared_access(w, cta, None, rows.offsets, 16, False)
    return values


@runtime
def store_matrices(w: Window, address: np.ndarray, values: list[np.ndarray], layout: str, poison: list[np.ndarray] | None) -> None:
    """Execute stmatrix. layout: rows, columns (.trans) or bytes (.trans.b8)."""
    cta = w.cta
    rows, offsets = matrix_offsets(w, address, len(values))
    shaped = [np.broadcast_to(value, (w.n,)).reshape(-1, WARP) for value in values]
    warps = np.repeat(w.warps, 8 * len(values))
    overwrite = races.accesses(w, cta, warps, rows, 16, True)
    _STORES[layout](cta.smem.data, offsets, shaped)
    if overwrite is not None:
        overwrite.check(w)
    if poison is None:
        cta.smem.mark_valid(rows, 16)
    else:
        good = np.uint32(0x01010101)
        shadow = [np.where(mask.reshape(-1, WARP), np.uint32(0), good) for mask in poison]
        _STORES[layout](cta.smem.valid, offsets, shadow)
    smem_hazards.check_store(w, warps, cta, rows, 16)
    if w.observer is not None:
        w.observer.shared_access(w, cta, None, rows.offsets, 16, True)

"""wgmma products: the chains of a warpgroup's queue, computed and written to its registers."""

from __future__ import annotations

import numpy as np

from ..findings import Fault
from ..numerics import wgmma
from ..state.cta import Cta
from ..state.engine_protocol import Engine
from ..state.memory import SharedMemory
from ..state.registers import WARP
from ..state.wgmma_queue import WARPGROUP, WgmmaChain, WgmmaQueue


def flush(engine: Engine, cta: Cta, queue: WgmmaQueue, keep: int) -> None:
    """Compute all but the newest `keep` committed groups."""
    for chain in queue.take(keep):
        multiply(engine, cta, queue.first_thread, chain)


def finish_open(engine: Engine, cta: Cta, queue: WgmmaQueue) -> None:
    """Compute everything issued so far, committed or not."""
    flush(engine, cta, queue, 0)
    for chain in queue.take_open():
        multiply(engine, cta, queue.first_thread, chain)


def multiply(engine: Engine, cta: Cta, first: int, chain: WgmmaChain) -> None:
    """Compute a chain of the warpgroup from thread `first` on; write its accumulator registers, with poison. Raises Fault out of bounds."""
    form = chain.form
    smem = cta.smem
    threads = slice(first, first + WARPGROUP)
    b = wgmma.operand(tuple(chain.b), form.n, chain.b_major)
    bad_columns = poisoned_rows(b, smem)
    bad_rows: np.ndarray | None
    try:
        right = wgmma.operand_values(b, smem.data, form.b)
        if chain.from_registers:
            left = np.concatenate([wgmma.a_from_registers(values, form.a) for values in chain.a_values], axis=1)
            bad_rows = poisoned_register_rows(chain.a_poison)
        else:
            a = wgmma.operand(tuple(chain.a), wgmma.M, chain.a_major)
            left = wgmma.operand_values(a, smem.data, form.a)
            bad_rows = poisoned_rows(a, smem)
        if b.ranges[-1][1] > smem.nbytes:
            raise ValueError(f"wgmma operand ends at {b.ranges[-1][1]:#x}, beyond the CTA's shared memory of {smem.nbytes:#x}")
    except ValueError as error:
        raise Fault("out_of_bounds", str(error)) from error
    bank = cta.registers.banks["r"]
    addend = None
    if chain.read_accumulator:
        addend = wgmma.registers_to_tile(bank[chain.rows, threads], form.n, form.d)
    tile = wgmma.multiply_accumulate(form, left, right, addend, chain.negate)
    bank[chain.rows, threads] = wgmma.tile_to_registers(tile, form.d)
    spread_poison(engine, cta, threads, chain, bad_rows, bad_columns)


def poisoned_rows(where: wgmma.Operand, smem: SharedMemory) -> np.ndarray | None:
    """Find the rows of an operand (of B: columns of D) that contain bytes never written; None for none."""
    known = where.read(smem.valid).view(np.uint64) == 0x0101010101010101
    if known.all():
        return None
    if not where.mn_major:
        return ~known.all(axis=1)
    raw = where.read(smem.valid).view(np.uint16).reshape(where.chunks.shape[0], -1)
    return ~(raw == 0x0101).all(axis=0)


def poisoned_register_rows(poison: list[np.ndarray | None]) -> np.ndarray | None:
    """Find the rows of A that poisoned registers hold (each entry: (4, 128) bool); None for none."""
    rows = np.zeros(wgmma.M, bool)
    for mask in poison:
        if mask is not None:
            register, thread = np.nonzero(mask)
            rows[16 * (thread // 32) + thread % 32 // 4 + 8 * (register % 2)] = True
    return rows if rows.any() else None


def spread_poison(engine: Engine, cta: Cta, threads: slice, chain: WgmmaChain, rows: np.ndarray | None, columns: np.ndarray | None) -> None:
    """Poison the accumulator registers whose row of A or column of B is poisoned, or that were poisoned before."""
    tainted = engine.is_tainted(cta, threads.start)
    if rows is None and columns is None and not tainted:
        return
    where_row, where_column = wgmma.accumulator_map(chain.form.n, chain.form.d)
    bad: np.ndarray = np.zeros(where_row.shape, bool)
    if rows is not None:
        bad |= rows[where_row]
    if columns is not None:
        bad |= columns[where_column]
    if bad.ndim == 3:
        bad = np.asarray(bad.any(axis=2))
    if np.count_nonzero(bad):
        engine.taint_warps(cta, range(threads.start // WARP, threads.stop // WARP))
        tainted = True
    if tainted:
        shadow = cta.registers.taints["r"]
        if chain.read_accumulator:
            bad |= shadow[chain.rows, threads]
        shadow[chain.rows, threads] = bad

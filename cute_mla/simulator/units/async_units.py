"""Asynchronous work: what has been issued and has not yet taken effect.

A copy tracked by an mbarrier is a PendingCopy of the machine. A store of a bulk group has two steps, reading shared memory
and writing global memory; the wait of its thread forces one or both. Products of wgmma wait in their warpgroup's pipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..findings import Fault
from ..numerics import tma, wgmma
from ..state.memory import Buffer, SharedMemory
from ..state.registers import WARP

if TYPE_CHECKING:
    from ..engine.machine import Machine
    from ..state.barriers import Mbarrier
    from ..state.cta import Cta, Origin

WARPGROUP = 4 * WARP
MAX_RECENT = 64  # sets of operands of a warpgroup's products that are remembered

Writes = Sequence[tuple["Cta", int, int]]  # shared bytes: CTA, start, stop


@dataclass
class PendingCopy:
    """Work that completes by itself at some time. barriers: the mbarriers it signals. writes: shared bytes (CTA, start, stop)."""

    effect: Callable[[], None]
    origin: Origin
    barriers: list[Mbarrier]
    writes: Writes = ()
    done: bool = False
    what: str = "an asynchronous copy"
    quiet: bool = False  # may complete after the CTA has exited: only the CTA itself could tell

    def complete(self) -> None:
        """Let it take effect, once."""
        if not self.done:
            self.done = True
            self.effect()


@dataclass
class GroupedCopy:
    """Work that a thread waits for by group. read: takes its source; write: stores it. Steps run once, in this order.

    source: shared bytes [start, stop) that it reads. waited: a thread has waited for that, whenever it really happened.
    serial: number of a cp.async among those of its warp (order.py).
    """

    read: Callable[[], None]
    write: Callable[[], None]
    origin: Origin
    source: tuple[int, int] = (0, 0)
    stage: int = 0
    waited: bool = False
    serial: int = 0

    def advance(self, stage: int) -> None:
        """Go through the steps up to stage (1: source read, 2: all done)."""
        if self.stage < 1 <= stage:
            self.stage = 1
            self.read()
        if self.stage < 2 <= stage:
            self.stage = 2
            self.write()


@dataclass
class CopyGroups:
    """The bulk groups (or cp.async groups) of one thread (or warp)."""

    open: list[GroupedCopy] = field(default_factory=list)
    committed: list[list[GroupedCopy]] = field(default_factory=list)

    def commit(self) -> None:
        """Close the open group, empty or not."""
        self.committed.append(self.open)
        self.open = []

    def wait(self, remaining: int, stage: int) -> list[GroupedCopy]:
        """Complete all but the newest `remaining` groups up to a stage. Returns the copies that had not been waited for before."""
        stop = len(self.committed) - remaining
        done = []
        for group in self.committed[: max(stop, 0)]:
            for copy in group:
                if not copy.waited:
                    done.append(copy)
                copy.waited = True
                copy.advance(stage)
        if stage == 2 and stop > 0:
            del self.committed[:stop]
        return done

    def unfinished(self) -> list[GroupedCopy]:
        """Copies whose source may still be read, as far as the thread knows."""
        return [copy for group in (*self.committed, self.open) for copy in group if not copy.waited]


# ---------------------------------------------------------------- boxes


def buffer_of(machine: Machine, box: tma.Box, write: bool) -> Buffer | None:
    """The buffer that a box lies in; None when the box is outside its tensor."""
    low, high = box.gmem_range
    return machine.memory.require(low, high, write) if high > low else None


def load_box(machine: Machine, box: tma.Box, smem: SharedMemory) -> None:
    """Global memory to a shared-memory box, with the shadow."""
    smem.check(*box.smem_range, "TMA write")
    buffer = buffer_of(machine, box, False)
    empty = np.empty(0, np.uint8)
    tma.load_box(box, empty if buffer is None else buffer.data, 0 if buffer is None else buffer.address, smem.data)
    if buffer is not None and buffer.valid is not None:
        tma.load_box(box, buffer.valid, buffer.address, smem.valid, fill=1)
        return
    low, high = box.smem_range
    if high - low == box.nbytes:
        smem.valid[low:high] = 1
        return
    units = smem.valid[box.smem_base : box.smem_base + box.layout.high].reshape(-1, box.layout.unit)
    units[box.layout.inside] = 1
    if box.layout.outside is not None:
        units[box.layout.outside] = 1


def box_store(machine: Machine, cta: Cta, box: tma.Box, origin: Origin, add: bool) -> GroupedCopy:
    """A shared-memory box to global memory, or added to it."""
    held: list[np.ndarray] = []

    def read() -> None:
        cta.smem.check(*box.smem_range, "TMA read")
        held.append(cta.smem.data.copy() if add else tma.read_shared(box, cta.smem.data))
        if not tma.read_shared(box, cta.smem.valid).view(np.uint8).all():
            machine.report_at(origin, "poison", "a TMA store writes undefined bytes of shared memory to global memory")

    def write() -> None:
        buffer = buffer_of(machine, box, True)
        if buffer is None:
            return
        if add:
            tma.add_box(box, buffer.data, buffer.address, held[0])
        else:
            tma.write_global(box, buffer.data, buffer.address, held[0])
        if buffer.valid is not None:
            ones = np.frombuffer(b"\1" * box.layout.unit, np.dtype(f"V{box.layout.unit}"))[0]
            dtype = held[0].dtype if not add else np.dtype(f"u{box.layout.unit}")
            marks = np.full(box.layout.inside.shape, ones, np.dtype(f"V{box.layout.unit}")).view(dtype)
            tma.write_global(box, buffer.valid, buffer.address, marks)
        machine.progress += 1

    return GroupedCopy(read, write, origin, box.smem_range)


# ---------------------------------------------------------------- wgmma


@dataclass
class Chain:
    """Consecutive wgmmas on one accumulator, multiplied as one.

    rows: registers of the accumulator in bank "r". a: descriptors, or copies of the A registers of each step with their
    poison. b: descriptors. serial: its number in the warpgroup, once it has been waited for.
    """

    form: wgmma.Instruction
    rows: np.ndarray
    read_accumulator: bool
    negate: bool
    a_major: bool
    b_major: bool
    from_registers: bool
    origin: Origin
    a: list[int] = field(default_factory=list)
    a_values: list[np.ndarray] = field(default_factory=list)
    a_poison: list[np.ndarray | None] = field(default_factory=list)
    b: list[int] = field(default_factory=list)
    serial: int = 0

    def extends(self, other: Chain) -> bool:
        """True when other may be appended: the same accumulator, read and of the same kind."""
        return (
            other.read_accumulator
            and other.rows is self.rows
            and other.form == self.form
            and (other.negate, other.a_major, other.b_major, other.from_registers)
            == (self.negate, self.a_major, self.b_major, self.from_registers)
            and not (self.form.satfinite or self.form.d == "f16")
        )

    def append(self, other: Chain) -> None:
        """Add the steps of another chain."""
        self.a += other.a
        self.a_values += other.a_values
        self.a_poison += other.a_poison
        self.b += other.b


@dataclass
class Pipe:
    """The tensor-core work of one warpgroup.

    busy, sources: bit masks of registers that are written / read by unfinished work. reading: chains of the open group and of
    committed ones, kept until they are waited for even if they have been computed. recent: the latest that have been waited for on each
    set of operands, oldest first; serial: number of the last.
    """

    first_thread: int
    open: list[Chain] = field(default_factory=list)
    groups: list[list[Chain]] = field(default_factory=list)
    waiting_masks: list[tuple[int, int]] = field(default_factory=list)  # of each committed group not yet waited for
    open_masks: tuple[int, int] = (0, 0)
    reading: list[list[Chain]] = field(default_factory=lambda: [[]])
    busy: int = 0
    sources: int = 0
    recent: dict[object, Chain] = field(default_factory=dict)
    serial: int = 0

    def issue(self, chain: Chain, busy: int, sources: int) -> None:
        """Add one wgmma."""
        self.open_masks = (self.open_masks[0] | busy, self.open_masks[1] | sources)
        self._masks()
        if self.open and self.open[-1].extends(chain):
            self.open[-1].append(chain)
        else:
            self.open.append(chain)
            self.reading[-1].append(chain)

    def commit(self) -> None:
        """Close the open group."""
        self.groups.append(self.open)
        self.open = []
        self.reading.append([])
        self.waiting_masks.append(self.open_masks)
        self.open_masks = (0, 0)

    def flush(self, cta: Cta, keep: int) -> None:
        """Compute all but the newest `keep` committed groups."""
        while len(self.groups) > keep:
            for chain in self.groups.pop(0):
                multiply(cta, self.first_thread, chain)

    def finish_open(self, cta: Cta) -> None:
        """Compute everything issued so far, committed or not."""
        self.flush(cta, 0)
        for chain in self.open:
            multiply(cta, self.first_thread, chain)
        self.open = []

    def wait(self, cta: Cta, remaining: int) -> None:
        """wgmma.wait_group: results and sources of all but the newest `remaining` groups are free."""
        self.flush(cta, remaining)
        done = max(len(self.waiting_masks) - remaining, 0)
        del self.waiting_masks[:done]
        for group in self.reading[:done]:
            for chain in group:
                self._remember(chain)
        del self.reading[:done]
        self._masks()

    def _remember(self, chain: Chain) -> None:
        self.serial += 1
        chain.serial = self.serial
        chain.a_values, chain.a_poison = [], []
        key = (tuple(chain.a), tuple(chain.b))
        self.recent.pop(key, None)
        self.recent[key] = chain
        if len(self.recent) > MAX_RECENT:
            del self.recent[next(iter(self.recent))]

    def unknown(self, done: int) -> Iterator[Chain]:
        """Recent chains behind a number, newest first."""
        if self.serial > done:
            for chain in reversed(self.recent.values()):
                if chain.serial <= done:
                    return
                yield chain

    def unwaited(self) -> Iterator[Chain]:
        """Chains whose operands nobody knows to have been read."""
        return (chain for group in self.reading for chain in group)

    def _masks(self) -> None:
        self.busy, self.sources = self.open_masks
        for busy, sources in self.waiting_masks:
            self.busy |= busy
            self.sources |= sources


def multiply(cta: Cta, first: int, chain: Chain) -> None:
    """Compute a chain and write the accumulator registers, with poison."""
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
    bank = cta.slot.banks["r"]
    addend = None
    if chain.read_accumulator:
        addend = wgmma.registers_to_tile(bank[chain.rows, threads], form.n, form.d)
    tile = wgmma.multiply_accumulate(form, left, right, addend, chain.negate)
    bank[chain.rows, threads] = wgmma.tile_to_registers(tile, form.d)
    spread_poison(cta, threads, chain, bad_rows, bad_columns)


def poisoned_rows(where: wgmma.Operand, smem: SharedMemory) -> np.ndarray | None:
    """Which rows (of A, or of B: columns of D) contain bytes that were never written; None for none."""
    known = where.read(smem.valid).view(np.uint64) == 0x0101010101010101
    if known.all():
        return None
    if not where.mn_major:
        return ~known.all(axis=1)
    raw = where.read(smem.valid).view(np.uint16).reshape(where.chunks.shape[0], -1)
    return ~(raw == 0x0101).all(axis=0)


def poisoned_register_rows(poison: list[np.ndarray | None]) -> np.ndarray | None:
    """Rows of A held by poisoned registers (each entry: (4, 128) bool)."""
    rows = np.zeros(wgmma.M, bool)
    for mask in poison:
        if mask is not None:
            register, thread = np.nonzero(mask)
            rows[16 * (thread // 32) + thread % 32 // 4 + 8 * (register % 2)] = True
    return rows if rows.any() else None


def spread_poison(cta: Cta, threads: slice, chain: Chain, rows: np.ndarray | None, columns: np.ndarray | None) -> None:
    """Poison the accumulator registers whose row of A or column of B is poisoned, or that were poisoned before."""
    tainted = cta.is_tainted(threads.start)
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
        cta.taint_warps(range(threads.start // WARP, threads.stop // WARP))
        tainted = True
    if tainted:
        shadow = cta.slot.taints["r"]
        if chain.read_accumulator:
            bad |= shadow[chain.rows, threads]
        shadow[chain.rows, threads] = bad

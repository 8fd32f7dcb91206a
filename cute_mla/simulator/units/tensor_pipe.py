"""The tensor core of a CTA (or of a CTA pair, whose issuing CTA keeps the queue): products, copies to tensor memory, commits.

Work executes in the order of issue, at the latest when a commit behind it must arrive. Consecutive products on one accumulator are one
matrix product of the summed depth. A commit hands over the knowledge (order.py) that the work of its thread is done; tensor_in_use.py keeps
those who do not have it away from the operands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from ..checks import phases
from ..findings import Fault
from ..numerics import tcgen05 as forms
from ..numerics.wgmma import TO_F32, Operand
from ..state.registers import WARP
from ..state.tensor_memory import split_address
from .async_units import PendingCopy

if TYPE_CHECKING:
    from ..checks.order import Clock
    from ..state.barriers import Mbarrier
    from ..state.cta import Cta, Origin
    from ..state.memory import SharedMemory

MAX_RECENT = 64
_EXACT_DEPTH = 256  # sums of this many products of 8-bit integers are exact in float32


class Cells(NamedTuple):
    """Cells of a CTA's tensor memory. blocks: bit mask of blocks of 16 lanes. Columns [low, high)."""

    cta: Cta
    blocks: int
    low: int
    high: int

    def meets(self, other: Cells) -> bool:
        """Whether two sets of cells have some in common."""
        return self.cta is other.cta and bool(self.blocks & other.blocks) and self.low < other.high and other.low < self.high


class Work(Protocol):
    """Something a tensor core does. thread: who issued it. serial: its number on this tensor core (of the last step of a chain)."""

    origin: Origin
    thread: int
    serial: int
    what: str

    def key(self) -> object:
        """The same for work on the same operands."""

    def execute(self) -> None:
        """Take effect."""

    def written(self) -> Sequence[Cells]:
        """Cells of tensor memory that it writes."""

    def read(self) -> Sequence[Cells]:
        """Cells of tensor memory that it only reads."""

    def sources(self) -> Iterator[tuple[Cta, tuple[tuple[int, int], ...]]]:
        """Byte ranges of shared memory that it reads."""


@dataclass
class Chain:
    """Consecutive products on one accumulator. ctas: one, or the pair with the even one first. a, b: descriptors, or addresses of A.

    mask: one int per CTA whose set bits are lanes that are not written. scale: D is divided by 2**scale first.
    """

    form: forms.MmaForm
    product: forms.Product
    ctas: tuple[Cta, ...]
    d: int
    accumulate: bool
    scale: int
    mask: tuple[int, ...]
    from_tensor_memory: bool
    origin: Origin
    thread: int
    a: list[int] = field(default_factory=list)
    b: list[int] = field(default_factory=list)
    serial: int = 0
    what: str = "a tcgen05.mma"
    known_a: Operand = None  # type: ignore[assignment]
    known_b: Operand = None  # type: ignore[assignment]
    known_steps: list[int] = field(default_factory=lambda: [0, 0])  # steps that known_a and known_b were made of

    def extends(self, other: Chain) -> bool:
        """True when other may be appended."""
        return (
            other.accumulate
            and not other.scale
            and (other.d, other.thread, other.mask, other.from_tensor_memory) == (self.d, self.thread, self.mask, self.from_tensor_memory)
            and other.form == self.form
            and other.product == self.product
            and self.product.d != "f16"
            and not self.product.saturate
        )

    def key(self) -> object:
        """The same for work on the same operands."""
        return self.d, self.product, self.from_tensor_memory, tuple(self.a), tuple(self.b)

    def operand_b(self) -> Operand:
        """B as each CTA holds it."""
        if len(self.b) != self.known_steps[1]:
            part = self.product.n // self.form.group
            self.known_b = forms.operand(tuple(self.b), part, self.product.b_mn, self.product.item_bytes)
            self.known_steps[1] = len(self.b)
        return self.known_b

    def operand_a(self) -> Operand:
        """A as each CTA holds it in shared memory."""
        if len(self.a) != self.known_steps[0]:
            part = self.product.m // self.form.group
            self.known_a = forms.operand(tuple(self.a), part, self.product.a_mn, self.product.item_bytes)
            self.known_steps[0] = len(self.a)
        return self.known_a

    def written(self) -> list[Cells]:
        """Cells of D."""
        lane, column = split_address(self.d)
        blocks = forms.lane_blocks(self.form, self.product.m, lane)
        return [Cells(cta, blocks, column, column + forms.footprint(self.form, self.product)) for cta in self.ctas]

    def read(self) -> list[Cells]:
        """Cells of A, where that lies in tensor memory."""
        if not self.from_tensor_memory:
            return []
        return [cells for address in self.a for cells in self.read_at(address)]

    def read_at(self, address: int) -> list[Cells]:
        """Cells of A of one step."""
        lane, column = split_address(address)
        blocks = forms.lane_blocks(self.form, self.product.m, lane)
        return [Cells(cta, blocks, column, column + forms.STEP_COLUMNS) for cta in self.ctas]

    def sources(self) -> Iterator[tuple[Cta, tuple[tuple[int, int], ...]]]:
        """Byte ranges of shared memory."""
        operands = [self.operand_b()] if self.from_tensor_memory else [self.operand_b(), self.operand_a()]
        for cta in self.ctas:
            for where in operands:
                yield cta, where.ranges

    def execute(self) -> None:
        """Multiply."""
        try:
            multiply(self)
        except ValueError as error:
            raise Fault("out_of_bounds", str(error)) from error


@dataclass
class Commit:
    """An arrival on mbarriers once everything before it is done. clock: what those learn that wait for it."""

    barriers: list[Mbarrier]
    clock: Clock
    pending: PendingCopy


class TensorPipe:
    """The queue of one issuing CTA.

    recent: the latest work on each set of operands, oldest first. last: number of each thread's last work.
    """

    def __init__(self, cta: Cta) -> None:
        self.cta = cta
        self.queue: list[Work | Commit] = []
        self.recent: dict[object, Work] = {}
        self.serial = 0
        self.last: dict[int, int] = {}

    def issue(self, work: Work) -> None:
        """Queue work; a product joins the one before it where it can."""
        self.cta.machine.progress += 1
        self.serial += 1
        self.last[work.thread] = work.serial = self.serial
        chain = self.open_chain(work)
        if chain is not None:
            assert isinstance(work, Chain)
            self.recent.popitem()
            chain.a += work.a
            chain.b += work.b
            chain.serial = self.serial
            work = chain
        else:
            self.queue.append(work)
        key = work.key()
        self.recent.pop(key, None)
        self.recent[key] = work
        if len(self.recent) > MAX_RECENT:
            del self.recent[next(iter(self.recent))]

    def open_chain(self, work: Work) -> Chain | None:
        """The product at the end of the queue that this one continues."""
        last = self.queue[-1] if self.queue else None
        return last if isinstance(work, Chain) and isinstance(last, Chain) and last.extends(work) else None

    def unknown(self, done: int) -> Iterator[Work]:
        """Recent work behind a number, newest first."""
        for work in reversed(self.recent.values()):
            if work.serial <= done:
                return
            yield work

    def commit(self, thread: int, origin: Origin, barriers: list[Mbarrier], targets: list[Cta]) -> None:
        """Arrive on barriers, one in each target, when the thread's work is done."""
        machine = self.cta.machine
        clocks = self.cta.cluster.clocks
        clock = clocks.of(self.cta, (thread // WARP,)).copy()
        clock[clocks.core(self.cta)] = self.last.get(thread, 0)
        number = clock[clocks.committer(self.cta)] = clocks.issue(clocks.committer(self.cta))
        away = [target for target in targets if target is not self.cta]
        for target in away:
            self.cta.cluster.visits[clocks.committer(self.cta), target.rank] = (number, origin)
        pending = PendingCopy(lambda: self.run_through(item), origin, barriers, what="a tcgen05.commit", quiet=not away)
        item = Commit(barriers, clock, pending)
        self.queue.append(item)
        machine.progress += 1
        if machine.completes_now():
            item.pending.complete()
        else:
            machine.pending.append(item.pending)

    def run_through(self, last: Commit) -> None:
        """Execute everything up to a commit, with it."""
        machine = self.cta.machine
        while self.queue:
            item = self.queue.pop(0)
            if not isinstance(item, Commit):
                item.execute()
                continue
            if not item.pending.done:
                item.pending.done = True
                machine.pending = [copy for copy in machine.pending if copy is not item.pending]
            for barrier in item.barriers:
                phases.check_commit(self.cta, item.pending.origin, item.clock, barrier)
                barrier.knowledge.add(item.clock)
                machine.arrive(barrier, 1)
            if item is last:
                return


def unfinished_tensor_work(cta: Cta) -> Iterator[tuple[Origin | None, str]]:
    """What a CTA leaves behind that it should not: where it was issued, and in words."""
    if cta.tensor is not None and cta.tensor.allocations:
        held = ", ".join(f"{count} columns at {first:#x}" for first, count in sorted(cta.tensor.allocations.items()))
        yield None, f"the CTA exits without tcgen05.dealloc of {held}"
    if cta.tensor_pipe is not None:
        for item in cta.tensor_pipe.queue:
            if not isinstance(item, Commit):
                yield item.origin, "the CTA exits with tcgen05 work that has not been committed"


# ---------------------------------------------------------------- the product


def values_of(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Raw bits as float32, exactly."""
    return TO_F32[dtype](raw)


def unknown_rows(where: Operand, smem: SharedMemory, item: int) -> np.ndarray | None:
    """Which rows of an operand contain bytes that were never written; None for none."""
    known = where.read(smem.valid).view(np.uint64) == 0x0101010101010101
    if known.all():
        return None
    if not where.mn_major:
        return ~known.all(axis=1)
    raw = where.read(smem.valid).view(np.uint8).reshape(where.chunks.shape[0], -1, item)
    return np.asarray(~raw.all(axis=(0, 2)))


def shared_values(where: Operand, cta: Cta, product: forms.Product, dtype: str, extent: int) -> tuple[np.ndarray, np.ndarray | None]:
    """An operand in shared memory: (extent, k) in float32, and its rows that are poisoned."""
    smem = cta.smem
    if where.ranges[-1][1] > smem.nbytes:
        raise ValueError(f"tcgen05 operand ends at {where.ranges[-1][1]:#x}, beyond the CTA's shared memory of {smem.nbytes:#x}")
    values = values_of(where.read(smem.data), dtype)
    bad = unknown_rows(where, smem, product.item_bytes)
    if where.mn_major:
        return values.T[:extent], None if bad is None else bad[:extent]
    return values, bad


def tensor_values(chain: Chain, cta: Cta) -> tuple[np.ndarray, np.ndarray | None]:
    """A in tensor memory: all 128 lanes, (128, k) in float32, and the lanes that are poisoned."""
    memory = cta.tensor
    assert memory is not None
    columns = [split_address(address)[1] for address in chain.a]
    first, steps = columns[0], len(columns)
    if columns == list(range(first, first + steps * forms.STEP_COLUMNS, forms.STEP_COLUMNS)):
        raw = np.ascontiguousarray(memory.data[:, first : first + steps * forms.STEP_COLUMNS])
        known = memory.valid[:, first : first + steps * forms.STEP_COLUMNS]
    else:
        index = np.concatenate([np.arange(column, column + forms.STEP_COLUMNS) for column in columns])
        raw, known = np.ascontiguousarray(memory.data[:, index]), memory.valid[:, index]
    bad = None if known.all() else np.asarray(~known.all(axis=1))
    return values_of(raw, chain.product.a), bad


def multiply(chain: Chain) -> None:
    """Compute a chain and write D, with poison."""
    form, product = chain.form, chain.product
    lane, column = split_address(chain.d)
    where_b = chain.operand_b()
    parts = [shared_values(where_b, cta, product, product.b, product.n // form.group) for cta in chain.ctas]
    b = parts[0][0] if len(parts) == 1 else np.concatenate([part[0] for part in parts])
    bad_b = joined([part[1] for part in parts], product.n // form.group)
    for index, cta in enumerate(chain.ctas):
        if chain.from_tensor_memory:
            a, bad_a = tensor_values(chain, cta)
        else:
            a, bad_a = shared_values(chain.operand_a(), cta, product, product.a, product.m // form.group)
        for slab in forms.slabs(form, product.m, product.n, lane):
            rows = slab.lanes if chain.from_tensor_memory else slab.rows
            result = product_of(product, a[rows], b[slab.low : slab.high])
            bad = poison_of(None if bad_a is None else bad_a[rows], None if bad_b is None else bad_b[slab.low : slab.high])
            store(chain, cta, slab, column, result, bad, chain.mask[index])


def joined(masks: list[np.ndarray | None], rows: int) -> np.ndarray | None:
    """Poisoned rows of the halves of an operand, as one mask."""
    if all(mask is None for mask in masks):
        return None
    return np.concatenate([np.zeros(rows, bool) if mask is None else mask for mask in masks])


def poison_of(rows: np.ndarray | None, columns: np.ndarray | None) -> np.ndarray | None:
    """The cells of a product whose row of A or column of B is poisoned."""
    if rows is None and columns is None:
        return None
    if rows is None:
        assert columns is not None
        return columns[None, :]
    return rows[:, None] if columns is None else rows[:, None] | columns[None, :]


def product_of(product: forms.Product, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A B^T in float32 (integers: in a type that holds the sums exactly)."""
    if product.d == "s32" and a.shape[1] > _EXACT_DEPTH:
        a, b = a.astype(np.float64), b.astype(np.float64)
    result = np.matmul(a, b.T)
    return np.negative(result, out=result) if product.negate else result


def store(chain: Chain, cta: Cta, slab: forms.Slab, column: int, result: np.ndarray, bad: np.ndarray | None, mask: int) -> None:
    """Add a product to a slab of D, or put it there."""
    memory = cta.tensor
    assert memory is not None
    product = chain.product
    where = (slab.lanes, slice(column, column + slab.high - slab.low))
    known = None
    old = None
    if chain.accumulate:
        old = memory.data[where]
        known = memory.valid[where]
    words = accumulate(product, result, old, chain.scale)
    good: np.ndarray | bool = True if bad is None else ~bad
    if known is not None and not known.all():
        good = known & good
    if not mask:
        memory.data[where] = words
        memory.valid[where] = good
        return
    lanes = np.arange(128)[slab.lanes]
    keep = np.array([not mask >> int(lane) & 1 for lane in lanes])
    memory.data[lanes[keep], where[1]] = words[keep]
    memory.valid[lanes[keep], where[1]] = np.broadcast_to(good, words.shape)[keep]


def accumulate(product: forms.Product, result: np.ndarray, old: np.ndarray | None, scale: int) -> np.ndarray:
    """The new cells of D (uint32) from a product and the old cells; D of 16 bits lies in the lower half of a cell."""
    if product.d == "s32":
        total = result.astype(np.int64)
        if old is not None:
            total += old.view(np.int32)
        if product.saturate:
            total = np.clip(total, -(2**31), 2**31 - 1)
        return total.astype(np.int32).view(np.uint32)
    if old is not None:
        half = product.d == "f16"
        before = (old & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float32) if half else old.view(np.float32)
        result = result + (before * np.float32(2.0**-scale) if scale else before)
    if product.d == "f16":
        return result.astype(np.float16).view(np.uint16).astype(np.uint32)
    return np.ascontiguousarray(result, np.float32).view(np.uint32)

"""tcgen05.mma products: chains on one accumulator, computed from shared and tensor memory into tensor memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ..findings import Fault
from ..numerics import tcgen05 as forms
from ..numerics.blas import products, rounded
from ..numerics.wgmma import TO_F32, Operand
from ..state.cta import Cta
from ..state.memory import SharedMemory
from ..state.origin import Origin
from ..state.tensor_memory import split_address
from ..state.tensor_queue import Cells


@dataclass
class MmaChain:
    """Consecutive products on one accumulator, multiplied as one.

    ctas: one, or the pair with the even one first. d: address of D. a, b: descriptors, or addresses of A in tensor memory.
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

    def extends(self, other: object) -> bool:
        """Return True when other is a product that may be appended."""
        return (
            isinstance(other, MmaChain)
            and other.accumulate
            and not other.scale
            and (other.d, other.thread, other.mask, other.from_tensor_memory) == (self.d, self.thread, self.mask, self.from_tensor_memory)
            and other.form == self.form
            and other.product == self.product
            and self.product.d != "f16"
            and not self.product.saturate
        )

    def append(self, other: MmaChain) -> None:
        """Add the steps of another chain."""
        self.a += other.a
        self.b += other.b

    def key(self) -> object:
        """Return the same key for products on the same operands."""
        return self.d, self.product, self.from_tensor_memory, tuple(self.a), tuple(self.b)

    def operand_b(self) -> Operand:
        """Return B as each CTA holds it."""
        if len(self.b) != self.known_steps[1]:
            part = self.product.n // self.form.group
            self.known_b = forms.operand(tuple(self.b), part, self.product.b_mn, self.product.item_bytes)
            self.known_steps[1] = len(self.b)
        return self.known_b

    def operand_a(self) -> Operand:
        """Return A as each CTA holds it in shared memory."""
        if len(self.a) != self.known_steps[0]:
            part = self.product.m // self.form.group
            self.known_a = forms.operand(tuple(self.a), part, self.product.a_mn, self.product.item_bytes)
            self.known_steps[0] = len(self.a)
        return self.known_a

    def written(self) -> list[Cells]:
        """Return the cells of D."""
        lane, column = split_address(self.d)
        blocks = forms.lane_blocks(self.form, self.product.m, lane)
        return [Cells(cta.rank, blocks, column, column + forms.footprint(self.form, self.product)) for cta in self.ctas]

    def read(self) -> list[Cells]:
        """Return the cells of A; none where A lies in shared memory."""
        if not self.from_tensor_memory:
            return []
        return [cells for address in self.a for cells in self.read_at(address)]

    def read_at(self, address: int) -> list[Cells]:
        """Return the cells of A of one step."""
        lane, column = split_address(address)
        blocks = forms.lane_blocks(self.form, self.product.m, lane)
        return [Cells(cta.rank, blocks, column, column + forms.STEP_COLUMNS) for cta in self.ctas]

    def sources(self) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
        """Yield CTA rank and byte ranges of the operands in shared memory."""
        operands = [self.operand_b()] if self.from_tensor_memory else [self.operand_b(), self.operand_a()]
        for cta in self.ctas:
            for where in operands:
                yield cta.rank, where.ranges

    def execute(self) -> None:
        """Multiply. Raises Fault out of bounds."""
        try:
            multiply(self)
        except ValueError as error:
            raise Fault("out_of_bounds", str(error)) from error


def values_of(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Convert raw bits to float32, exactly."""
    return TO_F32[dtype](raw)


def unknown_rows(where: Operand, smem: SharedMemory, item: int) -> np.ndarray | None:
    """Find the rows of an operand that contain bytes never written; None for none. item: bytes of an element."""
    known = where.read(smem.valid).view(np.uint64) == 0x0101010101010101
    if known.all():
        return None
    if not where.mn_major:
        return ~known.all(axis=1)
    raw = where.read(smem.valid).view(np.uint8).reshape(where.chunks.shape[0], -1, item)
    return np.asarray(~raw.all(axis=(0, 2)))


def shared_values(where: Operand, cta: Cta, product: forms.Product, dtype: str, extent: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Read an operand from shared memory: (extent, k) in float32, and its poisoned rows."""
    smem = cta.smem
    if where.ranges[-1][1] > smem.nbytes:
        raise ValueError(f"tcgen05 operand ends at {where.ranges[-1][1]:#x}, beyond the CTA's shared memory of {smem.nbytes:#x}")
    values = values_of(where.read(smem.data), dtype)
    bad = unknown_rows(where, smem, product.item_bytes)
    if where.mn_major:
        return values.T[:extent], None if bad is None else bad[:extent]
    return values, bad


def tensor_values(chain: MmaChain, cta: Cta) -> tuple[np.ndarray, np.ndarray | None]:
    """Read A from tensor memory: (128 lanes, k) in float32, and its poisoned lanes."""
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


def multiply(chain: MmaChain) -> None:
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
    """Join the poisoned rows of the halves of an operand to one mask; None for none."""
    if all(mask is None for mask in masks):
        return None
    return np.concatenate([np.zeros(rows, bool) if mask is None else mask for mask in masks])


def poison_of(rows: np.ndarray | None, columns: np.ndarray | None) -> np.ndarray | None:
    """Return the mask of D whose row of A or column of B is poisoned; None for none."""
    if rows is None and columns is None:
        return None
    if rows is None:
        assert columns is not None
        return columns[None, :]
    return rows[:, None] if columns is None else rows[:, None] | columns[None, :]


def product_of(product: forms.Product, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return A B^T in float32 (integers: in float64, which holds the sums exactly)."""
    sums = products(a, b)
    if product.negate:
        np.negative(sums, out=sums)
    return sums if product.d == "s32" else rounded(sums)


def store(chain: MmaChain, cta: Cta, slab: forms.Slab, column: int, result: np.ndarray, bad: np.ndarray | None, mask: int) -> None:
    """Add a product to a slab of D, or replace the slab. bad: poisoned elements. mask: lanes that are not written."""
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
    """Return the new cells of D (uint32) from a product and the old cells. D of 16 bits lies in the lower half of a cell."""
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

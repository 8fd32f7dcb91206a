"""Shared memory laid out once: a table of fields, from which the build takes sizes and offsets and the kernel its pointers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from ...manifest import Barrier
from .pipeline import StageBarriers
from .rows import store_vector

BOX_ROWS = 64
ROW_BYTES = 128  # of a row of a box: one period of the swizzle
CHUNK = 16  # bytes of one access
CHUNKS_PER_ROW = ROW_BYTES // CHUNK
CLEARING_THREADS = 128

SWIZZLE_PERIOD = 1024  # bytes of the 128-byte swizzle: tiles begin at a multiple of it
BARRIER_BYTES = 8
SWIZZLES = {64: warpgroup.SmemLayoutAtomKind.K_SW64, 128: warpgroup.SmemLayoutAtomKind.K_SW128}
MN_SWIZZLES = {32: warpgroup.SmemLayoutAtomKind.MN_SW32}


@dataclass(frozen=True)
class Array:
    """A flat array, allocated as a pointer to its first element."""

    name: str
    dtype: type[cutlass.Numeric]
    count: int
    alignment: int | None = None

    @property
    def nbytes(self) -> int:
        """Return its size."""
        return self.count * self.dtype.width // 8

    def allocate(self, smem: cutlass.memory.SmemAllocator) -> cute.Pointer:
        """Return the first element."""
        if self.alignment is None:
            return smem.allocate_array(self.dtype, self.count)
        return smem.allocate_array(self.dtype, self.count, byte_alignment=self.alignment)


@dataclass(frozen=True)
class Tile:
    """A tensor (rows, columns, stages) in boxes of `swizzle` bytes per row, as TMA writes and WGMMA reads them.

    K-major; MN-major in boxes of `swizzle` bytes per column if `mn_major`.
    """

    name: str
    dtype: type[cutlass.Numeric]
    shape: tuple[int, int, int]
    swizzle: int = 128
    mn_major: bool = False

    alignment = SWIZZLE_PERIOD

    @property
    def nbytes(self) -> int:
        """Return its size."""
        return math.prod(self.shape) * self.dtype.width // 8

    def allocate(self, smem: cutlass.memory.SmemAllocator) -> cute.Tensor:
        """Return the swizzled tensor."""
        swizzles = MN_SWIZZLES if self.mn_major else SWIZZLES
        atom = warpgroup.make_smem_layout_atom(swizzles[self.swizzle], self.dtype)
        layout = cute.tile_to_shape(atom, self.shape, (0, 1, 2))
        return smem.allocate_tensor(self.dtype, layout.outer, self.alignment, layout.inner)


@dataclass(frozen=True)
class Table:
    """A tensor without swizzle, the first mode contiguous."""

    name: str
    dtype: type[cutlass.Numeric]
    shape: int | tuple[int, ...]

    alignment = 16

    @property
    def nbytes(self) -> int:
        """Return its size."""
        shape = (self.shape,) if isinstance(self.shape, int) else self.shape
        return math.prod(shape) * self.dtype.width // 8

    def allocate(self, smem: cutlass.memory.SmemAllocator) -> cute.Tensor:
        """Return the tensor."""
        return smem.allocate_tensor(self.dtype, cute.make_layout(self.shape), self.alignment)


@dataclass(frozen=True)
class Barriers:
    """The mbarriers of one direction of a pipeline, one per stage."""

    name: str
    stages: int

    alignment = BARRIER_BYTES

    @property
    def nbytes(self) -> int:
        """Return their size."""
        return BARRIER_BYTES * self.stages

    def allocate(self, smem: cutlass.memory.SmemAllocator) -> StageBarriers:
        """Return the barriers, not initialised."""
        return StageBarriers(smem.allocate_array(Int64, self.stages), self.stages)


Field = Array | Tile | Table | Barriers


@dataclass(frozen=True)
class SmemLayout:
    """The fields of a CTA's shared memory, in order."""

    fields: tuple[Field, ...]

    def offsets(self) -> tuple[int, ...]:
        """Return the first byte of every field, and the end."""
        offsets = [0]
        for field in self.fields:
            alignment = field.alignment or field.dtype.width // 8  # type: ignore[union-attr]  # only an Array has none
            begin = -(-offsets.pop() // alignment) * alignment
            offsets += [begin, begin + field.nbytes]
        return tuple(offsets)

    @property
    def nbytes(self) -> int:
        """Return the dynamic shared memory of a CTA."""
        return self.offsets()[-1]

    def barriers(self) -> tuple[Barrier, ...]:
        """Return the manifest's record of the mbarriers."""
        placed = zip(self.fields, self.offsets(), strict=False)
        return tuple(Barrier(field.name, offset, field.stages) for field, offset in placed if isinstance(field, Barriers))

    def allocate(self) -> dict[str, Any]:
        """Return the pointer, tensor or barriers of every field, by name."""
        smem = cutlass.memory.SmemAllocator()
        return {field.name: field.allocate(smem) for field in self.fields}


def fields_of(group: type, memory: dict[str, Any]) -> dict[str, Any]:
    """Return the allocated fields that a dataclass names, for its constructor; None for one that a variant does without."""
    return {name: memory.get(name) for name in group.__dataclass_fields__}  # type: ignore[attr-defined]


@cute.jit
def clear_rows(
    first_box: cute.Pointer, boxes: int, first_row: Int32, thread: Int32, others: tuple[Int32, Int32] | None = None, flip: int | Int32 = 0
):
    """Zero rows first_row .. 63 of boxes, by 128 threads. The swizzle does not matter to whole rows.

    others: more rows, begin and end. flip: row r lies where row r ^ flip would, 0 or 32.
    """
    rows_per_pass = CLEARING_THREADS // CHUNKS_PER_ROW
    for box in cutlass.range_constexpr(boxes):
        for step in cutlass.range_constexpr(BOX_ROWS // rows_per_pass):
            row = step * rows_per_pass + thread // CHUNKS_PER_ROW
            unused = row >= first_row
            if cutlass.const_expr(others is not None):
                unused = unused | ((row >= others[0]) & (row < others[1]))  # type: ignore[index]  # not None here
            if unused:
                place = box * (BOX_ROWS * ROW_BYTES) + (row ^ flip) * ROW_BYTES + thread % CHUNKS_PER_ROW * CHUNK
                store_vector(first_box + place, [Int32(0)] * 4)

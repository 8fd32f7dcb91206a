"""Products of a warp in registers (mma.sync m16n8k16, 16 bits in, fp32 sums), and their operands from shared memory.

Eight rows of one column must be eight banks. A box has rows of 64 columns, 128 bytes, of which the 16 bytes c of row r lie at chunk
c ^ (r % 8). Longer rows need no swizzle if each begins at an odd multiple of 16 bytes behind the one before: their pitch. Any architecture
from SM80 on has these instructions.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, cute

from ...spec.mla import ELEMENT_BYTES
from .copies import CHUNK, load_groups

M, N, K = 16, 8, 16
BOX_COLUMNS = 64
BOX_ROW_BYTES = BOX_COLUMNS * ELEMENT_BYTES
CHUNKS = BOX_ROW_BYTES // CHUNK  # of a row
SUMS = 4  # of a lane in a product: columns 2 (l % 4) + {0, 1} of row l / 4, then of the row 8 further


def chunk_address(box: Int32, row: Int32, chunk: Int32) -> Int32:
    """Return the address of 16 bytes of a box."""
    return box + row * BOX_ROW_BYTES + ((chunk ^ (row % CHUNKS)) * CHUNK)


def load_tall(box: Int32, row: Int32, chunk: Int32, transposed: bool = False) -> list[Int32]:
    """Load 16 rows of 16 columns from a row and a chunk on: A as it lies; transposed, B of two products whose depth is the rows."""
    lane = cute.arch.lane_idx()
    return load_groups(chunk_address(box, row + lane % M, chunk + lane // M), transposed)


def load_wide(box: Int32, row: Int32, chunk: Int32, transposed: bool = False) -> list[Int32]:
    """Load 16 rows of 16 columns from a row and a chunk on: B of two products whose depth is the columns; transposed, A of the columns."""
    lane = cute.arch.lane_idx()
    return load_groups(chunk_address(box, row + lane % N + lane // M * N, chunk + lane // N % 2), transposed)


def row_operand(lane: Int32, pitch: int) -> Int32:
    """Return the offset of a lane's row of A, 16 rows, or of two transposed Bs, whose depth the rows are. pitch: bytes between rows."""
    return lane % M * pitch + lane // M * CHUNK


def column_operands(lane: Int32, pitch: int) -> Int32:
    """Return the offset of a lane's row of two Bs of neighbouring depths, whose columns are 8 rows."""
    return lane % N * pitch + lane // N * CHUNK


def wide_operand(lane: Int32, pitch: int) -> Int32:
    """Return the offset of a lane's row of two Bs of neighbouring columns, 16 rows, or of a transposed A, whose depth the rows are."""
    return (lane % N + lane // M * N) * pitch + lane // N % 2 * CHUNK


def multiply(total: cute.Tensor, first: int, a: list[Int32], b: list[Int32], dtype: type[cutlass.Numeric] = BFloat16) -> None:
    """Add A B to the four sums of a product, total[first ..]. a: 4 words, b: 2, of a 16-bit type."""
    name = "bf16" if dtype is BFloat16 else "f16"
    outs = ", ".join(f"{{$w{i}}}" for i in range(SUMS))
    ins = [", ".join(f"{{$r{i}}}" for i in range(*run)) for run in ((0, 4), (4, 6), (6, 10))]
    text = f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 {{{outs}}}, {{{ins[0]}}}, {{{ins[1]}}}, {{{ins[2]}}};"
    sums = [total[first + i] for i in range(SUMS)]
    results: Any = cute.arch.inline_ptx(text, write_only_types=[Float32] * SUMS, read_only_args=[*a, *b, *sums])
    for i in range(SUMS):
        total[first + i] = results[i]

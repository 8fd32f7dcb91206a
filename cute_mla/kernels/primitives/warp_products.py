"""Products of a warp in registers (mma.sync m16n8k16, 16 bits in, or m16n8k32, e4m3 in; fp32 sums), and their operands from shared memory.

Eight rows of one column must be eight banks. A box has rows of 64 columns, 128 bytes, of which the 16 bytes c of row r lie at chunk
c ^ (r % 8). Longer rows need no swizzle if each begins at an odd multiple of 16 bytes behind the one before: their pitch. Any architecture
from SM80 on has these instructions; e4m3 ones are SM120's. An operand of e4m3 lies like one of 16 bits with half as many columns.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32, cute

from ...spec.mla import ELEMENT_BYTES
from .arithmetic import pin_register
from .copies import CHUNK, load_groups

M, N, K = 16, 8, 16
BOX_COLUMNS = 64
BOX_ROW_BYTES = BOX_COLUMNS * ELEMENT_BYTES
CHUNKS = BOX_ROW_BYTES // CHUNK  # of a row
FORMS = {
    BFloat16: "m16n8k16.row.col.f32.bf16.bf16.f32",
    Float16: "m16n8k16.row.col.f32.f16.f16.f32",
    Float8E4M3FN: "kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e4m3.e4m3.f32.ue8m0",
}
UNIT_SCALES = 0x7F7F7F7F  # UE8M0
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
    """Add A B to the four sums of a product, total[first ..]. a: 4 words, b: 2. dtype: of 16 bits, or e4m3 with twice the depth.

    e4m3 takes the form with scales, all of which are 1: GeForce boards have the plain one at half of the rate.
    """
    outs = ", ".join(f"{{$w{i}}}" for i in range(SUMS))
    ins = [", ".join(f"{{$r{i}}}" for i in range(*run)) for run in ((0, 4), (4, 6), (6, 10))]
    scales = [pin_register(Int32(UNIT_SCALES))] if dtype is Float8E4M3FN else []  # a literal is no operand of it
    more = ", {$r10}, {0, 0}, {$r10}, {0, 0}" if scales else ""
    text = f"mma.sync.aligned.{FORMS[dtype]} {{{outs}}}, {{{ins[0]}}}, {{{ins[1]}}}, {{{ins[2]}}}{more};"
    sums = [total[first + i] for i in range(SUMS)]
    results: Any = cute.arch.inline_ptx(text, write_only_types=[Float32] * SUMS, read_only_args=[*a, *b, *sums, *scales])
    for i in range(SUMS):
        total[first + i] = results[i]

"""Products of a warp on registers, m16n8k16, and their operands out of shared memory.

Lane 4 g + t has of A rows g and g + 8, of B column g, each in depth 2 t, 2 t + 1 and 8 further, of D rows g and g + 8 in columns 2 t and
2 t + 1. A row of shared memory begins at an odd multiple of 16 bytes behind the one before: eight of them lie in different banks.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.experimental import primitives

from .copies import CHUNK, MATRIX_ROWS, load_groups, smem_pointer

ROWS, COLUMNS, DEPTH = 16, 8, 16  # of a product
_NAMES = {cutlass.BFloat16: "bf16", cutlass.Float16: "f16"}


def multiply(a: list[Int32], b: list[Int32], c: list[Float32], dtype: type[cutlass.Numeric]) -> list[Float32]:
    """Return A B + C. a, b, c: four, two and four registers of a lane."""
    name = _NAMES[dtype]
    return list(
        cute.arch.inline_ptx(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, "
            "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
            write_only_types=[Float32] * 4,
            read_only_args=[*a, *b, *c],
        )
    )


def row_operand(lane: Int32, pitch: int) -> Int32:
    """Return the offset of a lane's row of A, 16 rows of K-major elements. pitch: bytes from a row to the next."""
    return lane % ROWS * pitch + lane // ROWS * CHUNK


def column_operands(lane: Int32, pitch: int) -> Int32:
    """Return the offset of a lane's row of two Bs of neighbouring depths, whose columns are 8 K-major rows of shared memory."""
    return lane % MATRIX_ROWS * pitch + lane // MATRIX_ROWS * CHUNK


def load_rows(source: Int32) -> list[Int32]:
    """Load A, or two Bs of neighbouring depths. source: the lane's row."""
    return load_groups(source, transposed=False)


def load_transposed(source: Int32) -> list[Int32]:
    """Load two Bs of neighbouring columns, whose depth goes along 16 rows of shared memory. source: as row_operand has it."""
    words = primitives.ldmatrix(smem_pointer(source).raw_ptr(), 4, primitives.MMALayout.COL)
    return [words[i] for i in range(4)]

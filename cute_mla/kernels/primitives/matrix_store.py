"""Matrix loads and stores of warps, to swizzled rows of 64 or 128 bytes."""

from __future__ import annotations

from cutlass import Int32, Uint8, cute
from cutlass.experimental import primitives

ROW_BYTES = 64
BOX_ROW_BYTES = 128  # of a key in a box that TMA has written, 128-byte swizzle
CHUNK = 16  # bytes of a row of one 8 x 8 matrix
MATRIX_ROWS = 8


def smem_pointer(address: Int32) -> cute.Pointer:
    """Return a shared memory address, a multiple of 16 bytes, as a pointer."""
    return cute.make_ptr(Uint8, address, cute.AddressSpace.smem, assumed_align=CHUNK)


def writer_address(tile: Int32, lane: Int32, row_bytes: int = ROW_BYTES) -> Int32:
    """Return the where a lane's row of a store of four matrices begins: rows 0..7 and 8..15 of the first 16 bytes, then of the next.

    Bytes further on are flipped bits away. tile: the address of row 0, a multiple of 8 rows. row_bytes: 64 or 128, the width
    of the swizzle.
    """
    row = lane % (2 * MATRIX_ROWS)
    group = lane // (2 * MATRIX_ROWS)
    return tile + row * row_bytes + (group ^ (row // (BOX_ROW_BYTES // row_bytes) % (row_bytes // CHUNK))) * CHUNK


def store_groups(place: Int32, first_row: int, pair: int, words: list[Int32]) -> None:
    """Store four words of every lane as 16 rows of two times 16 bytes: rows 0..7, rows 8..15 of number 2 pair, then of the next.

    place: writer_address. first_row: a multiple of 16, where rows have 64 bytes.
    """
    target = (place ^ (2 * CHUNK * pair)) + first_row * ROW_BYTES
    primitives.stmatrix(smem_pointer(target).raw_ptr(), words, primitives.MMALayout.ROW)


def load_groups(source: Int32, transposed: bool = True) -> list[Int32]:
    """Load four 8 x 8 matrices of pairs of bytes. source: the lane's row."""
    layout = primitives.MMALayout.COL if transposed else primitives.MMALayout.ROW
    words = primitives.ldmatrix(smem_pointer(source).raw_ptr(), 4, layout)
    return [words[i] for i in range(4)]

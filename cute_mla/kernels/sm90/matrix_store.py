"""Operands of one byte per element with 64 keys a row, made by warps in shared memory: what e4m3 products of SM90 contract
over keys. They read both operands along the contracted dimension only, so V has to be transposed.

A tile: rows of 64 bytes, 64-byte swizzle. A row's 16 bytes from 16 m on are the keys of a group, in an order of their own:

    byte 4 q + j of a group is key 2 q + j (j < 2) or 8 + 2 q + j - 2 (j >= 2),  q, j < 4

Both operands have it, so their product is that of the natural order. For the probabilities it is the order in which an
accumulator fragment holds them: a thread packs its own four and stores. For the values it is what a transposing matrix load
of pairs of bytes gives: of two 8 x 8 matrices of pairs (8 keys x 16 columns each), a lane has the same column pair of keys 2 q
and 2 q + 1 of each, and two byte permutations part the columns. The even ones of a group of 16 become its first 8 rows, the odd
ones its last 8, so that a matrix store writes 8 neighbouring rows, which lie in different banks.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Uint8, cute
from cutlass.experimental import primitives

ROW_BYTES = 64
BOX_ROW_BYTES = 128  # of a key in a box that TMA has written, 128-byte swizzle
CHUNK = 16  # bytes of a row of one 8 x 8 matrix; keys of a group; columns of a group
MATRIX_ROWS = 8
KEY_GROUPS = ROW_BYTES // CHUNK
BOX_GROUPS = BOX_ROW_BYTES // CHUNK  # of columns
GROUPS_AT_ONCE = 4  # whose words a warp holds: 8 loads before the first store
ALL_BYTES = -1
ONES = 0x38383838  # four e4m3 numbers
EVEN_BYTES, ODD_BYTES = 0x6420, 0x7531  # of two words, the first one's first


def smem_pointer(address: Int32) -> cute.Pointer:
    """A multiple of 16 bytes of shared memory."""
    return cute.make_ptr(Uint8, address, cute.AddressSpace.smem, assumed_align=CHUNK)


def writer_address(tile: Int32, lane: Int32, row_bytes: int = ROW_BYTES) -> Int32:
    """Where a lane's row of a store of four matrices begins: rows 0..7 and 8..15 of the first 16 bytes, then of the next.
    Bytes further on are flipped bits away. tile: the address of row 0, a multiple of 8 rows; row_bytes: 64 or 128, the width
    of the swizzle."""
    row = lane % (2 * MATRIX_ROWS)
    group = lane // (2 * MATRIX_ROWS)
    return tile + row * row_bytes + (group ^ (row // (BOX_ROW_BYTES // row_bytes) % (row_bytes // CHUNK))) * CHUNK


def store_groups(place: Int32, first_row: int, pair: int, words: list[Int32]) -> None:
    """Four words of every lane as 16 rows of two times 16 bytes: rows 0..7, rows 8..15 of number 2 pair, then of the next.
    place: writer_address; first_row: a multiple of 16, where rows have 64 bytes."""
    target = (place ^ (2 * CHUNK * pair)) + first_row * ROW_BYTES
    primitives.stmatrix(smem_pointer(target).raw_ptr(), words, primitives.MMALayout.ROW)


def load_groups(source: Int32) -> list[Int32]:
    """Four 8 x 8 matrices of pairs of bytes, transposed. source: the lane's row."""
    words = primitives.ldmatrix(smem_pointer(source).raw_ptr(), 4, primitives.MMALayout.COL)
    return [words[i] for i in range(4)]


def part_columns(words: list[Int32]) -> list[Int32]:
    """From 32 keys of 16 columns as load_groups gives them to the words that store_groups takes."""
    parted = []
    for first, second in ((words[0], words[1]), (words[2], words[3])):
        for selector in (EVEN_BYTES, ODD_BYTES):
            parted.append(primitives.prmt(first, selector, primitives.PermuteMode.DEFAULT, hi=second))
    return parted


def key_mask(left: Int32, group: int, lane: Int32) -> Int32:
    """The bytes of a lane's word of a group that are keys before `left`."""
    mask = Int32(0)
    for byte in range(4):
        key = CHUNK * group + 2 * (lane % 4) + byte % 2 + MATRIX_ROWS * (byte // 2)
        bits = 0xFF << 8 * byte
        mask = mask | cutlass.select_(key < left, Int32(bits - (1 << 32) if byte == 3 else bits), Int32(0))
    return mask


@cute.jit
def transpose_box(source: Int32, target: Int32, left: Int32, masked: cutlass.Constexpr[bool]):
    """From a box of 64 keys x 128 columns of bytes to 128 rows of a tile. One warp. Keys from `left` on become 0 if masked.

    source, target: addresses, multiples of 1024 bytes."""
    lane = cute.arch.lane_idx()
    row = source + lane * BOX_ROW_BYTES + lane % MATRIX_ROWS * CHUNK
    place = writer_address(target, lane)
    masks = [key_mask(left, group, lane) if masked else Int32(ALL_BYTES) for group in range(KEY_GROUPS)]
    for step in cutlass.range(BOX_GROUPS // GROUPS_AT_ONCE, unroll=1):
        units = [(group, pair) for group in range(GROUPS_AT_ONCE) for pair in range(KEY_GROUPS // 2)]
        first = row ^ (step * (GROUPS_AT_ONCE * CHUNK))
        loaded = [load_groups((first ^ (group * CHUNK)) + pair * (ROW_BYTES // 2 * BOX_ROW_BYTES)) for group, pair in units]
        for unit in cutlass.range_constexpr(len(units)):
            group, pair = units[unit]
            words = part_columns(loaded[unit])
            if cutlass.const_expr(masked):
                words = [word & masks[2 * pair + j // 2] for j, word in enumerate(words)]
            store_groups(place + step * (GROUPS_AT_ONCE * CHUNK * ROW_BYTES), group * CHUNK, pair, words)

"""Operands of one byte per element with 64 keys a row, made by warps in shared memory: what e4m3 products of SM90 contract over keys.

They read both operands along the contracted dimension only, so V has to be transposed.

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
from cutlass import Int32, cute
from cutlass.experimental import primitives

from ..primitives.copies import BOX_ROW_BYTES, CHUNK, MATRIX_ROWS, ROW_BYTES, load_groups, store_groups, writer_address

KEYS = ROW_BYTES  # of a box, one byte each in a row of V^T
KEY_GROUPS = ROW_BYTES // CHUNK
BOX_GROUPS = BOX_ROW_BYTES // CHUNK  # of columns
GROUPS_AT_ONCE = 4  # whose words a warp holds: 8 loads before the first store
ALL_BYTES = -1
ONES = 0x38383838  # four e4m3 numbers
EVEN_BYTES, ODD_BYTES = 0x6420, 0x7531  # of two words, the first one's first


def part_columns(words: list[Int32]) -> list[Int32]:
    """Turn words that load_groups returns, of 32 keys and 16 columns, into words that store_groups takes."""
    parted = []
    for first, second in ((words[0], words[1]), (words[2], words[3])):
        for selector in (EVEN_BYTES, ODD_BYTES):
            parted.append(primitives.prmt(first, selector, primitives.PermuteMode.DEFAULT, hi=second))
    return parted


def key_mask(left: Int32, group: int, lane: Int32) -> Int32:
    """Return the bytes of a lane's word of a group that are keys before `left`, as a mask."""
    mask = Int32(0)
    for byte in range(4):
        key = CHUNK * group + 2 * (lane % 4) + byte % 2 + MATRIX_ROWS * (byte // 2)
        bits = 0xFF << 8 * byte
        mask = mask | cutlass.select_(key < left, Int32(bits - (1 << 32) if byte == 3 else bits), Int32(0))
    return mask


@cute.jit
def transpose_box(source: Int32, target: Int32, left: Int32, masked: cutlass.Constexpr[bool]):
    """Transpose a box of 64 keys x 128 columns of bytes to 128 rows of a tile. One warp. Keys from `left` on become 0 if masked.

    source, target: addresses, multiples of 1024 bytes.
    """
    lane = cute.arch.lane_idx()
    row = source + lane * BOX_ROW_BYTES + lane % MATRIX_ROWS * CHUNK
    place = writer_address(target, lane)
    masks = [key_mask(left, group, lane) if masked else Int32(ALL_BYTES) for group in range(KEY_GROUPS)]
    for step in cutlass.range(BOX_GROUPS // GROUPS_AT_ONCE, unroll=1):
        units = [(group, pair) for group in range(GROUPS_AT_ONCE) for pair in range(KEY_GROUPS // 2)]
        first = row ^ (step * (GROUPS_AT_ONCE * CHUNK))
        loaded = [load_groups((first ^ (group * CHUNK)) + pair * (KEYS // 2 * BOX_ROW_BYTES)) for group, pair in units]
        for unit in cutlass.range_constexpr(len(units)):
            group, pair = units[unit]
            words = part_columns(loaded[unit])
            if cutlass.const_expr(masked):
                words = [word & masks[2 * pair + j // 2] for j, word in enumerate(words)]
            store_groups(place + step * (GROUPS_AT_ONCE * CHUNK * ROW_BYTES), group * CHUNK, pair, words)

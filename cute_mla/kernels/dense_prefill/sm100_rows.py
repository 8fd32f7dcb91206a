"""Rows of shared memory that threads of the SM100 kernel write: Q where TMA cannot load it, zeros over unused values."""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from ...spec.dense_prefill import BOX_COLUMNS
from ..parts.fragments import aligned, load_pair
from ..parts.lengths import smaller
from .operands import Item, Operands
from .sm100_geometry import BOX_BYTES, BOXES_PER_SLOT, GROUP, HALF_KEYS, QUERY_WARPS, ROW_BYTES, SLOT_BYTES, TILE_ROWS

PIECE = 16  # bytes of one access
PIECES_PER_ROW = ROW_BYTES // PIECE
WORDS = PIECE // 4
PIECE_COLUMNS = BOX_COLUMNS // PIECES_PER_ROW
QUERY_THREADS = 32 * QUERY_WARPS


@cute.jit
def load_query_tile(operands: Operands, item: Item, first: Int32, target: cute.Pointer, boxes: int, thread: Int32):
    """Q of the item's rows first .. first + 127, from any strides, as boxes of 128 rows x 128 swizzled bytes. 64 threads.

    Rows past the sequence's end repeat the last one: their results go nowhere."""
    rows_per_pass = QUERY_THREADS // PIECES_PER_ROW
    piece = thread % PIECES_PER_ROW
    for step in cutlass.range(TILE_ROWS // rows_per_pass, unroll=1):
        row = step * rows_per_pass + thread // PIECES_PER_ROW
        source = operands.q_row(item, smaller(first + row, item.rows - 1)) + piece * PIECE_COLUMNS
        place = target + (row * ROW_BYTES + (piece ^ (row % PIECES_PER_ROW)) * PIECE)
        for box in cutlass.range_constexpr(boxes):
            rWords = cute.make_rmem_tensor(cute.make_layout(WORDS), Int32)
            for i in cutlass.range_constexpr(WORDS):
                rWords[i] = load_pair(source + (box * BOX_COLUMNS + 2 * i), False)
            store_piece(place + box * SLOT_BYTES, rWords)


@cute.jit
def clear_rows(slot: cute.Pointer, first_row: Int32, thread: Int32):
    """Zeroes rows first_row .. 63 of the boxes of values in a slot. Whole 128-byte rows, so the swizzle does not matter. 128
    threads."""
    rows_per_pass = GROUP // PIECES_PER_ROW
    zeros = cute.make_rmem_tensor(cute.make_layout(WORDS), Int32)
    zeros.fill(0)
    for box in cutlass.range_constexpr(BOXES_PER_SLOT):
        for step in cutlass.range_constexpr(HALF_KEYS // rows_per_pass):
            row = step * rows_per_pass + thread // PIECES_PER_ROW
            if row >= first_row:
                store_piece(slot + (box * BOX_BYTES + row * ROW_BYTES + thread % PIECES_PER_ROW * PIECE), zeros)


def store_piece(target: cute.Pointer, words: cute.Tensor) -> None:
    """16 bytes to shared memory."""
    cute.autovec_copy(words, cute.make_tensor(cute.recast_ptr(aligned(target, PIECE), dtype=Int32), words.layout))

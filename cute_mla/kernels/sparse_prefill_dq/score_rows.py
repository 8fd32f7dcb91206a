"""Copies of P and dS from a box in shared memory to memory, on either architecture. A warp has 16 query rows."""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from ...spec.mla import ELEMENT_BYTES
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import first_query_row
from ..primitives.copies import BOX_ROW_BYTES, CHUNK, smem_pointer
from ..primitives.rows import store_vector
from ..primitives.smem import CHUNKS_PER_ROW
from .abi import DqOperands

WARP_ROWS = 16
ROWS_AT_ONCE = 32 // CHUNKS_PER_ROW  # of a box, by a warp


@cute.jit
def store_score_rows(box: Int32, thread: Int32, base: cute.Pointer, operands: DqOperands, where: tuple[Int32, Int32]):
    """Copy the warp's rows that exist from a swizzled box to P or dS in memory, 128 bytes a row.

    Through shared memory, whose port has less to do than with shuffles. box: its address. where: token, and position of the tile in its
    list.
    """
    cute.arch.sync_warp()
    place, chunk = thread // 32 * WARP_ROWS + thread % 32 // CHUNKS_PER_ROW, thread % CHUNKS_PER_ROW
    source = box + place * BOX_ROW_BYTES + (chunk ^ (place % ROWS_AT_ONCE)) * CHUNK
    row = first_query_row() + place
    target = base + (operands.score_row(*where, row) + chunk * (CHUNK // ELEMENT_BYTES))
    remaining = operands.rows() - row
    words = cute.make_rmem_tensor(cute.make_layout(CHUNK // 4), Int32)
    for above in cutlass.range_constexpr(0, WARP_ROWS, ROWS_AT_ONCE):
        flip = above % CHUNKS_PER_ROW * CHUNK  # the swizzle of a row that lies 4 further
        line = smem_pointer((source ^ flip) + above * BOX_ROW_BYTES)
        cute.autovec_copy(cute.make_tensor(cute.recast_ptr(line, dtype=Int32), words.layout), words)
        if above < remaining:
            store_vector(target + above * TILE_KEYS, [words[i] for i in range(CHUNK // 4)])
    cute.arch.sync_warp()

"""Q of a work tile on its way to tensor memory, on SM100."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT
from ..attention.operands import QueryOperands
from ..attention.tiles import first_query_row
from ..primitives import tcgen05
from ..primitives.elements import aligned, load_word
from .config import CTA_COLUMNS, CTA_ROPE, EVEN_CTA, GROUP, GROUP_WARPS, QUERY_COLUMN, VECTOR, Geometry, Pipes

COPY_WORDS = 16  # of Q that a thread moves from gmem to its lane of tensor memory at a time


@dataclass(frozen=True)
class QueryLoader:
    """The loads of four warps.

    vectors: whether rows of Q may be loaded 16 bytes at a time. has_rope: whether keys have columns that are not values.
    """

    geometry: Geometry
    has_rope: bool
    vectors: bool

    def load(self, operands: QueryOperands, pipes: Pipes, req: Int32, thread: Int32, lanes: Int32) -> None:
        """Load Q of a work tile that has keys, once every score of the one before has been computed. Signal query_ready."""
        self.load_rows(operands, req, thread, lanes)
        pipes.query_ready.producer_commit(Int32(0), cta=EVEN_CTA)

    @cute.jit
    def load_rows(self, operands: QueryOperands, req: Int32, thread: Int32, lanes: Int32):
        """Load the thread's row of Q, from any strides: the columns that its lane multiplies.

        Rows past the last one repeat it; their results go nowhere.
        """
        row = first_query_row() + thread % TILE_ROWS
        row = cutlass.select_(row < operands.rows(), row, operands.rows() - 1)
        half = thread // TILE_ROWS
        source = operands.q_row(req, row)
        elements = self.geometry.word_elements
        for copy in cutlass.range_constexpr(CTA_COLUMNS // (COPY_WORDS * elements)):
            offset = half * CTA_COLUMNS + copy * (COPY_WORDS * elements)
            tcgen05.store_columns(lanes + (QUERY_COLUMN + copy * COPY_WORDS), self.load_words(source + offset, COPY_WORDS))
        if cutlass.const_expr(self.has_rope):
            rope = D_LATENT + half * CTA_ROPE
            tcgen05.store_columns(lanes + self.geometry.query_rope_column, self.load_words(source + rope, CTA_ROPE // elements))
        tcgen05.await_stores()
        tcgen05.fence_before_signal()

    def load_words(self, source: cute.Pointer, count: int) -> list[Int32]:
        """Load contiguous words of elements of Q."""
        words = []
        elements = self.geometry.word_elements
        for vector in range(count // VECTOR):
            first = source + vector * VECTOR * elements
            if self.vectors:
                rWords = cute.make_rmem_tensor(cute.make_layout(VECTOR), Int32)
                cute.autovec_copy(cute.make_tensor(cute.recast_ptr(aligned(first, 16), dtype=Int32), rWords.layout), rWords)
                words += [rWords[i] for i in range(VECTOR)]
            else:
                words += [load_word(first + elements * i, self.geometry.element_bytes) for i in range(VECTOR)]
        return words


def thread_and_lanes(tmem: Int32) -> tuple[Int32, Int32]:
    """Return (number of this thread among the four warps of its role, tensor memory at the first of its warp's lanes)."""
    thread = cute.arch.thread_idx()[0] % GROUP
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % GROUP_WARPS
    return thread, tmem + (warp << 21)

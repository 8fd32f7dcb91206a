"""Sparse prefill's own part of the score role on Hopper: Q from another role, and lse of a token's first indices beside that of all.

lse_indexer sums up the first indexer_topk keys. At the first tile with a key beyond this bound, the role works out what sum and reference
would be with the keys before the bound alone. Both wait in shared memory for the end of the token. Their logarithm has the bits that lse
would have if topk_length ended there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import cutlass
from cutlass import Boolean, Float32, Int32, Uint64, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.split_plan import TILE_KEYS
from ..attention.lengths import RowRange
from ..attention.scheduler import BOX_COLUMNS
from ..attention.softmax import LN2, OnlineSoftmax, shift_of
from ..primitives.arithmetic import larger
from ..primitives.copies import load_groups
from ..primitives.wgmma import ROWS_PER_THREAD, flat, fragment_column, fragment_row, half, quad_max, quad_sum
from ..sm90.cta import BOX_BYTES, STAGE_COLUMNS, STEPS_PER_BOX, LatentSm90Queries, LatentSm90Smem
from ..sm90.rows import CHUNK
from ..sm90.score import LatentSm90RowResults, LatentSm90Scores, query_row
from .operands import SparsePrefillOperands
from .sm90_copy import SparsePrefillSm90Smem

SUM, REFERENCE = 0, 1  # of sIndexer
NOWHERE = -(1 << 31)  # below every place, and below every number of keys that remain


@dataclass(frozen=True)
class SparsePrefillSm90Scores(LatentSm90Scores):
    """S of 16-bit operands, with Q from the role `indices`.

    counters: int32 (2): the phases of Q that this thread has waited for, and whether it still has to wait for a work tile's second one.
    """

    smem: SparsePrefillSm90Smem
    counters: cute.Tensor

    reads_ahead = True

    @staticmethod
    def create(queries: LatentSm90Queries, smem: LatentSm90Smem, thread: Int32) -> SparsePrefillSm90Scores:
        """Partition the tiles for one thread of the score warpgroup."""
        assert queries.boxes >= max(map(len, queries.phases)), "a phase has more column tiles than boxes"
        assert smem.stages.before_rope * STAGE_COLUMNS <= queries.in_registers * BOX_COLUMNS, "Q in boxes is used before a wait"
        scores = LatentSm90Scores.create(queries, smem, thread)
        counters = cute.make_rmem_tensor(cute.make_layout(2), Int32)
        counters[0], counters[1] = Int32(0), Int32(0)
        return SparsePrefillSm90Scores(**vars(scores), counters=counters)

    @cute.jit
    def load_queries(self, operands: Any, req: Int32):
        """Take the column tiles of a work tile's Q that are kept in registers, unless it has been done. As take_queries."""
        if self.counters[1] == 0:
            self.take_queries()

    def take_queries(self) -> None:
        """Take the column tiles of the next work tile's Q that are kept in registers. Wait queries_landed. Signal queries_free."""
        self._await_phase()
        for box, tile in enumerate(self.queries.phases[0]):
            rQ = self.query_tile(tile)
            for step in range(STEPS_PER_BOX):
                words = load_groups((self.staged + box * BOX_BYTES) ^ (2 * CHUNK * step), transposed=False)
                for i, word in enumerate(words):
                    rQ[len(words) * step + i] = word
        self._release_boxes()
        self.counters[1] = Int32(1)

    @cute.jit
    def await_smem_queries(self):
        """Wait for the other column tiles, before their first use in a work tile. Wait queries_landed."""
        if self.counters[1] != 0:
            self._await_second_phase()
            cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def release_queries(self, last: Boolean):
        """Hand on the boxes of Q after the last S of a work tile. Wait queries_landed, if no tile had keys. Signal queries_free."""
        if last:
            if self.counters[1] != 0:
                self._await_second_phase()
            self._release_boxes()

    def _await_second_phase(self) -> None:
        self._await_phase()
        self.counters[1] = Int32(0)

    def _await_phase(self) -> None:
        self.smem.queries_landed.consumer_wait(self.counters[0])
        self.counters[0] = self.counters[0] + 1

    def _release_boxes(self) -> None:
        self.smem.queries_free.consumer_release(Int32(0))


@dataclass(frozen=True)
class SparsePrefillSm90RowResults(LatentSm90RowResults):
    """The greatest logit of a row, and lse_indexer: the state of the softmax at the bound waits in sIndexer for the end of the token.

    One lane of a quad writes a row of sIndexer and reads it.
    rPlace: int32 (1), of one thread. A tile with so many keys remaining, itself included, or more, lies before the bound. NOWHERE where
    lse_indexer is not asked for, and once the keys before the bound have been summed up.
    """

    rPlace: cute.Tensor
    sIndexer: cute.Pointer

    @classmethod
    def create(cls, smem: SparsePrefillSm90Smem) -> Self:
        """Return the results of a thread of the score role."""
        return cls(cute.make_rmem_tensor(cute.make_layout(1), Int32), smem.sIndexer)

    def place(self, thread: Int32, row_half: int) -> cute.Pointer:
        """Return the row sum of a row; its reference is TILE_ROWS behind."""
        return self.sIndexer + fragment_row(thread, row_half)

    def begin(self, operands: SparsePrefillOperands, keys: Int32) -> None:
        """Place the bound of a token with so many keys."""
        # at most 2^31 - 1, since indexer_topk is at least 1 and there are at most 2^31 - 64 keys
        place = keys + (TILE_KEYS - operands.args.indexer_topk)
        self.rPlace[0] = cutlass.select_(operands.asks_lse_indexer(), place, Int32(NOWHERE))

    @cute.jit
    def see_tile(self, softmax: OnlineSoftmax, scores: SparsePrefillSm90Scores, remaining: Int32):
        """Sum up the keys before the bound, if this tile is the first to have others."""
        if cute.arch.vote_any_sync(remaining < self.rPlace[0]):
            totals, references = sum_before(softmax, scores, larger(remaining + (TILE_KEYS - self.rPlace[0]), Int32(0)))
            for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
                if scores.thread % 4 == 0:
                    row = self.place(scores.thread, row_half)
                    (row + SUM * TILE_ROWS).store(totals[row_half])
                    (row + REFERENCE * TILE_ROWS).store(references[row_half])
            self.rPlace[0] = Int32(NOWHERE)

    def store(self, stored: RowRange, row: Int32, softmax: OnlineSoftmax, row_half: int) -> None:
        """Write the greatest logit of a row."""
        stored.operands.max_logit_of(stored.unit, row).store(softmax.maximum(row_half) * LN2)

    @cute.jit
    def end(self, operands: SparsePrefillOperands, req: Int32, softmax: OnlineSoftmax, thread: Int32):
        """Write lse_indexer of a token, if it is asked for. If the bound is still ahead, all keys lie before it."""
        if operands.asks_lse_indexer():
            for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
                total, reference = softmax.row_sum(row_half), softmax.row_ref[row_half]
                row = query_row(thread, row_half)
                if thread % 4 == 0 and row < operands.rows():
                    if self.rPlace[0] == NOWHERE:
                        kept = self.place(thread, row_half)
                        total, reference = (kept + SUM * TILE_ROWS).load(), (kept + REFERENCE * TILE_ROWS).load()
                    lse = (reference + cute.math.log2(total, fastmath=True)) * LN2
                    operands.lse_indexer_of(req, row).store(cutlass.select_(total == 0.0, operands.empty_lse, lse))


def sum_before(softmax: OnlineSoftmax, gemm: SparsePrefillSm90Scores, limit: Int32) -> tuple[list[Float32], list[Float32]]:
    """Return what sum and reference of each row are with the first `limit` keys of a tile, 0 to 63, as softmax.add_tile would have them.

    The state stays, and so do the scores, of which no copy is made: there are no registers for it. Nor are there predicates to keep a key's
    comparison from one pass over the scores to the other: the bits of the second one are worked out anew, and in another way.
    """
    rS, column = flat(gemm.scores), fragment_column(gemm.thread, 0)
    before = halves((Uint64(0x7FFF_FFFF_FFFF_FFFF) >> Uint64(63 - limit)) >> Uint64(column))
    tops = [-Float32.inf] * ROWS_PER_THREAD
    for i in range(cute.size(rS)):
        tops[half(i)] = cute.arch.fmax(tops[half(i)], cutlass.select_(has_bit(before, i), rS[i], -Float32.inf))
    followed = [softmax.follow(row, quad_max(top) * softmax.scale_log2) for row, top in enumerate(tops)]
    references = [reference for reference, _ in followed]
    shifts = [-shift_of(reference) for reference in references]
    totals = [softmax.rSum[row] * alpha for row, (_, alpha) in enumerate(followed)]
    behind = halves((Uint64(0xFFFF_FFFF_FFFF_FFFF) << Uint64(limit)) >> Uint64(column))
    for i in range(cute.size(rS)):
        prob = cute.math.exp2(rS[i] * softmax.scale_log2 + shifts[half(i)], fastmath=True)
        totals[half(i)] = totals[half(i)] + cutlass.select_(has_bit(behind, i), Float32(0), prob)
    return [quad_sum(total) for total in totals], references


def halves(bits: Uint64) -> tuple[Int32, Int32]:
    """Return the low and the high half of 64 bits."""
    return Int32(bits), Int32(bits >> Uint64(32))


def has_bit(words: tuple[Int32, Int32], register: int) -> Boolean:
    """Return whether a register's key has its bit set. words: of a tile's keys from the thread's first one on."""
    word, bit = divmod(fragment_column(0, register), 32)
    return (words[word] & Int32(1 << bit)) != 0

"""The score role of sparse prefill on Hopper: lse of a token's first indices beside that of all.

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
from ..attention.scheduler import TileRange
from ..attention.softmax import LN2, OnlineSoftmax, shift_of
from ..primitives.arithmetic import larger
from ..primitives.smem import Array, Field
from ..primitives.wgmma import ROWS_PER_THREAD, flat, fragment_column, fragment_row, half, quad_max, quad_sum
from ..sm90.score import ScoreRole, TileScores, query_row
from .operands import Operands

SUM, REFERENCE, ROW_STATES = 0, 1, 2
NOWHERE = -(1 << 31)  # below every place, and below every number of keys that are left


@dataclass(frozen=True)
class IndexerBound:
    """The place of the bound among the tiles of a token, for one thread of the score role.

    rPlace: int32 (1). A tile with so many keys left, itself included, or more, lies before the bound. NOWHERE where lse_indexer is not
    asked for, and once the keys before the bound have been summed up.
    """

    rPlace: cute.Tensor

    @classmethod
    def create(cls) -> Self:
        """Return the bound of no token."""
        return cls(cute.make_rmem_tensor(cute.make_layout(1), Int32))

    def begin(self, operands: Operands, keys: Int32) -> None:
        """Place the bound of a token with so many keys."""
        # at most 2^31 - 1, since indexer_topk is at least 1 and there are at most 2^31 - 64 keys
        place = keys + (TILE_KEYS - operands.args.indexer_topk)
        self.rPlace[0] = cutlass.select_(operands.asks_lse_indexer(), place, Int32(NOWHERE))

    def is_passed(self, left: Int32) -> Boolean:
        """Return whether a tile is the first one with keys beyond the bound, the same for all lanes.

        left: keys of the token from the tile on.
        """
        return cute.arch.vote_any_sync(left < self.rPlace[0])

    def limit(self, left: Int32) -> Int32:
        """Return how many keys of a tile that is_passed lie before the bound; 0 or less where none does."""
        return left + (TILE_KEYS - self.rPlace[0])

    def close(self) -> None:
        """Note that the keys before the bound have been summed up."""
        self.rPlace[0] = Int32(NOWHERE)

    def is_closed(self) -> Boolean:
        """Return whether the keys before the bound have been summed up. If not so at the end of a token, all keys lie before it."""
        return self.rPlace[0] == NOWHERE


@dataclass(frozen=True)
class IndexerRows:
    """State of the softmax at the bound. One lane of a quad writes a row and reads it.

    sIndexer: fp32 (2, 64 rows): the row sum, the reference in log2 units.
    """

    bound: IndexerBound
    sIndexer: cute.Pointer

    @staticmethod
    def fields() -> tuple[Field, ...]:
        """Return the fields of shared memory."""
        return (Array("sIndexer", Float32, ROW_STATES * TILE_ROWS),)

    @staticmethod
    def create(memory: dict) -> IndexerRows:
        """Return the rows of a thread of the score role."""
        return IndexerRows(IndexerBound.create(), memory["sIndexer"])

    def place(self, thread: Int32, row_half: int) -> cute.Pointer:
        """Return the row sum of a row; its reference is TILE_ROWS behind."""
        return self.sIndexer + fragment_row(thread, row_half)


@dataclass(frozen=True, kw_only=True)
class TokenScoreRole(ScoreRole):
    """One warpgroup."""

    indexer: IndexerRows

    def begin_rows(self, operands: Any, softmax: OnlineSoftmax, tile_range: TileRange) -> None:
        """Begin the rows of a token."""
        softmax.reset()
        self.indexer.bound.begin(operands, tile_range.keys)

    @cute.jit
    def watch_tile(self, softmax: OnlineSoftmax, gemm: TileScores, left: Int32):
        """Sum up the keys before the bound, if this tile is the first to have others."""
        bound = self.indexer.bound
        if bound.is_passed(left):
            totals, references = sum_before(softmax, gemm, larger(bound.limit(left), Int32(0)))
            for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
                if gemm.thread % 4 == 0:
                    row = self.indexer.place(gemm.thread, row_half)
                    (row + SUM * TILE_ROWS).store(totals[row_half])
                    (row + REFERENCE * TILE_ROWS).store(references[row_half])
            bound.close()

    @cute.jit
    def end_rows(self, operands: Operands, req: Int32, softmax: OnlineSoftmax, thread: Int32):
        """Write lse_indexer of a token, if it is asked for."""
        if operands.asks_lse_indexer():
            for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
                total, reference = softmax.row_sum(row_half), softmax.row_ref[row_half]
                row = query_row(thread, row_half)
                if thread % 4 == 0 and row < operands.rows():
                    if self.indexer.bound.is_closed():
                        kept = self.indexer.place(thread, row_half)
                        total, reference = (kept + SUM * TILE_ROWS).load(), (kept + REFERENCE * TILE_ROWS).load()
                    lse = (reference + cute.math.log2(total, fastmath=True)) * LN2
                    operands.lse_indexer_of(req, row).store(cutlass.select_(total == 0.0, operands.empty_lse, lse))


def sum_before(softmax: OnlineSoftmax, gemm: TileScores, limit: Int32) -> tuple[list[Float32], list[Float32]]:
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

"""The score role of sparse prefill on Blackwell, and what it leaves to the output role: the results of a row besides O.

lse_indexer sums up the first indexer_topk keys. At the first tile with a key beyond this bound, the role works out what its state would be
with the keys before the bound alone, which waits in shared memory for the end of the token. Its logarithm has the bits that lse would have
if topk_length ended there.

A token's softmax ends with dependent steps, of which the score role would do 800 clocks between two tokens, while the output role waits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import KeyTile, TileRange, first_query_row
from ..attention.softmax import LN2, SinkScale, follow_maximum, shift_of
from ..primitives.arithmetic import smaller
from ..primitives.wgmma import ROWS_APART, ROWS_PER_THREAD
from ..sm100.config import GROUP, HALF_KEYS
from ..sm100.heads64_rows import FRAGMENT, QUAD, Heads64RowsSm100
from ..sm100.score import LatentRowsSm100, LatentScoreRoleSm100, SeenMaskSm100, score_tile
from .operands import SparsePrefillOperands
from .sm100_config import (
    INDEXER_REFERENCE,
    INDEXER_SHARES,
    INDEXER_STATES,
    MAXIMUM,
    REFERENCE,
    SHARES,
    SparsePrefillSmemSm100,
)


@dataclass(frozen=True)
class SparsePrefillScoreRoleSm100(LatentScoreRoleSm100):
    """Four warps, whose rows are PairRows or Heads64Rows. The output role loads Q and stores the results."""

    @cute.jit
    def score_tiles(
        self, operands: SparsePrefillOperands, rows: Any, tile_range: TileRange, tile: Int32, thread: Int32, lanes: Int32
    ):  # fmt: skip
        """Score the tiles of a token: those before the bound of lse_indexer, that tile, and those after.

        That tile has code of its own, with which ptxas leaves the loops as they were: by the clock, branches in the one loop cost every
        tile 36 to 116 clocks.
        """
        bound = tiles_before_bound(operands, tile_range.tiles)
        for t in cutlass.range(bound, unroll=1):
            self.score_valid_tile(operands, rows, tile_range.tile(t), tile + t, self.mask)
        if bound < tile_range.tiles:
            self.score_bounded_tile(operands, rows, tile_range.tile(bound), tile + bound)
        for t in cutlass.range(bound + 1, tile_range.tiles, unroll=1):
            self.score_valid_tile(operands, rows, tile_range.tile(t), tile + t, self.mask)

    @cute.jit
    def score_valid_tile(self, operands: SparsePrefillOperands, rows: Any, keys: KeyTile, tile: Int32, mask: SeenMaskSm100):
        """Turn S of one tile into P, or pass the tile on if it has no keys."""
        smem, parts = rows.smem, rows.smem.geometry.score_parts
        smem.seen_ready.consumer_wait(tile)
        if smem.has_keys(tile):
            score_tile(mask, operands, rows, keys, tile)
        else:
            for part in cutlass.range_constexpr(parts):
                use = tile * parts + part
                smem.scores_ready.consumer_wait(use)
                smem.scores_free.consumer_release(use, cta=smem.geometry.mma_cta)
            if rows.half == 0:
                smem.alpha_ready.producer_commit(tile)
            smem.probs_ready.producer_commit(tile, cta=smem.geometry.mma_cta)

    @cute.jit
    def score_bounded_tile(self, operands: SparsePrefillOperands, rows: Any, keys: KeyTile, tile: Int32):
        """Turn S of the tile that the bound lies in into P, or pass the tile on if it has no keys. Keep the state at the bound."""
        rows.smem.seen_ready.consumer_wait(tile)
        if not rows.smem.has_keys(tile):
            rows.keep()
        self.score_valid_tile(operands, rows, keys, tile, BoundedMask())

    def publish(self, operands: SparsePrefillOperands, rows: Any, req: Int32, begin_tile: Int32) -> Float32:
        """Hand the state of a token's softmax to the output role. Return the thread's share of a row sum."""
        rows.publish(operands, req)
        return rows.rSum[0]

    def store_lse(self, *_: object) -> None:
        """Do nothing: the output role does."""


class BoundedMask(SeenMaskSm100):
    """Mask of the tile that the bound of lse_indexer lies in, which sums up the keys before the bound."""

    def apply(self, operands: SparsePrefillOperands, rows: Any, keys: KeyTile, tile: Int32) -> None:
        """Set scores of keys that do not count to -inf. Keep the state of rows that would have seen the keys before the bound alone."""
        super().apply(operands, rows, keys, tile)
        rows.keep_before_bound(operands)


@dataclass(frozen=True)
class PairRows(LatentRowsSm100):
    """One thread's scores and softmax state, in a pair of CTAs."""

    smem: SparsePrefillSmemSm100

    def _kept(self) -> cute.Pointer:
        return self.smem.sIndexer + (self.half * TILE_ROWS + self.row)

    def keep(self) -> None:
        """Keep the share of the row sum and the reference, at the bound of lse_indexer, until the end of the token."""
        self._keep(self.rSum[0], self.row_ref[0])

    def _keep(self, share: Float32, reference: Float32) -> None:
        kept = self._kept()
        kept.store(share)
        (kept + GROUP).store(reference)

    def keep_before_bound(self, operands: SparsePrefillOperands) -> None:
        """Keep what the state would be with the keys of the tile before the bound of lse_indexer."""
        self._keep(*self._state_before(operands.args.indexer_topk % TILE_KEYS))
        self.sync_halves()  # between the two swaps of maxima

    def _state_before(self, limit: Int32) -> tuple[Float32, Float32]:
        """Return a thread's share of the row sum, and the reference, with the first `limit` keys of a tile.

        They have the bits that advance and exponentiate would give. State and scores stay.
        """
        geometry = self.smem.geometry
        own_limit = limit - self.half * geometry.run_keys
        counts = [own_limit > part * geometry.part_keys + place for part, place in (divmod(i, geometry.run_keys) for i in range(HALF_KEYS))]
        best = -Float32.inf
        for i in range(HALF_KEYS):
            best = cute.arch.fmax(best, cutlass.select_(counts[i], self.rS[i], -Float32.inf))
        best = cute.arch.fmax(best, self.swap(best))
        reference, alpha = follow_maximum(self.row_ref[0], best * self.scale_log2)
        sums = (self.rSum[0] * alpha, Float32(0))
        scale, shift = (self.scale_log2, self.scale_log2), (-shift_of(reference),) * 2
        for i in range(0, HALF_KEYS, 2):
            exponents = cute.arch.fma_packed_f32x2((self.rS[i], self.rS[i + 1]), scale, shift)
            probs = [cute.math.exp2(exponent, fastmath=True) for exponent in exponents]
            sums = cute.arch.add_packed_f32x2(sums, tuple(cutlass.select_(counts[i + j], probs[j], Float32(0)) for j in range(2)))
        return sums[0] + sums[1], reference

    @cute.jit
    def publish(self, operands: SparsePrefillOperands, token: Int32):
        """Hand the state of a token's softmax to the output role."""
        (self.smem.sRows + ((SHARES + self.half) * TILE_ROWS + self.row)).store(self.rSum[0])
        # both threads of a row have the same
        (self.smem.sRows + (REFERENCE * TILE_ROWS + self.row)).store(self.row_ref[0])
        (self.smem.sRows + (MAXIMUM * TILE_ROWS + self.row)).store(self.row_max[0])
        if operands.asks_lse_indexer():
            self._publish_indexer(operands, token)

    @cute.jit
    def _publish_indexer(self, operands: SparsePrefillOperands, token: Int32):
        """Hand the state of the softmax at the bound of lse_indexer to the output role."""
        share, reference = self.rSum[0], self.row_ref[0]
        tiles = operands.schedule.tile_range(token, Int32(0)).tiles
        if tiles_before_bound(operands, tiles) < tiles:
            kept = self._kept()
            share, reference = kept.load(), (kept + GROUP).load()
        (self.smem.sRows + ((INDEXER_SHARES + self.half) * TILE_ROWS + self.row)).store(share)
        (self.smem.sRows + (INDEXER_REFERENCE * TILE_ROWS + self.row)).store(reference)


@dataclass(frozen=True)
class Heads64Rows(Heads64RowsSm100):
    """One thread's scores and softmax state, in a CTA that works alone."""

    smem: SparsePrefillSmemSm100

    def mask(self, limit: Int32) -> None:
        """Set the scores of keys from `limit` on, counted within the tile, to -inf."""
        own_limit = limit - 2 * self.quad
        for i in range(FRAGMENT):
            self.rS[i] = cutlass.select_(own_limit <= 8 * (i // 4) + i % 2, -Float32.inf, self.rS[i])

    def _kept(self, r: int) -> cute.Pointer:
        """Return the place of this thread's share of a row before the bound of lse_indexer; the reference lies INDEXER_STATES further."""
        return self.smem.sIndexer + ((self.row + r * ROWS_APART) * QUAD + self.quad)

    def keep(self) -> None:
        """Keep the shares of the row sums and the references, at the bound of lse_indexer, until the end of the token."""
        for r in range(ROWS_PER_THREAD):
            kept = self._kept(r)
            kept.store(self.rSum[r])
            (kept + INDEXER_STATES).store(self.row_ref[r])

    def keep_before_bound(self, operands: SparsePrefillOperands) -> None:
        """Keep what the state would be with the keys of the tile before the bound of lse_indexer."""
        before = self.copy()
        before.mask(operands.args.indexer_topk % TILE_KEYS)
        before.exponentiate(before.advance(Int32(0)))
        before.keep()

    def copy(self) -> Heads64Rows:
        """Return rows of their own with the same scores, which have seen the same keys."""
        names = ("rS", "row_ref", "rSum", "row_max")
        copies = {name: cute.make_rmem_tensor_like(getattr(self, name)) for name in names}
        for name in names:
            copies[name].store(getattr(self, name).load())
        return replace(self, **copies)

    @cute.jit
    def publish(self, operands: SparsePrefillOperands, token: Int32):
        """Hand the state of a token's softmax to the output role: two threads of a quad each give half of the row sum."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            state = self.smem.sRows + (self.row + r * ROWS_APART)
            self._publish_share(state, self.rSum[r], self.row_ref[r], (SHARES, REFERENCE))
            if self.quad == 0:
                (state + MAXIMUM * TILE_ROWS).store(self.row_max[r])
            if operands.asks_lse_indexer():
                share, reference = self.rSum[r], self.row_ref[r]
                tiles = operands.schedule.tile_range(token, Int32(0)).tiles
                if tiles_before_bound(operands, tiles) < tiles:
                    kept = self._kept(r)
                    share, reference = kept.load(), (kept + INDEXER_STATES).load()
                self._publish_share(state, share, reference, (INDEXER_SHARES, INDEXER_REFERENCE))

    @cute.jit
    def _publish_share(self, state: cute.Pointer, share: Float32, reference: Float32, places: cutlass.Constexpr[tuple[int, int]]):
        """Store a row's sum, in two shares of two threads each, and its reference. places: of the first share and of the reference."""
        share = share + cute.arch.shuffle_sync_bfly(share, 1)
        if self.quad % 2 == 0:
            (state + (places[0] + self.quad // 2) * TILE_ROWS).store(share)
        if self.quad == 0:
            (state + places[1] * TILE_ROWS).store(reference)


def tiles_before_bound(operands: SparsePrefillOperands, tiles: Int32) -> Int32:
    """Return the number of a token's tiles before that of the first key that lse_indexer does not count; all if it counts all."""
    before = smaller(operands.args.indexer_topk // TILE_KEYS, tiles)
    return cutlass.select_(operands.asks_lse_indexer(), before, tiles)


@dataclass(frozen=True)
class RowResult:
    """Results of the softmax of a token in one row. total: sum of the exponentials, 0 iff the row attends to nothing."""

    total: Float32
    reference: Float32
    maximum: Float32

    @staticmethod
    def take(smem: SparsePrefillSmemSm100, thread: Int32) -> RowResult:
        """Read a thread's row."""
        row = smem.sRows + thread % TILE_ROWS
        total = (row + SHARES * TILE_ROWS).load() + (row + (SHARES + 1) * TILE_ROWS).load()
        return RowResult(total, (row + REFERENCE * TILE_ROWS).load(), (row + MAXIMUM * TILE_ROWS).load())

    def weight(self, operands: Any, token: Int32, thread: Int32) -> Float32:
        """Return the factor of the row of O, 0 for a row that attends to nothing."""
        row = first_query_row() + thread % TILE_ROWS
        weight = SinkScale().weight(operands, lambda: operands.schedule.work_tile(token, Int32(0)), row, self.total, self.reference)
        return cutlass.select_(self.total == 0.0, Float32(0), weight)

    @cute.jit
    def store(self, operands: SparsePrefillOperands, token: Int32, thread: Int32):
        """Store lse and the greatest logit, natural units; one of a row's two threads each."""
        row = first_query_row() + thread % TILE_ROWS
        empty = self.total == 0.0
        if row < operands.rows():
            if thread < TILE_ROWS:
                lse = (self.reference + cute.math.log2(self.total, fastmath=True)) * LN2
                operands.lse_of(token, row).store(cutlass.select_(empty, operands.empty_lse, lse))
            else:
                logit = self.maximum * (operands.scale_log2 * LN2)
                operands.max_logit_of(token, row).store(cutlass.select_(empty, -Float32.inf, logit))


@cute.jit
def store_lse_indexer(operands: SparsePrefillOperands, smem: SparsePrefillSmemSm100, token: Int32, thread: Int32):
    """Store lse_indexer of a row, natural units, if it is asked for; one of a row's two threads. Until stats_free."""
    row = first_query_row() + thread % TILE_ROWS
    if operands.asks_lse_indexer() and thread < TILE_ROWS and row < operands.rows():
        state = smem.sRows + thread
        total = (state + INDEXER_SHARES * TILE_ROWS).load() + (state + (INDEXER_SHARES + 1) * TILE_ROWS).load()
        lse = ((state + INDEXER_REFERENCE * TILE_ROWS).load() + cute.math.log2(total, fastmath=True)) * LN2
        operands.lse_indexer_of(token, row).store(cutlass.select_(total == 0.0, operands.empty_lse, lse))

"""Two groups of score warps that take tiles in turn, for SM100 decode kernels whose products take less time than a softmax.

Group g has every tile whose number is g modulo 2, from the read of its scores to its P. So two softmaxes are under way at a
time, half a period apart, and S is computed two tiles ahead or more. What passes from one tile to the next is a row's reference:

  reference_ready[2]   score -> score      4: reference of a tile, which the other group begins its own from

A thread keeps its share of the row sum relative to the last reference of its own
group; a work tile's four shares meet at its end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from ...manifest import NamedBarrier
from ...spec.dense_decode import TILE_ROWS
from ...spec.split_plan import TILE_KEYS
from ..attention.softmax import follow_maximum
from .config import GROUP, GROUP_WARPS, REFERENCE_WORDS, SCORE_BARRIER, LatentSmemSm100
from .score import LatentRowsSm100

GROUPS = 2
PAIRS_OF_WARPS = GROUP_WARPS // 2  # of a group: a pair has the two halves of 32 rows
ROWS_BARRIER = SCORE_BARRIER + GROUPS * PAIRS_OF_WARPS  # and the next: the warps of both groups that have the same 32 rows
# from SCORE_BARRIER on
BARRIER_NAMES = ("lower_rows_even", "upper_rows_even", "lower_rows_odd", "upper_rows_odd", "lower_rows", "upper_rows")
NAMED_BARRIERS = tuple(NamedBarrier(name, SCORE_BARRIER + i) for i, name in enumerate(BARRIER_NAMES))
ROWS_THREADS = 32 * 2 * GROUPS


@dataclass(frozen=True)
class AlternatingRowsSm100(LatentRowsSm100):
    """The scores and softmax state of a thread of one of two groups.

    group: which tiles are this thread's, 0 or 1. shared: shared memory of both groups; what a group has of its own begins in `smem`.
    rFactor: for this thread's share of the row sum, when the reference moves. rFirst: number of the work tile's first tile.
    """

    group: Int32
    shared: LatentSmemSm100
    rFactor: cute.Tensor
    rFirst: cute.Tensor

    tile_step = GROUPS
    apart = -TILE_KEYS  # columns of tensor memory from the scores of one group to those of the other

    @classmethod
    def create(cls, dtype: type[cutlass.Numeric], smem: LatentSmemSm100, tmem: Int32, thread: Int32, scale_log2: Float32) -> Self:
        """Return the state of a row that has seen nothing, for the tiles of this thread's group.

        Each group has a buffer for its scores.
        """
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // GROUP_WARPS
        rows = LatentRowsSm100.create(dtype, smem, tmem, thread, scale_log2)
        own = replace(
            rows.smem,
            sExchange=rows.smem.sExchange + group * smem.geometry.exchange_words,
            sRowValue=rows.smem.sRowValue + group * GROUP,
        )
        fields = {**vars(rows), "smem": own, "tmem": rows.tmem + group * cls.apart}
        rFactor, rFirst = (cute.make_rmem_tensor(cute.make_layout(1), dtype) for dtype in (Float32, Int32))
        return cls(**fields, group=group, shared=rows.smem, rFactor=rFactor, rFirst=rFirst)

    @property
    def publishes(self) -> Boolean:
        """Return whether this thread hands on what a row has come to."""
        return (self.half == 0) & (self.group == 0)

    # ---- the loop over tiles: a group has every other one -----------------------------------------------------------

    def begin(self, tile: Int32) -> Int32:
        """Return the first of the group's tiles of a work tile, which begins with the tile-th tile."""
        self.rFirst[0] = tile
        return (self.group - tile) & 1

    def conclude(self, last: Int32) -> None:
        """Bring this thread's share of the row sum to the reference of a work tile's last tile."""
        self.smem.reference_ready.consumer_wait(last)
        reference = self._reference(last).load()
        self.rSum[0] = self.rSum[0] * factor_between(self.row_ref[0], reference)
        self.row_ref[0] = reference

    def sync_halves(self) -> None:
        """Wait for the warp that has the other half of this warp's rows."""
        cute.arch.barrier(barrier_id=SCORE_BARRIER + self.group * PAIRS_OF_WARPS + self._rows_pair(), number_of_threads=64)

    def _rows_pair(self) -> Int32:
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) % PAIRS_OF_WARPS

    # ---- one tile ---------------------------------------------------------------------------------------------------

    def exponentiate(self, alpha: Float32) -> None:
        """Replace the scores by probabilities.

        This thread's share of the row sum is relative to its own last reference, not to the last one of both groups.
        """
        super().exponentiate(self.rFactor[0])

    def follow(self, old: Float32, candidate: Float32, greatest: Float32) -> tuple[Float32, Float32]:
        """Return (reference, factor), from the one of the tile before, this tile's maximum and that of all tiles so far."""
        return follow_maximum(old, candidate)

    def advance(self, tile: Int32) -> Float32:
        """Move the reference to a tile if need be. Return the factor for the O accumulated before."""
        return self._follow(tile, self.tile_maximum())

    @cute.jit
    def _follow(self, tile: Int32, candidate: Float32) -> Float32:
        """Take the reference over from the other group, move it to this tile if need be and hand it on.

        Return the factor for the O accumulated before.
        """
        old, greatest = -Float32.inf, candidate
        if tile != self.rFirst[0]:
            self.smem.reference_ready.consumer_wait(tile - 1)
            before = self._reference(tile - 1)
            old = before.load()
            greatest = cute.arch.fmax(greatest, (before + TILE_ROWS).load())
        new, alpha = self.follow(old, candidate, greatest)
        if self.half == 0:
            own = self._reference(tile)
            own.store(new)
            (own + TILE_ROWS).store(greatest)
        # all four warps: when the other group has these arrivals, it may write over what they have read
        self.smem.reference_ready.producer_commit(tile)
        self.rFactor[0] = factor_between(self.row_ref[0], new)
        self.row_ref[0] = new
        return alpha

    def _reference(self, tile: Int32) -> cute.Pointer:
        return self.shared.sReference + (self.smem.reference_ready.stage(tile) * REFERENCE_WORDS + self.row)

    def row_sum(self) -> Float32:
        """Return the sum over all keys seen, 0 iff the row attends to nothing.

        Four shares are added, in an order that the threads' groups do not change. Call it after stats_free: then all threads have read
        the shares of the work tile before.
        """
        shares = self.shared.sShares + self.row
        (shares + (self.group * GROUPS + self.half) * TILE_ROWS).store(self.rSum[0])
        cute.arch.barrier(barrier_id=ROWS_BARRIER + self._rows_pair(), number_of_threads=ROWS_THREADS)
        even, odd = (
            (shares + group * GROUPS * TILE_ROWS).load() + (shares + (group * GROUPS + 1) * TILE_ROWS).load() for group in range(GROUPS)
        )
        return even + odd


def factor_between(old: Float32, new: Float32) -> Float32:
    """Return the factor from one reference to another: 1 where both are -inf."""
    return cutlass.select_(old == new, Float32(1), cute.math.exp2(old - new, fastmath=True))

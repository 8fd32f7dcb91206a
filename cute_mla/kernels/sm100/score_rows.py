"""The score role's view of a tile on SM100: half a row of scores per thread.

Thread t of the score warps has query row t % 64 and keys 32 (t / 64) .. + 31 of every tile. The tensor cores leave the
partial sums of a row over two halves of the columns in lanes t % 64 and 64 + t % 64, so the two threads of a row swap
half of what they read: each sends the partial scores of the other's keys. The row maximum takes a second swap.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from ...spec.dense_decode import TILE_ROWS
from ..attention.softmax import follow_maximum, shift_of
from ..primitives import tcgen05
from ..primitives.fragments import aligned, pack_word
from .config import (
    GROUP_WARPS,
    HALF_KEYS,
    ROW_BYTES,
    SCORE_BARRIER,
    SCORE_COLUMN,
    VECTOR,
    Tiles,
)

VECTORS = HALF_KEYS // VECTOR
MAX_CHAINS = 4  # independent maxima, so that none waits for the one before


@dataclass(frozen=True)
class ScoreRows:
    """One thread's scores and running softmax state.

    tmem: address of the warp's first lane. half: which keys of a tile are this thread's. rS: scores, then
    probabilities. rMax: the reference, log2 units. rSum: this thread's share of the row sum. rBest: the greatest score of the
    row, unscaled, which the reference only follows. Where nobody reads it, the compiler drops it. dtype: of P.
    """

    dtype: type[cutlass.Numeric]
    tiles: Tiles
    tmem: Int32
    half: Int32
    row: Int32
    scale_log2: Float32
    rS: cute.Tensor
    rMax: cute.Tensor
    rSum: cute.Tensor
    rBest: cute.Tensor

    @staticmethod
    def create(dtype: type[cutlass.Numeric], tiles: Tiles, tmem: Int32, thread: Int32, scale_log2: Float32) -> ScoreRows:
        """State of a row that has seen nothing."""
        rS = cute.make_rmem_tensor(cute.make_layout(HALF_KEYS), Float32)
        rMax, rSum, rBest = (cute.make_rmem_tensor(cute.make_layout(1), Float32) for _ in range(3))
        return ScoreRows(dtype, tiles, tmem, thread // TILE_ROWS, thread % TILE_ROWS, scale_log2, rS, rMax, rSum, rBest)

    @property
    def publishes(self) -> Boolean:
        """Whether this thread hands on what a row has come to."""
        return self.half == 0

    def reset(self) -> None:
        """Forgets all keys."""
        self.rMax[0] = -Float32.inf
        self.rSum[0] = Float32(0)
        self.rBest[0] = -Float32.inf

    def store_ones(self) -> None:
        """Writes what P is multiplied with for its sum, where that is asked for."""

    def sync_halves(self) -> None:
        """Waits for the warp that has the other half of this warp's rows."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cute.arch.barrier(barrier_id=SCORE_BARRIER + warp % (GROUP_WARPS // 2), number_of_threads=64)

    def take_partial_sums(self) -> Any:
        """Partial scores from tensor memory, which may be overwritten when this returns: of this thread's keys to its
        scores. Returns those of the other's keys."""
        own = tcgen05.load_columns(self.tmem + (SCORE_COLUMN + self.half * HALF_KEYS), HALF_KEYS)
        others = tcgen05.load_columns(self.tmem + (SCORE_COLUMN + (1 - self.half) * HALF_KEYS), HALF_KEYS)
        tcgen05.await_loads()
        tcgen05.fence_before_signal()
        for i in range(HALF_KEYS):
            self.rS[i] = own[i]
        return others

    def add_partial_sums(self, others: Any) -> None:
        """Completes the scores: sends the other thread of the row what belongs to it, and adds what it has sent."""
        for vector in range(VECTORS):
            rOut = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)
            for i in range(VECTOR):
                rOut[i] = others[vector * VECTOR + i]
            cute.autovec_copy(rOut, self._exchanged(self.half, vector))
        self.sync_halves()
        for vector in range(VECTORS):
            rIn = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)
            cute.autovec_copy(self._exchanged(1 - self.half, vector), rIn)
            for i in range(0, VECTOR, 2):
                k = vector * VECTOR + i
                self.rS[k], self.rS[k + 1] = cute.arch.add_packed_f32x2((self.rS[k], self.rS[k + 1]), (rIn[i], rIn[i + 1]))

    def _exchanged(self, sender: Int32, vector: int) -> cute.Tensor:
        offset = ((sender * VECTORS + vector) * TILE_ROWS + self.row) * VECTOR
        return cute.make_tensor(aligned(self.tiles.sExchange + offset, 16), cute.make_layout(VECTOR))

    def mask(self, limit: Int32) -> None:
        """Sets the scores of keys from `limit` on, counted within the tile, to -inf. Selects, so that NaN vanishes."""
        own_limit = limit - self.half * HALF_KEYS
        for i in range(HALF_KEYS):
            self.rS[i] = cutlass.select_(own_limit <= i, -Float32.inf, self.rS[i])

    def mask_unseen(self, seen: Int32) -> None:
        """Sets the scores of keys whose bit is 0 to -inf, among the bits of this thread's keys."""
        for i in range(HALF_KEYS):
            self.rS[i] = cutlass.select_((seen & (1 << i)) == 0, -Float32.inf, self.rS[i])

    def swap(self, value: Float32) -> Float32:
        """The value that the other thread of the row gives. Two calls need a sync_halves between them."""
        (self.tiles.sRowValue + (self.half * TILE_ROWS + self.row)).store(value)
        self.sync_halves()
        return (self.tiles.sRowValue + ((1 - self.half) * TILE_ROWS + self.row)).load()

    def advance(self) -> Float32:
        """Moves the reference to this tile if need be. Returns the factor for everything accumulated before: 1 if the
        reference stays."""
        self.rMax[0], alpha = follow_maximum(self.rMax[0], self.tile_maximum())
        return alpha

    def tile_maximum(self) -> Float32:
        """The greatest score of the row in this tile, log2 units."""
        chains = [self.rS[i] for i in range(MAX_CHAINS)]
        for i in range(MAX_CHAINS, HALF_KEYS):
            chains[i % MAX_CHAINS] = cute.arch.fmax(chains[i % MAX_CHAINS], self.rS[i])
        best = reduce(cute.arch.fmax, chains)
        best = cute.arch.fmax(best, self.swap(best))
        self.rBest[0] = cute.arch.fmax(self.rBest[0], best)
        return best * self.scale_log2

    def exponentiate(self, alpha: Float32) -> None:
        """Replaces the scores by unnormalised probabilities and adds them to the row sum."""
        sums = (self.rSum[0] * alpha, Float32(0))
        scale, shift = (self.scale_log2, self.scale_log2), (-shift_of(self.rMax[0]),) * 2
        for i in range(0, HALF_KEYS, 2):
            exponents = cute.arch.fma_packed_f32x2((self.rS[i], self.rS[i + 1]), scale, shift)
            self.rS[i], self.rS[i + 1] = (cute.math.exp2(exponent, fastmath=True) for exponent in exponents)
            sums = cute.arch.add_packed_f32x2(sums, (self.rS[i], self.rS[i + 1]))
        self.rSum[0] = sums[0] + sums[1]

    def word_of_probs(self, first: int) -> Int32:
        """As many probabilities as make a word, rounded."""
        return pack_word([self.rS[first + i] for i in range(self.tiles.geometry.word_elements)], self.dtype)

    def store_probs(self, slot: Int32) -> None:
        """The probabilities, packed, over the RoPE columns of their tile: rows of 128 swizzled bytes."""
        geometry = self.tiles.geometry
        line = self.tiles.slot(slot) + (geometry.probs_offset + self.row * ROW_BYTES)
        chunk_keys = VECTOR * geometry.word_elements  # of 16 bytes
        for chunk in range(HALF_KEYS // chunk_keys):
            rWords = cute.make_rmem_tensor(cute.make_layout(VECTOR), Int32)
            for i in range(VECTOR):
                k = chunk * chunk_keys + i * geometry.word_elements
                rWords[i] = self.word_of_probs(k)
            place = (self.half * (HALF_KEYS // chunk_keys) + chunk) ^ (self.row % 8)
            target = cute.recast_ptr(aligned(line + place * 16, 16), dtype=Int32)
            cute.autovec_copy(rWords, cute.make_tensor(target, cute.make_layout(VECTOR)))

    def row_sum(self) -> Float32:
        """Sum over all keys seen, 0 iff the row attends to nothing."""
        self.sync_halves()
        return self.rSum[0] + self.swap(self.rSum[0])

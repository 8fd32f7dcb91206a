"""Scores and softmax of up to 64 heads in a CTA that works alone on Blackwell. heads64.py describes how S lies in tensor memory.

Warp w has the query rows 16 w .. 16 w + 15. The tensor cores leave their scores over the first half of the columns in the warp's lanes
0..15, over the second half in 16..31. A thread loads the same rows and keys of both and adds them: nothing is exchanged. It has two rows,
t / 4 and 8 further, and the keys 8 e + 2 (t % 4) and the next one of each; the four threads of a row find its maximum by shuffles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any, Self

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.split_plan import TILE_KEYS
from ..attention.softmax import follow_maximum, shift_of
from ..primitives import tcgen05
from ..primitives.arithmetic import pack_pair
from ..primitives.copies import store_groups, writer_address
from ..primitives.wgmma import ROWS_APART, ROWS_PER_THREAD, half, quad_max, quad_sum
from .config import ALL_SEEN, BOX_BYTES, HALF_KEYS, HALF_LANES, ROW_BYTES, SCORE_COLUMN
from .heads64 import LOWER_LANES
from .score import LatentRowsSm100

QUAD = 4  # threads of the score role that have a row
FRAGMENT = HALF_KEYS  # scores of a thread: two rows, 16 keys each
WORD_KEYS = 32  # whose bits make a word
RowFloats = tuple[Float32, Float32]  # of a thread's two rows


@dataclass(frozen=True)
class Heads64RowsSm100(LatentRowsSm100):
    """One thread's scores and running softmax state.

    rS: register i is row half(i), key 8 (i / 4) + 2 quad + i % 2. row: the first of the two rows. quad: which keys are this thread's.
    row_ref, rSum, row_max: of both rows; rSum is this thread's share. half: 0, since all four warps hand on what they have.
    """

    quad: Int32

    @classmethod
    def create(cls, dtype: type[cutlass.Numeric], smem: Any, tmem: Int32, thread: Int32, scale_log2: Float32) -> Self:
        """Return the state of rows that have seen nothing."""
        rS = cute.make_rmem_tensor(cute.make_layout(FRAGMENT), Float32)
        row_ref, rSum, row_max = (cute.make_rmem_tensor(cute.make_layout(ROWS_PER_THREAD), Float32) for _ in range(3))
        row = thread // 32 * HALF_LANES + thread % 32 // QUAD
        return cls(dtype, smem, tmem, Int32(0), row, scale_log2, rS, row_ref, rSum, row_max, thread % QUAD)

    def reset(self) -> None:
        """Forget all keys."""
        for r in range(ROWS_PER_THREAD):
            self.row_ref[r] = -Float32.inf
            self.rSum[r] = Float32(0)
            self.row_max[r] = -Float32.inf

    # ---- one tile ---------------------------------------------------------------------------------------------------

    def read_scores(self, tile: Int32) -> None:
        """Wait scores_ready, signal scores_free. Load the scores over both halves of the columns; add them."""
        self.smem.scores_ready.consumer_wait(tile)
        tcgen05.fence_after_wait()
        first = self.tmem + SCORE_COLUMN
        left, right = tcgen05.load_fragment(first, TILE_KEYS), tcgen05.load_fragment(first + LOWER_LANES, TILE_KEYS)
        tcgen05.await_loads()
        tcgen05.fence_before_signal()
        self.smem.scores_free.consumer_release(tile)
        for i in range(0, FRAGMENT, 2):
            self.rS[i], self.rS[i + 1] = cute.arch.add_packed_f32x2((left[i], left[i + 1]), (right[i], right[i + 1]))

    @cute.jit
    def mask_seen(self, tile: Int32):
        """Set scores of keys that do not count to -inf."""
        words = self.smem.seen_words(tile)
        seen = words.load(), (words + 1).load()
        if (seen[0] & seen[1]) != ALL_SEEN:
            self.mask_keys(seen)

    def mask_keys(self, seen: tuple[Int32, Int32]) -> None:
        """Set the scores of keys whose bit is 0 to -inf. seen: bits of the keys 0..31 and 32..63."""
        own = [word >> (2 * self.quad) for word in seen]
        for i in range(FRAGMENT):
            word, bit = divmod(8 * (i // 4) + i % 2, WORD_KEYS)
            self.rS[i] = cutlass.select_((own[word] & (1 << bit)) == 0, -Float32.inf, self.rS[i])

    def advance(self, tile: Int32) -> RowFloats:
        """Move the references to this tile if need be.

        Return the factors for everything accumulated before: 1 if the reference stays.
        """
        alphas = []
        for r in range(ROWS_PER_THREAD):
            best = quad_max(reduce(cute.arch.fmax, [self.rS[i] for i in range(FRAGMENT) if half(i) == r]))
            self.row_max[r] = cute.arch.fmax(self.row_max[r], best)
            self.row_ref[r], alpha = follow_maximum(self.row_ref[r], best * self.scale_log2)
            alphas.append(alpha)
        return alphas[0], alphas[1]

    def publish_alpha(self, tile: Int32, alphas: RowFloats) -> None:
        """Hand the factors of both rows of O to the output role. Signal alpha_ready."""
        self._store_alphas(tile, alphas)
        self.smem.alpha_ready.producer_commit(tile)

    @cute.jit
    def _store_alphas(self, tile: Int32, alphas: RowFloats):
        if self.quad == 0:
            place = self.smem.sAlpha + ((tile % self.smem.geometry.parities) * TILE_ROWS + self.row)
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                (place + r * ROWS_APART).store(alphas[r])

    def exponentiate(self, alphas: RowFloats) -> None:
        """Replace the scores by unnormalised probabilities and add them to the row sums."""
        scale = (self.scale_log2, self.scale_log2)
        for r in range(ROWS_PER_THREAD):
            shift = (-shift_of(self.row_ref[r]),) * 2
            sums = (self.rSum[r] * alphas[r], Float32(0))
            for i in range(2 * r, FRAGMENT, 2 * ROWS_PER_THREAD):
                exponents = cute.arch.fma_packed_f32x2((self.rS[i], self.rS[i + 1]), scale, shift)
                self.rS[i], self.rS[i + 1] = (cute.math.exp2(exponent, fastmath=True) for exponent in exponents)
                sums = cute.arch.add_packed_f32x2(sums, (self.rS[i], self.rS[i + 1]))
            self.rSum[r] = sums[0] + sums[1]

    def store_probs(self, tile: Int32) -> None:
        """Store the probabilities, packed, over the RoPE columns of their tile: rows of 128 swizzled bytes."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        stage = self.smem.kv_ready.stage(tile)
        box = Int32((self.smem.stage(stage) + (self.smem.geometry.rope_box * BOX_BYTES + warp * (HALF_LANES * ROW_BYTES))).toint())
        place = writer_address(box, cute.arch.lane_idx(), ROW_BYTES)
        words = [pack_pair(self.rS[i], self.rS[i + 1], self.dtype) for i in range(0, FRAGMENT, 2)]
        for pair in range(len(words) // 4):
            store_groups(place, 0, pair, words[4 * pair : 4 * pair + 4])

    # ---- the end of a work tile -------------------------------------------------------------------------------------

    @property
    def publishes(self) -> Boolean:
        """Return whether this thread hands on what a row has come to: of four, two have one of their two rows each."""
        return self.quad < ROWS_PER_THREAD

    @property
    def result_row(self) -> Int32:
        """Return the row that this thread hands on."""
        return self.row + self.quad * ROWS_APART

    def row_sum(self) -> Float32:
        """Return the sum over all keys seen of the row that this thread hands on, whose reference becomes that of its first row."""
        totals = [quad_sum(self.rSum[r]) for r in range(ROWS_PER_THREAD)]
        self.row_ref[0] = cutlass.select_(self.quad == 0, self.row_ref[0], self.row_ref[1])
        return cutlass.select_(self.quad == 0, totals[0], totals[1])

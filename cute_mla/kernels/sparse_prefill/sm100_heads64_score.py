"""The score role of sparse prefill on Blackwell with up to 64 heads: softmax over fragments, P and rescale factors to shared memory.

Warp w has the query rows 16 w .. 16 w + 15. The tensor cores leave their scores over the first half of the columns in the warp's lanes
0..15, over the second half in 16..31. A thread loads the same rows and keys of both and adds them: nothing is exchanged. It has two rows,
t / 4 and 8 further, and the keys 8 e + 2 (t % 4) and the next one of each; the four threads of a row find its maximum by shuffles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import KeyTile
from ..attention.softmax import follow_maximum, shift_of
from ..primitives import tcgen05
from ..primitives.arithmetic import pack_pair
from ..primitives.copies import store_groups, writer_address
from ..primitives.wgmma import ROWS_APART, ROWS_PER_THREAD, half, quad_max
from ..sm100.config import BOX_BYTES, HALF_KEYS, HALF_LANES, ROW_BYTES, SCORE_COLUMN, Tiles
from ..sm100.indexed_keys import ALL_SEEN, SEEN_WORDS
from ..sm100.score import ScoreRows
from .operands import Operands
from .sm100_heads64_tiles import INDEXER_STATES, LOWER_LANES, QUAD, ROPE_BOX, HeadsPipes
from .sm100_score import INDEXER_REFERENCE, INDEXER_SHARES, MAXIMUM, REFERENCE, SHARES, TokenScoreRole, tiles_before_bound

FRAGMENT = HALF_KEYS  # scores of a thread: two rows, 16 keys each
WORD_KEYS = 32  # whose bits make a word
RowFloats = tuple[Float32, Float32]  # of a thread's two rows


@dataclass(frozen=True)
class FragmentRows(ScoreRows):
    """One thread's scores and running softmax state.

    rS: register i is row half(i), key 8 (i / 4) + 2 quad + i % 2. row: the first of the two rows. quad: which keys are this thread's.
    row_ref, rSum, row_max: of both rows; rSum is this thread's share. half: 0, since all four warps hand on what they have.
    """

    quad: Int32

    @staticmethod
    def create(dtype: type[cutlass.Numeric], tiles: Tiles, tmem: Int32, thread: Int32, scale_log2: Float32) -> FragmentRows:
        """Return the state of rows that have seen nothing."""
        rS = cute.make_rmem_tensor(cute.make_layout(FRAGMENT), Float32)
        row_ref, rSum, row_max = (cute.make_rmem_tensor(cute.make_layout(ROWS_PER_THREAD), Float32) for _ in range(3))
        row = thread // 32 * HALF_LANES + thread % 32 // QUAD
        return FragmentRows(dtype, tiles, tmem, Int32(0), row, scale_log2, rS, row_ref, rSum, row_max, thread % QUAD)

    def reset(self) -> None:
        """Forget all keys."""
        for r in range(ROWS_PER_THREAD):
            self.row_ref[r] = -Float32.inf
            self.rSum[r] = Float32(0)
            self.row_max[r] = -Float32.inf

    # ---- one tile ---------------------------------------------------------------------------------------------------

    def load_scores(self) -> tuple[Any, Any]:
        """Load the scores over both halves of the columns, which may be overwritten when this returns."""
        first = self.tmem + SCORE_COLUMN
        halves = tcgen05.load_fragment(first, TILE_KEYS), tcgen05.load_fragment(first + LOWER_LANES, TILE_KEYS)
        tcgen05.await_loads()
        tcgen05.fence_before_signal()
        return halves

    def add_scores(self, halves: tuple[Any, Any]) -> None:
        """Add the scores over both halves of the columns."""
        left, right = halves
        for i in range(0, FRAGMENT, 2):
            self.rS[i], self.rS[i + 1] = cute.arch.add_packed_f32x2((left[i], left[i + 1]), (right[i], right[i + 1]))

    def mask(self, limit: Int32) -> None:
        """Set the scores of keys from `limit` on, counted within the tile, to -inf."""
        own_limit = limit - 2 * self.quad
        for i in range(FRAGMENT):
            self.rS[i] = cutlass.select_(own_limit <= 8 * (i // 4) + i % 2, -Float32.inf, self.rS[i])

    def mask_keys(self, seen: tuple[Int32, Int32]) -> None:
        """Set the scores of keys whose bit is 0 to -inf. seen: bits of the keys 0..31 and 32..63."""
        own = [word >> (2 * self.quad) for word in seen]
        for i in range(FRAGMENT):
            word, bit = divmod(8 * (i // 4) + i % 2, WORD_KEYS)
            self.rS[i] = cutlass.select_((own[word] & (1 << bit)) == 0, -Float32.inf, self.rS[i])

    def follow(self) -> RowFloats:
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

    @cute.jit
    def store_alphas(self, tile: Int32, alphas: RowFloats):
        """Store the factors of both rows."""
        if self.quad == 0:
            place = self.tiles.sAlpha + ((tile % self.tiles.geometry.parities) * TILE_ROWS + self.row)
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                (place + r * ROWS_APART).store(alphas[r])

    def exponentiate_rows(self, alphas: RowFloats) -> None:
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

    def store_probs(self, stage: Int32) -> None:
        """Store the probabilities, packed, over the RoPE columns of their tile: rows of 128 swizzled bytes."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        box = Int32((self.tiles.stage(stage) + (ROPE_BOX * BOX_BYTES + warp * (HALF_LANES * ROW_BYTES))).toint())
        place = writer_address(box, cute.arch.lane_idx(), ROW_BYTES)
        words = [pack_pair(self.rS[i], self.rS[i + 1], self.dtype) for i in range(0, FRAGMENT, 2)]
        for pair in range(len(words) // 4):
            store_groups(place, 0, pair, words[4 * pair : 4 * pair + 4])

    # ---- the end of a token -----------------------------------------------------------------------------------------

    @cute.jit
    def publish_share(self, state: cute.Pointer, share: Float32, reference: Float32, places: cutlass.Constexpr[tuple[int, int]]):
        """Store a row's sum, in two shares of two threads each, and its reference. places: of the first share and of the reference."""
        share = share + cute.arch.shuffle_sync_bfly(share, 1)
        if self.quad % 2 == 0:
            (state + (places[0] + self.quad // 2) * TILE_ROWS).store(share)
        if self.quad == 0:
            (state + places[1] * TILE_ROWS).store(reference)

    def kept(self, pipes: HeadsPipes, r: int) -> cute.Pointer:
        """Return where this thread keeps a row's share before the bound of lse_indexer; its reference lies INDEXER_STATES further."""
        return pipes.sIndexer + ((self.row + r * ROWS_APART) * QUAD + self.quad)

    def keep(self, pipes: HeadsPipes) -> None:
        """Keep the shares of the row sums and the references, at the bound of lse_indexer, until the end of the token."""
        for r in range(ROWS_PER_THREAD):
            kept = self.kept(pipes, r)
            kept.store(self.rSum[r])
            (kept + INDEXER_STATES).store(self.row_ref[r])

    def copy(self) -> FragmentRows:
        """Return rows of their own with the same scores, which have seen the same keys."""
        names = ("rS", "row_ref", "rSum", "row_max")
        copies = {name: cute.make_rmem_tensor_like(getattr(self, name)) for name in names}
        for name in names:
            copies[name].store(getattr(self, name).load())
        return replace(self, **copies)


class FragmentMask:
    """Mask of keys that do not count, of scores in fragments."""

    @cute.jit
    def apply(self, operands: Any, pipes: HeadsPipes, rows: FragmentRows, keys: KeyTile, tile: Int32):
        """Set scores of keys that do not count to -inf."""
        words = pipes.sSeen + pipes.seen_ready.stage(tile) * SEEN_WORDS
        seen = words.load(), (words + 1).load()
        if (seen[0] & seen[1]) != ALL_SEEN:
            rows.mask_keys(seen)

    def clear_values(self, operands: Any, rows: ScoreRows, stage: Int32, keys: KeyTile) -> None:
        """Do nothing: keys that do not count are zeros."""


class BoundedFragmentMask(FragmentMask):
    """Mask of the tile that the bound of lse_indexer lies in, which sums up the keys before the bound."""

    def apply(self, operands: Operands, pipes: HeadsPipes, rows: FragmentRows, keys: KeyTile, tile: Int32) -> None:
        """Set scores of keys that do not count to -inf. Keep the state of rows that would have seen the keys before the bound alone."""
        super().apply(operands, pipes, rows, keys, tile)
        before = rows.copy()
        before.mask(operands.args.indexer_topk % TILE_KEYS)
        before.exponentiate_rows(before.follow())
        before.keep(pipes)


@dataclass(frozen=True)
class HeadsScoreRole(TokenScoreRole):
    """Four warps."""

    @cute.jit
    def score_tile(self, operands: Operands, pipes: HeadsPipes, rows: FragmentRows, keys: KeyTile, tile: Int32):
        """Turn S of one tile into P."""
        pipes.scores_ready.consumer_wait(tile)
        tcgen05.fence_after_wait()
        halves = rows.load_scores()
        pipes.scores_free.consumer_release(tile)
        rows.add_scores(halves)
        self.mask.apply(operands, pipes, rows, keys, tile)
        alphas = rows.follow()
        rows.store_alphas(tile, alphas)
        pipes.alpha_ready.producer_commit(tile)
        rows.exponentiate_rows(alphas)
        rows.store_probs(pipes.kv_ready.stage(tile))
        cute.arch.fence_proxy("async.shared", space="cta")
        pipes.probs_ready.producer_commit(tile)

    @cute.jit
    def score_bounded_tile(self, operands: Operands, pipes: HeadsPipes, rows: FragmentRows, keys: KeyTile, tile: Int32):
        """Turn S of the tile that the bound of lse_indexer lies in into P, or pass the tile on if it has no keys. Keep the state there."""
        self.validity.wait(pipes, tile)
        if not self.validity.has_keys(pipes, tile):
            rows.keep(pipes)
        replace(self, mask=BoundedFragmentMask()).score_valid_tile(operands, pipes, rows, keys, tile)  # type: ignore[arg-type]  # of FragmentRows

    @cute.jit
    def publish(self, operands: Operands, pipes: HeadsPipes, rows: FragmentRows, req: Int32, begin_tile: Int32):
        """Hand what a token's softmax has come to to the output role: two threads of a quad each give half of the row sum."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            state = pipes.sRows + (rows.row + r * ROWS_APART)
            rows.publish_share(state, rows.rSum[r], rows.row_ref[r], (SHARES, REFERENCE))
            if rows.quad == 0:
                (state + MAXIMUM * TILE_ROWS).store(rows.row_max[r])
            if operands.asks_lse_indexer():
                share, reference = rows.rSum[r], rows.row_ref[r]
                tiles = operands.schedule.tile_range(req, Int32(0)).tiles
                if tiles_before_bound(operands, tiles) < tiles:
                    kept = rows.kept(pipes, r)
                    share, reference = kept.load(), (kept + INDEXER_STATES).load()
                rows.publish_share(state, share, reference, (INDEXER_SHARES, INDEXER_REFERENCE))
        return rows.rSum[0]

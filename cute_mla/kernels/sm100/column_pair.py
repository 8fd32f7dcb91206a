"""Two CTAs on SM100 that divide the latent columns of 64 query rows: what their roles do besides those of a CTA alone (heads64.py).

CTA r of the cluster has the latent columns 512 r .. 512 r + 511 of keys and values, in two halves, and the rotary
columns 32 r .. 32 r + 31. Its tensor cores sum S over these columns. Of every thread's two rows of S a CTA keeps one and sends the other:
it adds the peer's part to the row that it keeps, computes the softmax of 32 rows, and sends their P, rescale factors and weights to the
peer. O of all 64 rows and 512 columns stays here.

The trick: query row q lies at place q of the products in CTA 0 and at place q ^ 8 in CTA 1. So both keep the first row of each thread and
send the second, without a select, and P goes from places 16 w .. + 7 of warp w to places 16 w + 8 .. + 15 of the peer: 1,024 neighbouring
bytes, one bulk copy.

Pipelines besides those of a CTA alone (producer -> consumer; arrivals per phase):
  partial_ready   score -> score          4, and the bytes of the peer's part of S
  alpha_ready[2]  score -> output         4, and the bytes of the peer's rescale factors
  probs_ready[2]  score -> mma            4, and the bytes of the peer's P
  stats_ready     score -> output         4, and the bytes of the peer's weights
  stats_free      output -> score         8: the warps of both CTAs
  kv_free[3]      mma -> load, output     2: a commit of either CTA. A P that is on its way to the peer lies in the stage

Q of the next work tile is loaded during the last softmax of a work tile, so that its first S follows the last P V at once.

One buffer holds the peer's part of S, without a barrier that says when it is free: probs_ready of a tile says that the peer has read what
it was sent of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any, Self

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint8, cute
from cutlass.experimental import primitives

from ...spec.dense_decode import COLUMN_CTAS, TILE_ROWS
from ...spec.mla import D_WIDE
from ..attention.cta import Arrivals
from ..attention.scheduler import LatentOperands, TileRange
from ..attention.softmax import follow_maximum, shift_of
from ..primitives import tcgen05
from ..primitives.arithmetic import pack_pair, pin_register
from ..primitives.copies import BOX_ROW_BYTES, CHUNK, MATRIX_ROWS, smem_pointer
from ..primitives.peer import arrive_expecting, copy_to_peer, peer_shift, send_to_peer
from ..primitives.pipeline import StageBarriers
from ..primitives.rows import aligned
from ..primitives.smem import SWIZZLE_PERIOD, Array, Barriers, Field, SmemLayout
from ..primitives.wgmma import FP32_BYTES, ROWS_APART, half, quad_max, quad_sum
from .config import (
    BOX_BYTES,
    CTA_ROPE,
    GROUP,
    GROUP_WARPS,
    HALF_KEYS,
    HALF_LANES,
    ROW_BYTES,
    SCORE_COLUMN,
    VECTOR,
    LatentGeometrySm100,
    LatentSmemSm100,
)
from .heads64 import HEADS64, LOWER_LANES, Heads64MmaRoleSm100, Heads64Products
from .heads64_rows import QUAD, WORD_KEYS, Heads64RowsSm100
from .output import SCALED_AT_ONCE, LatentOutputRoleSm100, scale_output

COLUMNS = D_WIDE // COLUMN_CTAS  # latent ones of a CTA
KEPT = HALF_KEYS // COLUMN_CTAS  # scores of a thread: one row, 16 keys
VECTOR_BYTES = GROUP * VECTOR * FP32_BYTES  # of the peer's part of S, from a thread's vector to its next
WARP_PARTIAL_BYTES = 32 * KEPT * FP32_BYTES
SENT_PROBS_BYTES = ROWS_APART * BOX_ROW_BYTES  # of a warp
SENT_ROW_BYTES = ROWS_APART * FP32_BYTES  # a number a row


def rank() -> Int32:
    """Return the number of this CTA in the cluster."""
    return cute.arch.block_idx_in_cluster()


@dataclass(frozen=True)
class ColumnPairGeometry(LatentGeometrySm100):
    """Numbers of one of the CTAs."""

    row_latent = D_WIDE
    half_rope = CTA_ROPE // COLUMN_CTAS

    def multiplies(self) -> Boolean:
        """Return True: each CTA multiplies for itself."""
        return Boolean(True)

    def first_column(self) -> Int32:
        """Return the first latent column of this CTA."""
        return rank() * COLUMNS

    def rope_begin(self) -> Int32:
        """Return the first rotary column of this CTA, counted from there."""
        return D_WIDE + rank() * CTA_ROPE - self.first_column()

    def layout(self, *added: Field) -> SmemLayout:
        """Return the layout of shared memory. added: fields of a kernel's own."""
        return SmemLayout((
            Array("sKv", Uint8, self.kv_stages * self.stage_bytes, SWIZZLE_PERIOD),
            Array("sPartial", Float32, GROUP * KEPT, VECTOR * FP32_BYTES),
            Array("sAlpha", Float32, self.parities * TILE_ROWS),
            Array("sInverse", Float32, TILE_ROWS),
            *(Barriers(name, self.kv_stages) for name in ("left_ready", "left_free", "kv_ready", "kv_free")),
            *(Barriers(name, 1) for name in ("query_ready", "scores_ready", "scores_free", "partial_ready", "stats_ready", "stats_free")),
            *(Barriers(name, self.parities) for name in ("alpha_ready", "probs_ready", "output_ready")),
            Array("tmem_cell", Int32, 1),
            *added,
        ))  # fmt: skip


GEOMETRY = ColumnPairGeometry(kv_stages=HEADS64.kv_stages, score_groups=1, score_parts=1, latent=COLUMNS, paired=False)


@dataclass(frozen=True)
class ColumnPairSmem(LatentSmemSm100):
    """Shared memory with the peer's part of S."""

    sPartial: cute.Pointer  # fp32 (vectors, 128 threads, 4 words)
    partial_ready: StageBarriers


def column_pair_arrivals(smem: Any) -> tuple[Arrivals, ...]:
    """Return the arrivals of every barrier but those of work tiles."""
    by_warps = (
        smem.query_ready, smem.scores_free, smem.partial_ready, smem.alpha_ready, smem.probs_ready, smem.output_ready, smem.stats_ready,
    )  # fmt: skip
    by_one = (smem.left_ready, smem.kv_ready, smem.left_free, smem.scores_ready)
    return (1, by_one), (GROUP_WARPS, by_warps), (COLUMN_CTAS, (smem.kv_free,)), (COLUMN_CTAS * GROUP_WARPS, (smem.stats_free,))


class ColumnPairProducts(Heads64Products):
    """Products of one of the CTAs."""

    def release(self, half: int, smem: LatentSmemSm100, tile: Int32) -> None:
        """Signal left_free, or kv_free of both CTAs, when the products issued so far are done."""
        if half == 0:
            super().release(half, smem, tile)
        else:
            tcgen05.commit(smem.kv_free.barrier(tile), tcgen05.OWN_GROUP)


class ColumnPairMmaRole(Heads64MmaRoleSm100):
    """One warp of each CTA."""

    products = ColumnPairProducts()


@dataclass(frozen=True)
class ColumnPairOutputRole(LatentOutputRoleSm100):
    """Four warps of each CTA."""

    @cute.jit
    def scale_tiles(
        self, operands: LatentOperands, smem: LatentSmemSm100, tile_range: TileRange, begin_tile: Int32, tile: Int32, thread: Int32,
        lanes: Int32,
    ) -> Int64:  # fmt: skip
        """Rescale O for the tiles of a work tile, and load Q of the next one before the last, whose softmax takes as long. Return 0."""
        last = tile_range.tiles - 1
        for t in cutlass.range(last, unroll=1):
            scale_output(smem, tile + t, thread, lanes, t > 0, SCALED_AT_ONCE)
        query_row = self.locate_following(operands, tile_range.req, begin_tile, thread)
        self.load_queries(smem, query_row, tile + tile_range.tiles, thread, lanes)
        if last >= 0:
            scale_output(smem, tile + last, thread, lanes, last > 0, SCALED_AT_ONCE)
        return Int64(0)

    def release_weights(self, smem: LatentSmemSm100, done: Int32) -> None:
        """Signal stats_free of both CTAs."""
        smem.stats_free.consumer_release_in_cluster(done, COLUMN_CTAS)


@dataclass(frozen=True)
class ColumnPairRows(Heads64RowsSm100):
    """One thread's scores and running softmax state: the first of its two rows, over the columns of both CTAs.

    rS: register i is key 8 (i / 2) + 2 quad + i % 2. shift: from an address of this CTA to the same one in the peer.
    """

    smem: ColumnPairSmem
    shift: Int32

    @classmethod
    def create(cls, dtype: type[cutlass.Numeric], smem: Any, tmem: Int32, thread: Int32, scale_log2: Float32) -> Self:
        """Return the state of a row that has seen nothing."""
        rows = Heads64RowsSm100.create(dtype, smem, tmem, thread, scale_log2)
        fields = {**vars(rows), "rS": cute.make_rmem_tensor(cute.make_layout(KEPT), Float32)}
        return cls(**fields, shift=pin_register(peer_shift(smem.sPartial)))

    @property
    def thread(self) -> Int32:
        """Return the number of this thread among those that have the tile."""
        return self.row // HALF_LANES * 32 + self.row % HALF_LANES * QUAD + self.quad

    @property
    def publishes(self) -> Boolean:
        """Return whether this thread hands on what a row has come to."""
        return self.quad == 0

    @property
    def result_row(self) -> Int32:
        """Return the place of the row that this thread hands on."""
        return self.row

    # ---- one tile ---------------------------------------------------------------------------------------------------

    def read_scores(self, tile: Int32) -> None:
        """Wait scores_ready, probs_ready, partial_ready. Signal scores_free. Load the scores over this CTA's columns; add the peer's."""
        smem = self.smem
        smem.scores_ready.consumer_wait(tile)
        tcgen05.fence_after_wait()
        first = self.tmem + SCORE_COLUMN
        left, right = (tcgen05.load_fragment(address, 2 * HALF_KEYS) for address in (first, first + LOWER_LANES))
        tcgen05.await_loads()
        tcgen05.fence_before_signal()
        smem.scores_free.consumer_release(tile)
        sums: list[Float32] = []
        for i in range(0, 2 * KEPT, 2):
            sums += cute.arch.add_packed_f32x2((left[i], left[i + 1]), (right[i], right[i + 1]))
        self._swap_parts([[sums[i] for i in range(2 * KEPT) if half(i) == row_half] for row_half in range(2)], tile)

    def _swap_parts(self, parts: list[list[Float32]], tile: Int32) -> None:
        """Send the second row's scores, and add the peer's part to the first row's, which become this thread's."""
        smem = self.smem
        self._await_read(tile)
        ready = smem.partial_ready.barrier(tile)
        arrive_expecting(ready, WARP_PARTIAL_BYTES)
        place = smem.sPartial + self.thread * VECTOR
        kept, sent = parts
        for i in range(0, KEPT, VECTOR):
            there = Int32(place.toint()) + (self.shift + i // VECTOR * VECTOR_BYTES)
            send_to_peer(there, sent[i : i + VECTOR], Int32(ready.toint()) + self.shift)
        smem.partial_ready.consumer_wait(tile)
        for i in range(0, KEPT, VECTOR):
            rIn = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)
            source = aligned(place + i // VECTOR * (GROUP * VECTOR), CHUNK)
            cute.autovec_copy(cute.make_tensor(source, rIn.layout), rIn)
            for j in range(0, VECTOR, 2):
                k = i + j
                self.rS[k], self.rS[k + 1] = cute.arch.add_packed_f32x2((kept[k], kept[k + 1]), (rIn[j], rIn[j + 1]))

    @cute.jit
    def _await_read(self, tile: Int32):
        """Wait until the peer has read what it was sent of the tile before. Wait probs_ready."""
        if tile > 0:
            self.smem.probs_ready.consumer_wait(tile - 1)

    def own_bits(self, words: list[Int32]) -> Any:
        """Return the bits of a tile's keys, from this thread's first one on."""
        return [word >> (2 * self.quad) for word in words]

    def mask_unseen(self, seen: Any) -> None:
        """Set the scores of keys whose bit is 0 to -inf. seen: own_bits."""
        for i in range(KEPT):
            word, bit = divmod(8 * (i // 2) + i % 2, WORD_KEYS)
            self.rS[i] = cutlass.select_((seen[word] & (1 << bit)) == 0, -Float32.inf, self.rS[i])

    def advance(self, tile: Int32) -> Any:
        """Move the reference to this tile if need be. Return the factor for everything accumulated before."""
        best = quad_max(reduce(cute.arch.fmax, [self.rS[i] for i in range(KEPT)]))
        self.row_ref[0], alpha = follow_maximum(self.row_ref[0], best * self.scale_log2)
        return alpha

    def publish_alpha(self, tile: Int32, alpha: Any) -> None:
        """Hand the factor of a row of O to the output roles of both CTAs. Signal alpha_ready."""
        first = self.smem.sAlpha + (tile % self.smem.geometry.parities) * TILE_ROWS
        self._hand_on(first, alpha, self.smem.alpha_ready.barrier(tile))
        arrive_expecting(self.smem.alpha_ready.barrier(tile), SENT_ROW_BYTES)

    @cute.jit
    def _hand_on(self, first: cute.Pointer, value: Float32, ready: cute.Pointer):
        """Store a number of this thread's row in both CTAs. first: place of row 0."""
        if self.quad == 0:
            place = first + self.row
            place.store(value)
            send_to_peer(Int32((place + ROWS_APART).toint()) + self.shift, [value], Int32(ready.toint()) + self.shift)

    def exponentiate(self, alphas: Any) -> None:
        """Replace the scores by unnormalised probabilities and add them to the row sum."""
        scale, shift = (self.scale_log2, self.scale_log2), (-shift_of(self.row_ref[0]),) * 2
        sums = (self.rSum[0] * alphas, Float32(0))
        for i in range(0, KEPT, 2):
            exponents = cute.arch.fma_packed_f32x2((self.rS[i], self.rS[i + 1]), scale, shift)
            self.rS[i], self.rS[i + 1] = (cute.math.exp2(exponent, fastmath=True) for exponent in exponents)
            sums = cute.arch.add_packed_f32x2(sums, (self.rS[i], self.rS[i + 1]))
        self.rSum[0] = sums[0] + sums[1]

    def store_probs(self, tile: Int32) -> None:
        """Store the probabilities, packed, over the RoPE columns of their tile: rows of 128 swizzled bytes."""
        lane = cute.arch.lane_idx()
        row = lane % MATRIX_ROWS
        place = self._warp_probs(tile) + row * ROW_BYTES + ((lane // MATRIX_ROWS) ^ row) * CHUNK
        words = [pack_pair(self.rS[i], self.rS[i + 1], self.dtype) for i in range(0, KEPT, 2)]
        for chunk in range(0, len(words), VECTOR):
            target = smem_pointer(place ^ (chunk * CHUNK))
            primitives.stmatrix(target.raw_ptr(), words[chunk : chunk + VECTOR], primitives.MMALayout.ROW)

    def _warp_probs(self, tile: Int32) -> Int32:
        """Return the address of the warp's first row of P."""
        stage = self.smem.stage(self.smem.kv_ready.stage(tile)) + self.smem.geometry.rope_box * BOX_BYTES
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        return Int32((stage + warp * (HALF_LANES * ROW_BYTES)).toint())

    @cute.jit
    def hand_over_probs(self, tile: Int32):
        """Copy P of this warp's rows to the peer, behind the fence of its lanes, and expect the peer's. Signal probs_ready."""
        ready = self.smem.probs_ready.barrier(tile)
        source = self._warp_probs(tile)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            copy_to_peer(source + (self.shift + SENT_PROBS_BYTES), source, Int32(ready.toint()) + self.shift, SENT_PROBS_BYTES)
            cute.arch.mbarrier_arrive_and_expect_tx(ready, SENT_PROBS_BYTES)

    # ---- the end of a work tile -------------------------------------------------------------------------------------

    def hand_on_weight(self, weight: Float32) -> None:
        """Store the factor of this thread's row of O in both CTAs."""
        self._hand_on(self.smem.sInverse + 0, weight, self.smem.stats_ready.barrier(Int32(0)))

    def hand_over_weights(self, done: Int32) -> None:
        """Signal stats_ready of a work tile, and expect the peer's factors."""
        arrive_expecting(self.smem.stats_ready.barrier(done), SENT_ROW_BYTES)

    def row_sum(self) -> Float32:
        """Return the sum over all keys seen, 0 iff the row attends to nothing."""
        return quad_sum(self.rSum[0])

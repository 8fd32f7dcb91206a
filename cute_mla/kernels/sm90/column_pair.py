"""A pair of CTAs on SM90 that divides the latent columns of the same 64 query rows: what its roles do besides those of a CTA alone.

CTA r of the pair has the latent columns 512 r .. 512 r + 511 of keys and values, and half of the rotary ones. Its tensor cores sum S over
these columns. Of every thread's two rows of S a CTA keeps one and sends the other: it adds the peer's part to the row that it keeps,
computes the softmax of 32 rows, and sends their P, rescale factors and weights to the peer. O of all 64 rows and 512 columns stays here.

The trick: query rows lie otherwise in one CTA than in the other, row q at place q of the products in CTA 0 and at place q ^ 8 in CTA 1. So
both keep the first row of each thread and send the second, without a select, and P goes from places 16 w .. + 7 of warp w to places
16 w + 8 .. + 15 of the peer: 1,024 neighbouring bytes, one bulk copy.

Pipelines besides those of dense_decode/sm90.py (producer -> consumer; arrivals per phase):
  partial_ready   score -> score          4, and the bytes of the peer's part: partial scores have come, in either CTA all products of S
                                          of the tile are complete
  probs_ready     score -> output         4, and the bytes of the peer's P and rescale factors
  stats_ready     score -> output         4, and the bytes of the peer's weights
  kv_free         output -> load          8, and stats_free 16: the warps of both CTAs

One buffer holds the peer's part, without a barrier that says when it is free: probs_ready of a tile says that the peer has read what it
was sent of it. A P that is on its way to the peer is overwritten by the RoPE columns of the tile three further: kv_free of both CTAs says
that the peer has it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.experimental import primitives

from ...spec.dense_decode import COLUMN_CTAS, TILE_ROWS
from ...spec.mla import D_WIDE, WIDE_DIMS
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import BOX_COLUMNS, LatentOperands, WorkTile
from ..attention.softmax import OnlineSoftmax
from ..primitives.arithmetic import pin_register
from ..primitives.copies import BOX_ROW_BYTES, CHUNK, MATRIX_ROWS, smem_pointer
from ..primitives.peer import arrive_expecting, copy_to_peer, peer_shift, send_to_peer
from ..primitives.pipeline import StageBarriers, barrier_at
from ..primitives.smem import Barriers, Table
from ..primitives.wgmma import FP32_BYTES, ROWS_APART, ROWS_PER_THREAD, flat, fragment_row, half, packed
from .cta import BOX_BYTES, OUTPUT_GROUPS, WARPGROUP, LatentSm90Queries, LatentSm90Smem, LatentSm90TileState
from .output import LatentSm90OutputRole
from .score import WARP_ROWS, LatentSm90ScoreRole, LatentSm90Scores, output_target

COLUMNS = D_WIDE // COLUMN_CTAS  # latent ones of a CTA
ROPE_COLUMNS = WIDE_DIMS.rotary // COLUMN_CTAS
D_QK = COLUMNS + ROPE_COLUMNS

PARTIAL_VALUES = TILE_ROWS * TILE_KEYS // COLUMN_CTAS // WARPGROUP  # scores that a thread sends
PARTIAL_VECTOR = 4
VECTOR_BYTES = WARPGROUP * PARTIAL_VECTOR * FP32_BYTES  # from a thread's vector to its next
WARP_PARTIAL_BYTES = 32 * PARTIAL_VALUES * FP32_BYTES
SENT_PROBS_BYTES = ROWS_APART * BOX_ROW_BYTES  # of a warp
SENT_ROW_BYTES = ROWS_APART * FP32_BYTES  # a number a row
ADDED = (Table("sPartial", Float32, TILE_ROWS * TILE_KEYS // COLUMN_CTAS), Barriers("partial_ready", 1))


def pair_row(thread: Int32, row_half: int) -> Int32:
    """Return the query row, among all row tiles, at the place of one of the thread's fragment rows."""
    x = cute.arch.block_idx()[0]
    return x // COLUMN_CTAS * TILE_ROWS + (fragment_row(thread, row_half) ^ (x % COLUMN_CTAS * ROWS_APART))


def first_column() -> Int32:
    """Return the first latent column of this CTA."""
    return cute.arch.block_idx_in_cluster() * COLUMNS


def first_rope_column() -> Int32:
    """Return the first rotary column of this CTA, among the columns of a key."""
    return D_WIDE + cute.arch.block_idx_in_cluster() * ROPE_COLUMNS


@dataclass(frozen=True)
class ColumnPairSmem(LatentSm90Smem):
    """Shared memory with the peer's part of S."""

    sPartial: cute.Tensor  # fp32, 16 numbers a thread of the score role: four vectors, VECTOR_BYTES apart
    partial_ready: StageBarriers

    stats_ctas = COLUMN_CTAS

    def initialise(self, cluster: int, producers: int = 1) -> None:
        """Set the arrivals of every barrier."""
        self.partial_ready.initialise(WARPGROUP // 32)
        super().initialise(cluster, producers)


@dataclass(frozen=True)
class ColumnPairScores(LatentSm90Scores):
    """S of 64 rows over the columns of both CTAs, in the first one of a thread's rows.

    shift: from an address of this CTA to the same one in the peer. partial: the thread's first vector of the peer's part.
    """

    smem: ColumnPairSmem
    shift: Int32
    partial: Int32

    row_halves = 1

    @staticmethod
    def create(queries: LatentSm90Queries, smem: Any, thread: Int32) -> ColumnPairScores:
        """Partition the tiles for one thread of the score warpgroup."""
        base = LatentSm90Scores.create(queries, smem, thread)
        lane, row = thread % 32, thread % MATRIX_ROWS
        writer = thread // 32 * (WARP_ROWS * BOX_ROW_BYTES) + row * BOX_ROW_BYTES + (lane // MATRIX_ROWS ^ row) * CHUNK
        own = {field.name: getattr(base, field.name) for field in fields(LatentSm90Scores)}
        return ColumnPairScores(
            **{**own, "probs": pin_register(smem.sRope.iterator.toint() + writer)},
            shift=pin_register(peer_shift(smem.sPartial.iterator)),
            partial=smem.sPartial.iterator.toint() + thread * (PARTIAL_VECTOR * FP32_BYTES),
        )

    def query_row(self, row_half: int) -> Int32:
        """Return the query row of one of the thread's fragment rows."""
        return pair_row(self.thread, row_half)

    def query_column(self, tile: int) -> int | Int32:
        """Return the first column of a column tile of Q."""
        first = tile * BOX_COLUMNS
        return first_column() + first if first < COLUMNS else first_rope_column()

    def complete(self, state: LatentSm90TileState) -> None:
        """Wait until S of a tile is complete in both CTAs, and add the peer's part. Wait and signal partial_ready. Wait probs_ready."""
        super().complete(state)
        smem = self.smem
        self.await_read(state)
        ready = smem.partial_ready.barrier(state.number)
        arrive_expecting(ready, WARP_PARTIAL_BYTES)
        rS = flat(self.scores)
        kept, sent = ([i for i in range(cute.size(rS)) if half(i) == row_half] for row_half in range(ROWS_PER_THREAD))
        for vector in range(PARTIAL_VALUES // PARTIAL_VECTOR):
            values = [rS[i] for i in sent[vector * PARTIAL_VECTOR :][:PARTIAL_VECTOR]]
            send_to_peer(self.partial + (self.shift + vector * VECTOR_BYTES), values, Int32(ready.toint()) + self.shift)
        smem.partial_ready.consumer_wait(state.number)
        for vector in range(PARTIAL_VALUES // PARTIAL_VECTOR):
            words = cute.make_rmem_tensor(cute.make_layout(PARTIAL_VECTOR), Float32)
            source = cute.make_ptr(Float32, self.partial + vector * VECTOR_BYTES, cute.AddressSpace.smem, assumed_align=CHUNK)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(PARTIAL_VECTOR)), words)
            for i, register in enumerate(kept[vector * PARTIAL_VECTOR :][:PARTIAL_VECTOR]):
                rS[register] = rS[register] + words[i]

    @cute.jit
    def await_read(self, state: LatentSm90TileState):
        """Wait until the peer has read what it was sent of the tile before. Wait probs_ready."""
        if state.number > 0:
            self.smem.probs_ready.consumer_wait(state.number - 1)

    def release_keys(self, state: LatentSm90TileState) -> None:
        """Do nothing: partial_ready has said that every warp's WGMMA has read the RoPE columns, in both CTAs."""

    @cute.jit
    def store_probs(self, state: LatentSm90TileState, alpha: list[Float32]):
        """Write P of the first row of each thread, packed to 16 bits, over the RoPE columns, and its rescale factor in both CTAs."""
        rP = cute.make_rmem_tensor_like(self.scores, self.rStaged.element_type)
        rP.store(self.scores.load().to(self.rStaged.element_type))
        words = [packed(rP)[i] for i in range(0, cute.size(packed(rP)), ROWS_PER_THREAD)]
        place = self.probs + state.rope.stage * BOX_BYTES
        for first in cutlass.range_constexpr(0, len(words), PARTIAL_VECTOR):
            target = smem_pointer(place ^ (first * CHUNK))
            primitives.stmatrix(target.raw_ptr(), words[first : first + PARTIAL_VECTOR], primitives.MMALayout.ROW)
        if self.thread % 4 == 0:
            self.factors.store(state.rope.stage, alpha)
            there = self.factors.first + (state.rope.stage * TILE_ROWS + ROWS_APART) * FP32_BYTES + self.shift
            send_to_peer(there, alpha, Int32(self.probs_barrier(state).toint()) + self.shift)

    @cute.jit
    def send_probs(self, state: LatentSm90TileState):
        """Copy P of this warp's rows to the peer, behind the fence of its lanes."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            warp = self.thread // 32 * (WARP_ROWS * BOX_ROW_BYTES)
            source = self.smem.sRope.iterator.toint() + state.rope.stage * BOX_BYTES + warp
            ready = Int32(self.probs_barrier(state).toint()) + self.shift
            copy_to_peer(source + (self.shift + SENT_PROBS_BYTES), source, ready, SENT_PROBS_BYTES)


@dataclass(frozen=True)
class ColumnPairScoreRole(LatentSm90ScoreRole):
    """One warpgroup of each CTA."""

    row_halves = 1

    def query_row(self, thread: Int32, row_half: int) -> Int32:
        """Return the query row of one of the thread's fragment rows."""
        return pair_row(thread, row_half)

    def hand_over(self, probs_barrier: Int32) -> None:
        """Hand over P that is written, and expect that of the peer. probs_barrier: its address."""
        arrive_expecting(barrier_at(probs_barrier), SENT_PROBS_BYTES + SENT_ROW_BYTES)

    def share_probs(self, gemm: ColumnPairScores, state: LatentSm90TileState) -> None:
        """Send P to the peer."""
        gemm.send_probs(state)

    def commit_rows(self, smem: ColumnPairSmem, done: Int32) -> None:
        """Hand over factors and places of the rows of a work tile, and expect the peer's factors."""
        arrive_expecting(smem.stats_ready.barrier(done), SENT_ROW_BYTES)

    def leave(self, smem: ColumnPairSmem, done: Int32) -> None:
        """Wait until both CTAs have read all factors: no arrival may reach a CTA that is gone. Wait stats_free."""
        smem.stats_free.producer_acquire(done)

    @cute.jit
    def publish_rows(self, operands: LatentOperands, smem: Any, req: Int32, work_tile: WorkTile, softmax: OnlineSoftmax, thread: Int32):
        """Publish the factor of each row of O whose sum is here, in both CTAs, and where all rows go. Return the row sums."""
        total = softmax.row_sum(0)
        rows = [self.query_row(thread, row_half) for row_half in range(ROWS_PER_THREAD)]
        stored = operands.row_range(req)
        targets = [output_target(operands, stored, work_tile, row, D_WIDE) for row in rows]
        if thread % 4 == 0:
            weight = self.row_scale.weight(operands, lambda: work_tile, rows[0], total, softmax.row_ref[0])
            weight = cutlass.select_(total == 0.0, Float32(0), weight)
            own, other = (fragment_row(thread, row_half) for row_half in range(ROWS_PER_THREAD))
            smem.sInverse[own] = weight
            shift = peer_shift(smem.sInverse.iterator)
            ready = Int32(smem.stats_ready.barrier(Int32(0)).toint()) + shift
            send_to_peer(smem.sInverse.iterator.toint() + (other * FP32_BYTES + shift), [weight], ready)
            for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
                smem.sTarget[fragment_row(thread, row_half)] = targets[row_half]
        return [total]


@dataclass(frozen=True)
class ColumnPairOutputRole(LatentSm90OutputRole):
    """One of two warpgroups of each CTA."""

    def release_rows(self, smem: ColumnPairSmem, done: Int32) -> None:
        """Release factors and places of the rows of a work tile in both CTAs."""
        smem.stats_free.consumer_release_in_cluster(done, COLUMN_CTAS)

    def first_column(self, side: Int32, columns: int) -> Int32:
        """Return the first column of a group of so many."""
        assert columns == COLUMNS // OUTPUT_GROUPS
        return first_column() + side * columns

"""Two pairs of CTAs on SM100 that divide the latent columns of the same 128 query rows: what roles do besides those of one pair.

A cluster has four CTAs. Pair p has the latent columns 512 p .. 512 p + 511 of keys and values, CTA r those from 256 r on, and the CTAs r
and r ^ 2 have the same rows. The tensor cores of a pair sum S over its columns; the rotary columns count in pair 0, where in pair 1 the
TMA fills their boxes with zeros, which lie outside the cache. The CTAs r and r ^ 2 then swap all of S: each adds the other's part to its
own. A sum of two is the same in both orders, so both compute the same softmax, the same P and the same factors, bit for bit, and nothing
else has to pass between the pairs. O of a CTA's rows and its pair's columns stays where it is.

Of up to 64 rows either CTA of a pair has half. A warp of the score role without rows then neither sends nor adds scores.

Two groups of score warps take tiles in turn (alternating.py), so that a swap, 16 KB each way, is under way during the softmax of the
other group. S comes in parts of 32 keys, of which tensor memory has room for three. S and P V have a warp each, so that S of a tile
whose keys are late does not hold up P V of a tile before it.

Pipelines besides those of dense_decode/sm100.py (producer -> consumer; arrivals per phase):
  partial_ready[2]   score -> score of CTA r ^ 2   4 of the receiver, and the bytes of the other part of S
  partial_free[2]    back                          4: they are in registers
alpha_ready, probs_ready and output_ready have as many stages as there are key tiles: what a role finds of a tile is overwritten only
when its keys are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import cutlass
from cutlass import Boolean, Float32, Int16, Int32, Int64, cute

from ...spec.dense_decode import COLUMN_CTAS, TILE_ROWS
from ...spec.mla import D_WIDE
from ..attention.scheduler import LatentOperands
from ..primitives import tcgen05
from ..primitives.peer import peer_shift, send_to_peer
from ..primitives.pipeline import StageBarriers, arrive_at
from ..primitives.rows import aligned
from ..primitives.smem import Array, Barriers, SmemLayout
from .alternating import GROUPS, AlternatingRowsSm100
from .config import (
    CTA_ROPE,
    GROUP,
    GROUP_WARPS,
    HALF_KEYS,
    PAIR,
    TMEM_COLUMNS,
    VECTOR,
    WORD_BYTES,
    LatentGeometrySm100,
    LatentSmemSm100,
)
from .mma import LatentGemmSm100, LatentMmaRoleSm100
from .score import LatentQueriesSm100
from .scout import work_fields

COLUMNS = D_WIDE // COLUMN_CTAS  # latent ones of a pair
PARTIAL_WORDS = GROUP * HALF_KEYS  # of S, of a group of score warps
WARP_BYTES = 32 * HALF_KEYS * WORD_BYTES


def rank() -> Int32:
    """Return the number of this CTA in the cluster."""
    return cute.arch.block_idx_in_cluster()


@dataclass(frozen=True)
class ColumnPairsGeometry(LatentGeometrySm100):
    """Numbers of one of the pairs. scores: pieces of S in tensor memory, a ring that both groups read."""

    scores = 3
    row_latent = D_WIDE
    groups_apart = 0
    exchange_words = GROUP * HALF_KEYS // 2  # of the two parts of S in turn

    @property
    def parities(self) -> int:
        """Return the tiles that may be in flight between two roles: those whose keys are in shared memory."""
        return self.kv_stages

    @property
    def mma_cta(self) -> Int32:
        """Return the CTA whose mma role waits for those of this pair."""
        return rank() & -PAIR

    def multiplies(self) -> Boolean:
        """Return whether this CTA's mma role multiplies for its pair."""
        return rank() % PAIR == 0

    def pair_mask(self) -> Int16:
        """Return the bits of the pair's CTAs among those of the cluster."""
        return Int16(Int32(tcgen05.BOTH_CTAS) << self.mma_cta)

    def first_column(self) -> Int32:
        """Return the first latent column of this pair."""
        return rank() // PAIR * COLUMNS

    def score_column(self, part: int, stage: Int32) -> Int32:
        """Return the first column of tensor memory of a piece of S. stage: of its use."""
        return TMEM_COLUMNS - self.scores * self.part_keys + stage * self.part_keys

    def layout(self) -> SmemLayout:
        """Return the layout of shared memory."""
        return self.smem(
            *work_fields(),
            Array("sPartial", Float32, GROUPS * PARTIAL_WORDS, VECTOR * WORD_BYTES),
            *(Barriers(name, GROUPS) for name in ("partial_ready", "partial_free")),
        )


GEOMETRY = ColumnPairsGeometry(kv_stages=4, score_groups=GROUPS, score_parts=2, latent=COLUMNS)


@dataclass(frozen=True)
class ColumnPairsSmem(LatentSmemSm100):
    """Shared memory with the other pair's part of S."""

    sPartial: cute.Pointer  # fp32 (groups, vectors, 128 threads, 4 words)
    partial_ready: StageBarriers
    partial_free: StageBarriers


class ScoreMmaRoleSm100(LatentMmaRoleSm100):
    """One warp of an even CTA: S alone."""

    @cute.jit
    def multiply_tiles(self, smem: LatentSmemSm100, gemm: LatentGemmSm100, tiles: Int32, tile: Int32):
        """Multiply Q and K of a work tile that begins with the tile-th tile."""
        for t in cutlass.range(tiles, unroll=1):
            self.multiply_scores(smem, gemm, tile + t, 0, smem.geometry.score_parts)


class OutputMmaRoleSm100(LatentMmaRoleSm100):
    """Another warp of an even CTA: P V alone."""

    def await_queries(self, smem: LatentSmemSm100, number: Int32) -> None:
        """Do nothing: P says that Q has been there."""

    def leave(self, smem: LatentSmemSm100, tiles: Int32) -> None:
        """Do nothing: P V of the last tile was the last to wait for."""

    @cute.jit
    def multiply_tiles(self, smem: LatentSmemSm100, gemm: LatentGemmSm100, tiles: Int32, tile: Int32):
        """Multiply P and V of a work tile that begins with the tile-th tile."""
        for t in cutlass.range(tiles, unroll=1):
            self.multiply_output(smem, gemm, tile + t, t > 0)


@dataclass(frozen=True)
class ColumnPairsQueries(LatentQueriesSm100):
    """The loads of Q: the columns of this pair."""

    def load_runs(self, row: Int64, thread: Int32, rWords: cute.Tensor, nbytes: int) -> None:
        """Load the words of all runs. In pair 1, whose rotary columns of keys are zeros, those of Q are, too: 0 * NaN is NaN."""
        super().load_runs(row, thread, rWords, nbytes)
        first, words = self.geometry.first_column(), cute.size(rWords)
        for i in range(words - CTA_ROPE // self.geometry.word_elements, words):
            rWords[i] = cutlass.select_(first == 0, rWords[i], Int32(0))


@dataclass(frozen=True)
class ColumnPairsRows(AlternatingRowsSm100):
    """The scores and softmax state of a thread of one of two groups, with the scores of both pairs."""

    smem: ColumnPairsSmem
    idle: Boolean | None = None

    apart = 0

    @classmethod
    def create_for(cls, operands: LatentOperands, *state: Any) -> Self:
        """Return the state as create does. A warp none of whose rows exists sends and adds nothing."""
        rows = cls.create(*state)
        first = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % (GROUP_WARPS // PAIR) * 32
        return replace(rows, idle=operands.row_at(first, Int32(0)) >= operands.rows())

    @property
    def stores_lse(self) -> Boolean:
        """Return whether this thread stores the lse of a row: both pairs have it."""
        return self.publishes & (rank() < PAIR)

    @cute.jit
    def read_scores(self, tile: Int32):
        """Wait scores_ready, signal scores_free. Load the partial scores of a tile; add those of the row's three other threads."""
        self.smem.partial_free.producer_acquire(tile)
        self._expect_partial_sums(tile)
        shift = peer_shift(self.smem.sPartial, rank() ^ PAIR)
        if self.idle:
            self._pass_scores(tile, shift)
        else:
            self._swap_scores(tile, shift)
        arrive_at(self.smem.partial_free.barrier(tile), rank() ^ PAIR)

    @cute.jit
    def _pass_scores(self, tile: Int32, shift: Int32):
        """Take nothing of a tile, and send one number, so that no pipeline runs ahead of this warp."""
        with cute.arch.elect_one():
            send_to_peer(Int32(self._partial(0).toint()) + shift, [Float32(0)], self._ready(tile, shift))
        for part in cutlass.range_constexpr(self.smem.geometry.score_parts):
            use = tile * self.smem.geometry.score_parts + part
            self.smem.scores_ready.consumer_wait(use)
            self.smem.scores_free.consumer_release(use, cta=self.smem.geometry.mma_cta)
        for i in cutlass.range_constexpr(HALF_KEYS):
            self.rS[i] = -Float32.inf
        self.smem.partial_ready.consumer_wait(tile)

    @cute.jit
    def _swap_scores(self, tile: Int32, shift: Int32):
        smem, geometry = self.smem, self.smem.geometry
        for part in cutlass.range_constexpr(geometry.score_parts):
            use = tile * geometry.score_parts + part
            smem.scores_ready.consumer_wait(use)
            tcgen05.fence_after_wait()
            others = self._take_partial_sums(part, use)
            smem.scores_free.consumer_release(use, cta=geometry.mma_cta)
            if cutlass.const_expr(part > 0):
                self.sync_halves()  # the other half has read the part before
            self._send_partial_sums(0, others)
            self._add_part(part)
            self._send_to_pair(part, tile, shift)
        smem.partial_ready.consumer_wait(tile)
        for vector in cutlass.range_constexpr(HALF_KEYS // VECTOR):
            self._add_vector(vector, self._partial(vector))

    def leave(self, tiles: Int32) -> None:
        """Wait until the other pair has read what it was sent last."""
        self.smem.partial_free.producer_acquire(tiles + ((self.group - tiles) & 1))

    def _expect_partial_sums(self, tile: Int32) -> None:
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            nbytes = cutlass.select_(self.idle, Int32(WORD_BYTES), Int32(WARP_BYTES))
            cute.arch.mbarrier_arrive_and_expect_tx(self.smem.partial_ready.barrier(tile), nbytes)

    def _ready(self, tile: Int32, shift: Int32) -> Int32:
        return Int32(self.smem.partial_ready.barrier(tile).toint()) + shift

    def _add_part(self, part: int) -> None:
        """Add a part of the scores that the other thread of the row has sent."""
        self.sync_halves()
        vectors = self.smem.geometry.run_keys // VECTOR
        for vector in range(vectors):
            self._add_vector(part * vectors + vector, self._exchanged(1 - self.half, vector))

    def _add_vector(self, vector: int, source: cute.Pointer) -> None:
        rIn = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)
        cute.autovec_copy(cute.make_tensor(aligned(source, VECTOR * WORD_BYTES), rIn.layout), rIn)
        for i in range(0, VECTOR, 2):
            k = vector * VECTOR + i
            self.rS[k], self.rS[k + 1] = cute.arch.add_packed_f32x2((self.rS[k], self.rS[k + 1]), (rIn[i], rIn[i + 1]))

    def _send_to_pair(self, part: int, tile: Int32, shift: Int32) -> None:
        """Send a part of the scores to the CTA of the other pair that has the same rows."""
        ready = self._ready(tile, shift)
        vectors = self.smem.geometry.run_keys // VECTOR
        for vector in range(part * vectors, (part + 1) * vectors):
            values = [self.rS[vector * VECTOR + i] for i in range(VECTOR)]
            send_to_peer(Int32(self._partial(vector).toint()) + shift, values, ready)

    def _exchanged(self, sender: Int32, vector: int) -> cute.Pointer:
        vectors = self.smem.geometry.run_keys // VECTOR
        return self.smem.sExchange + ((sender * vectors + vector) * TILE_ROWS + self.row) * VECTOR

    def _partial(self, vector: int) -> cute.Pointer:
        """Return where a vector of the other pair's part lies."""
        thread = self.half * (GROUP // 2) + self.row
        return self.smem.sPartial + (self.group * PARTIAL_WORDS + (vector * GROUP + thread) * VECTOR)

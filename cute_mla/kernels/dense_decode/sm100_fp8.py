"""Dense MLA decode on Blackwell with e4m3 queries and an e4m3 cache, multiplied as they are.

The formula and the walk of sm100.py, with q = descale_q q8, k = descale_k k8, and P rounded to e4m3:

    s_rj = descale_q descale_k <q8_r, k8_j>     p_rj = e4m3(2^(scale * s_rj - reference_r))
    out_r = descale_k sum_j p_rj k8_j[:512] / sum_j p_rj

A pair of CTAs holds 128 query rows, 64 each, and walks tiles of 64 keys. CTA c provides the scores of its own half of the keys, 32 c ..
+ 31, and the output of its own half of the columns, 256 c .. + 255. So it holds its own columns of all keys, and of its own keys the
other columns, too.

Roles of a CTA (512 threads):
  score   warps 0..3 and 4..7, tiles in turn: softmax, P to tensor memory, lse (../sm100/alternating.py)
  output  warps 8..11: Q of the next work tile to tensor memory, rescale of O, epilogue
  load    warps 12, 13: TMA of the own columns of all keys; of the other columns of the own keys
  mma     warp 14, of the even CTA: S = Q K^T and O += P V for both
  scout   warp 15: work tiles ahead of the others (../sm100/scout.py)

Tensor memory, 512 columns: O in 256, Q in 144, sums of P in 16, S 2 x 32, P 2 x 16. A lane is a query row; the lanes 64 h .. + 63 of half h
have the 64 rows with all columns of Q, the scores of CTA h's keys, P of all keys, and the columns of O of CTA h.
Shared memory: 8 stages of 26,624 bytes, each seven boxes of 32 keys; ones; P and maxima on their way between the halves.

Pipelines as in sm100.py, of other depths and arrivals:
  kv_ready[8]      load -> mma             1 and the bytes of both CTAs
  kv_free[8]       mma -> load, output, score  1: P V of the tile is done; P of the tile two later may take its place
  scores_ready[2]  mma -> score            1: S of a tile
  scores_free[2]   score -> mma            8
  alpha_ready[4], probs_ready[4], output_ready[4]: S is three tiles ahead of P V

The trick: S is an ordinary product of the pair, over all columns, since Q in e4m3 fits into the lanes of both halves. So no partial scores
pass through shared memory, which was a third of its traffic. One descriptor serves both CTAs, because a lane half meets the operand B of
its own CTA alone: every lane half has P, and every stage has the values, with the CTA's own keys first. README.md has the clocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from ...spec.arch import Arch
from ...spec.dense_decode import FP8, TILE_ROWS, DenseDecodeConfig
from ...spec.mla import D_LATENT, D_ROPE
from ...spec.split_plan import TILE_KEYS
from ..attention.softmax import DITHER, Window, follow_tile
from ..primitives import tcgen05
from ..primitives.arithmetic import pack_word
from ..primitives.copies import pair_box
from ..primitives.rows import aligned, load_or_one, store_vector
from ..sm100.alternating import NAMED_BARRIERS, AlternatingRowsSm100
from ..sm100.config import (
    CHUNK_COLUMNS,
    CTA_COLUMNS,
    HALF_KEYS,
    OUTPUT_COLUMN,
    PAIR,
    PAIR_ROWS,
    QUERY_COLUMN,
    ROW_BYTES,
    STEP_BYTES,
    STEP_COLUMNS,
    STEPS_PER_BOX,
    SUM_COLUMN,
    SUM_COLUMNS,
    VECTOR,
    LatentGeometrySm100,
    LatentSmemSm100,
)
from ..sm100.kernel import TWO_GROUPS, LatentKernelSm100, set_registers
from ..sm100.mma import LatentGemmSm100
from ..sm100.score import COPY_WORDS, LatentQueriesSm100, LatentScoreRoleSm100, QueryColumns
from ..sm100.scout import work_fields
from .abi import DenseDecodeAbi
from .operands import DenseDecodeOperands, DenseDecodeRowScale, LaneBox
from .sm100_load import DenseDecodeLoadRoleSm100
from .sm100_mask import DenseDecodeMaskSm100

# a stage: boxes of half of the keys. The values come as two boxes of 64 rows, this CTA's keys first
HALF_BOX = HALF_KEYS * ROW_BYTES
OTHER_OFFSET = 4 * HALF_BOX  # other columns of this CTA's keys
ROPE_OFFSET = 6 * HALF_BOX
ROPE_ROW_BYTES = D_ROPE
ROPE_BYTES = HALF_KEYS * ROPE_ROW_BYTES

# tensor memory, two buffers each
SCORE_COLUMN = SUM_COLUMN + SUM_COLUMNS  # final scores: 32 keys of the lane's half
PROBS_COLUMN = SCORE_COLUMN + 2 * HALF_KEYS
PROBS_WORDS = HALF_KEYS // 4  # of one half of the keys
PROBS_COLUMNS = 2 * PROBS_WORDS

ONES_WORD = 0x38383838  # four times 1 in e4m3
# of the greatest P of a tile: 2^8.75, dithered, is 442, below e4m3's greatest number. A rescale of O takes longer than the products of a
# tile, and is waited for. So maxima may grow by 3.75 octaves before there is one; ordinary rows then have one, in their first tiles.
WINDOW = Window(placed=5.0, above=3.75)


@dataclass(frozen=True)
class DenseDecodeFp8GeometrySm100(LatentGeometrySm100):
    """Numbers of the kernel of e4m3 operands."""

    kv_stages: int = 8
    score_groups: int = 2
    score_parts: int = 1

    element_bytes = 1
    sums_probs = True
    exchange_words = PAIR * TILE_ROWS * PROBS_WORDS
    ahead = 3  # tiles: S of the next tile of a group does not wait for the products of P
    stage_bytes = ROPE_OFFSET + ROPE_BYTES

    def products_per_tile(self, has_rope: bool) -> int:
        """Return the matrix products of one tile."""
        return score_steps(has_rope) + 2 * (self.output_chunks + 1)


def score_steps(has_rope: bool) -> int:
    """Return the products of S of a tile, each over 32 columns."""
    return (D_LATENT + (D_ROPE if has_rope else 0)) // STEP_BYTES


class DenseDecodeFp8Sm100(LatentKernelSm100):
    """One variant of the kernel of e4m3 operands."""

    producer = "load"
    producer_warps = 2
    kv_arrivals = 1
    scouted = True
    registers = TWO_GROUPS
    named_barriers = NAMED_BARRIERS

    def __init__(self, config: DenseDecodeConfig, arch: Arch) -> None:
        abi = DenseDecodeAbi(config)
        geometry = DenseDecodeFp8GeometrySm100()
        super().__init__(abi, arch, geometry, geometry.smem(*work_fields()), has_rope=config.dims.rotary > 0)
        self.queries = DenseDecodeFp8QueriesSm100(geometry, self.has_rope)
        self.descales = DenseDecodeRowScale(FP8)
        self.operand_dtype = abi.query_dtype
        self.gemm = DenseDecodeFp8GemmSm100

    @cute.jit
    def run_others(self, operands: DenseDecodeOperands, smem: LatentSmemSm100, tmem: Int32, warp: Int32):
        """Give the roles load, mma and scout their warps."""
        set_registers(self.registers.mma)
        for number in cutlass.range_constexpr(self.producer_warps):
            if warp == self.geometry.load_warp + number:
                DenseDecodeFp8LoadRoleSm100(self.has_rope, number * self.queries.row_bytes(), number).run(operands, smem)
        self.run_scout(operands, warp)
        self.run_mma(operands, smem, tmem, warp)

    def tensor_maps(self, operands: DenseDecodeOperands) -> tuple:
        """Return the maps of the cache."""
        return operands.args.kv_map, operands.args.rope_map

    def prepare(self, operands: DenseDecodeOperands, smem: LatentSmemSm100) -> DenseDecodeOperands:
        """Return operands with boxes of half of a tile's keys."""
        return replace(super().prepare(operands, smem), most_box_keys=HALF_KEYS)

    def run_score(self, operands: DenseDecodeOperands, smem: LatentSmemSm100, tmem: Int32) -> None:
        """Run the score role, which alone takes the scales of q and cache."""
        self.score_role(load_or_one(operands.args.descale_k)).run(operands.with_descales(self.descales), smem, tmem)

    def score_role(self, k_scale: Float32 | None = None) -> LatentScoreRoleSm100:
        """Return the score role, which holds the scale of the cache: a load between work tiles would wait behind Q."""
        mask = DenseDecodeMaskSm100(clears_unused=True, own_keys_first=True)
        descales = replace(self.descales, k_scale=k_scale)
        return LatentScoreRoleSm100(self.operand_dtype, mask, descales, create_rows=DenseDecodeFp8RowsSm100.create)


@dataclass(frozen=True)
class DenseDecodeFp8LoadRoleSm100(DenseDecodeLoadRoleSm100):
    """Two warps: this CTA's value columns of all keys, and the other columns of its own half of the keys. number: of the warp."""

    number: int

    def expects(self, smem: LatentSmemSm100) -> Boolean:
        """Return whether this warp says how many bytes come, of both warps."""
        return super().expects(smem) if self.number == 0 else Boolean(False)

    def loaded_bytes(self, smem: LatentSmemSm100) -> int:
        """Return the bytes of a tile and CTA."""
        return ROPE_OFFSET + (ROPE_BYTES if self.has_rope else 0)

    @cute.jit
    def load_keys(self, operands: DenseDecodeOperands, smem: LatentSmemSm100, box: LaneBox, stage: cute.Pointer, ready: cute.Pointer):
        """Load columns of a lane's box of keys to a stage, whose first half are the keys of this CTA."""
        rank = cute.arch.block_idx_in_cluster()
        where = (operands.kv_head(), box.row, box.page)
        place = (box.offset ^ (rank * HALF_KEYS)) * ROW_BYTES
        kv_map = operands.args.kv_map
        if cutlass.const_expr(self.number == 0):
            for i in cutlass.range_constexpr(CTA_COLUMNS // ROW_BYTES):
                pair_box(stage + (2 * i * HALF_BOX + place), kv_map, (rank * CTA_COLUMNS + i * ROW_BYTES, *where), ready)
        elif place < HALF_BOX:
            for i in cutlass.range_constexpr(CTA_COLUMNS // ROW_BYTES):
                column = (1 - rank) * CTA_COLUMNS + i * ROW_BYTES
                pair_box(stage + (OTHER_OFFSET + i * HALF_BOX + place), kv_map, (column, *where), ready)
            if cutlass.const_expr(self.has_rope):
                pair_box(stage + (ROPE_OFFSET + place // 2), operands.args.rope_map, (D_LATENT, *where), ready)


class DenseDecodeFp8GemmSm100(LatentGemmSm100):
    """Products of a pair: S of each CTA's half of the keys, O of its half of the columns."""

    def keys(self, tile: Int32) -> tuple[Any, Any]:
        """Return latent and RoPE columns of K of a tile as operands."""
        stage = self.smem.stage(self.smem.kv_ready.stage(tile))
        return tcgen05.k_major(stage), tcgen05.k_major(stage + ROPE_OFFSET, ROPE_ROW_BYTES)

    def probs_and_values(self, tile: Int32) -> tuple[Int32, Any]:
        """Return the column of P, and V of a tile as operand."""
        probs = self.tmem + (PROBS_COLUMN + self.smem.scores_ready.stage(tile) * PROBS_COLUMNS)
        return probs, tcgen05.mn_major(self.smem.stage(self.smem.kv_ready.stage(tile)), 2 * HALF_BOX)

    def scores(self, keys: tuple[Any, Any], part: int, stage: int | Int32 = 0) -> None:
        """Issue S = Q K^T over all columns, to a buffer for S: lanes 0..63 get the even CTA's keys, the others the odd one's."""
        latent, rope = keys
        shape = tcgen05.instruction(self.dtype, rows=PAIR_ROWS, columns=TILE_KEYS)
        for step in range(score_steps(self.has_rope)):
            box, step_in_box = divmod(step, STEPS_PER_BOX)
            # boxes of values, of both halves of the keys, come first
            offset = (2 * box if box < 2 else box + 2) * HALF_BOX + step_in_box * STEP_BYTES
            tcgen05.multiply(
                self.tmem + (SCORE_COLUMN + stage * HALF_KEYS),
                tcgen05.a_in_tmem(self.tmem + (QUERY_COLUMN + step * STEP_COLUMNS)),
                latent.advance_start_address(offset) if box < 4 else rope.advance_start_address(step_in_box * STEP_BYTES),
                shape,
                accumulate=step > 0,
            )

    def output(self, probs: Int32, values: Any, accumulate: Boolean) -> None:
        """Issue O += P V, or O = P V, for the 256 value columns of each CTA, and the sum of P. Each lane half has its CTA's keys first."""
        wide = tcgen05.instruction(self.dtype, rows=PAIR_ROWS, columns=PAIR * CHUNK_COLUMNS, transpose_b=True)
        narrow = tcgen05.instruction(self.dtype, rows=PAIR_ROWS, columns=PAIR * SUM_COLUMNS)
        ones = tcgen05.k_major(self.smem.sOnes)
        for step in range(2):
            a = tcgen05.a_in_tmem(probs + step * PROBS_WORDS)
            more = accumulate if step == 0 else True
            for chunk in range(CTA_COLUMNS // CHUNK_COLUMNS):
                b = values.advance_start_address((2 * chunk + step) * HALF_BOX)
                tcgen05.multiply(self.tmem + (OUTPUT_COLUMN + chunk * CHUNK_COLUMNS), a, b, wide, accumulate=more)
            tcgen05.multiply(self.tmem + SUM_COLUMN, a, ones, narrow, accumulate=more)


class DenseDecodeFp8QueriesSm100(LatentQueriesSm100):
    """The loads of Q: every lane has all columns of its row, those that its CTA has as values first."""

    def runs(self) -> list[QueryColumns]:
        """Return the columns that a thread loads."""
        copied = COPY_WORDS * self.geometry.word_elements
        runs = [QueryColumns(first, CTA_COLUMNS, COPY_WORDS, 0) for first in range(0, CTA_COLUMNS, copied)]
        runs += [QueryColumns(CTA_COLUMNS + first, -CTA_COLUMNS, COPY_WORDS, 0) for first in range(0, CTA_COLUMNS, copied)]
        runs += [QueryColumns(D_LATENT, 0, COPY_WORDS, 0)] if self.has_rope else []
        return [replace(run, column=QUERY_COLUMN + i * COPY_WORDS) for i, run in enumerate(runs)]


@dataclass(frozen=True)
class DenseDecodeFp8RowsSm100(AlternatingRowsSm100):
    """The scores and softmax state of a thread, with P rounded to e4m3."""

    apart = HALF_KEYS

    @cute.jit
    def store_ones(self):
        """Write what P is multiplied with for its sum: 16 bytes of each of 128 threads, of the group that has the first P."""
        if self.group == 0:
            store_vector(self.shared.sOnes + (self.half * TILE_ROWS + self.row) * 16, [Int32(ONES_WORD)] * VECTOR)

    @cute.jit
    def read_scores(self, tile: Int32):
        """Wait scores_ready, signal scores_free. Load the scores of this thread's keys."""
        self.smem.scores_ready.consumer_wait(tile)
        tcgen05.fence_after_wait()
        scores = tcgen05.load_columns(self.tmem + SCORE_COLUMN, HALF_KEYS)
        tcgen05.await_loads()
        tcgen05.fence_before_signal()
        for i in cutlass.range_constexpr(HALF_KEYS):
            self.rS[i] = scores[i]
        self.smem.scores_free.consumer_release(tile, cta=self.smem.geometry.mma_cta)

    def follow(self, old: Float32, candidate: Float32, greatest: Float32) -> tuple[Float32, Float32]:
        """Return (reference, factor): the reference follows every tile's maximum, up and down."""
        return follow_tile(old, candidate, greatest, WINDOW)

    def word_of_probs(self, first: int) -> Int32:
        """Return a word of probabilities, dithered and rounded. Their sum has been taken before."""
        values: list[Float32] = []
        for i in range(first, first + self.smem.geometry.word_elements, 2):
            factors = DITHER[i % len(DITHER)], DITHER[(i + 1) % len(DITHER)]
            values += cute.arch.mul_packed_f32x2((self.rS[i], self.rS[i + 1]), tuple(map(Float32, factors)))
        return pack_word(values, self.dtype)

    def store_probs(self, tile: Int32) -> None:
        """Store the probabilities of all keys of a tile to tensor memory, those of this lane half's own keys first.

        The two threads of a row swap theirs. The wait for the products that read the buffer before comes behind the swap, lest NVVM moves
        the exponentials behind the wait.
        """
        words = [self.word_of_probs(first) for first in range(0, HALF_KEYS, self.smem.geometry.word_elements)]
        for vector in range(PROBS_WORDS // VECTOR):
            store_vector(self._swapped(self.half, vector), words[vector * VECTOR : (vector + 1) * VECTOR])
        self.sync_halves()
        for vector in range(PROBS_WORDS // VECTOR):
            rIn = cute.make_rmem_tensor(cute.make_layout(VECTOR), Int32)
            cute.autovec_copy(cute.make_tensor(aligned(self._swapped(1 - self.half, vector), 16), rIn.layout), rIn)
            words += [rIn[i] for i in range(VECTOR)]
        # P V of the tile two before has read this buffer: its stage has been released since
        self.smem.kv_free.producer_acquire(tile + (self.smem.geometry.kv_stages - 2))
        tcgen05.fence_after_wait()
        # `tmem` is at the group's scores
        tcgen05.store_columns(self.tmem + (PROBS_COLUMN - self.group * (self.apart - PROBS_COLUMNS)), words)
        tcgen05.await_stores()
        tcgen05.fence_before_signal()

    def _swapped(self, sender: Int32, vector: int) -> cute.Pointer:
        place = ((sender * (PROBS_WORDS // VECTOR) + vector) * TILE_ROWS + self.row) * VECTOR
        return cute.recast_ptr(self.smem.sExchange + place, dtype=Int32)

"""Tiles, shared memory with its barriers, and the products of the SM90 kernel with e4m3 operands.

S = Q K^T, and O += P V with V transposed by warps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT, D_QK
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import KeyTile
from ..attention.softmax import DITHER
from ..primitives.arithmetic import pack_word, pin_register
from ..primitives.copies import CHUNK, store_groups, writer_address
from ..primitives.pipeline import PipelineState, StageBarriers
from ..primitives.rows import load_word
from ..primitives.smem import Barriers, SmemLayout, Table, Tile, fields_of
from ..primitives.wgmma import ROWS_PER_THREAD, RowPair, flat
from ..sm90.cta import OUTPUT_GROUPS, OUTPUT_WARPS, WARPS_PER_GROUP, LatentSm90TileState
from ..sm90.output import LatentSm90Accumulators
from ..sm90.score import WARP_ROWS, query_row
from .operands import DenseDecodeOperands

BOX_COLUMNS = 128
BOX_BYTES = TILE_KEYS * BOX_COLUMNS
ONES_ROWS = 8  # behind the 128 columns of a box of V^T: P times them is its row sum
VALUE_ROWS = BOX_COLUMNS + ONES_ROWS
VALUE_BYTES = VALUE_ROWS * TILE_KEYS
LATENT_BOXES = D_LATENT // BOX_COLUMNS  # of a tile
K_STEP = 32  # contraction depth of one WGMMA
STEPS_PER_BOX = BOX_COLUMNS // K_STEP
Q_STEPS = D_QK // K_STEP
PROBS_STEPS = TILE_KEYS // K_STEP
PROBS_BYTES = TILE_ROWS * TILE_KEYS
CHUNKS = LATENT_BOXES // OUTPUT_GROUPS  # of V^T of one output warpgroup

STAGES = 3  # key tiles
VALUE_STAGES = 2  # transposed ones
PROBS_STAGES = 2

REGISTERS = 48, 144  # a lane of load and transpose, and of score

QGMMA_PER_TILE = Q_STEPS + CHUNKS * PROBS_STEPS  # S in steps of 64 x 64 x 32, O in chunks of 64 x 136 x 32

SMEM = SmemLayout((
    Tile("sKv", Float8E4M3FN, (TILE_KEYS, BOX_COLUMNS, STAGES * LATENT_BOXES)),
    Tile("sRope", Float8E4M3FN, (TILE_KEYS, BOX_COLUMNS, STAGES)),
    Tile("sVt", Float8E4M3FN, (VALUE_ROWS, TILE_KEYS, VALUE_STAGES * LATENT_BOXES), swizzle=64),
    Tile("sProbs", Float8E4M3FN, (TILE_ROWS, TILE_KEYS, PROBS_STAGES), swizzle=64),
    Table("sAlpha", Float32, (TILE_ROWS, PROBS_STAGES)),
    Table("sInverse", Float32, TILE_ROWS),
    Table("sTarget", Int64, TILE_ROWS),
    Barriers("kv_ready", STAGES * LATENT_BOXES),
    Barriers("rope_ready", STAGES),
    Barriers("keys_free", STAGES),
    Barriers("values_ready", VALUE_STAGES * LATENT_BOXES),
    Barriers("values_free", VALUE_STAGES * LATENT_BOXES),
    Barriers("probs_ready", PROBS_STAGES),
    Barriers("probs_free", PROBS_STAGES),
    Barriers("stats_ready", 1),
    Barriers("stats_free", 1),
))  # fmt: skip

WORDS_PER_STEP = 4  # of A of one WGMMA: (row half, columns 0..15 or 16..31) of a thread, four columns each
A_VALUES = (4, 2, 2)
A_STRIDES = (1, 4, 8)
SUMMING_CHUNK = CHUNKS - 1
ROW_BYTES = TILE_KEYS  # of P and V^T
KEY_GROUPS = ROW_BYTES // CHUNK


@dataclass(frozen=True)
class DenseDecodeBoxBarriers:
    """A StageBarriers for each box of a tile, one behind the other: use n of each is tile n. What they guard lies in the same order."""

    base: cute.Pointer
    stages: int

    def box(self, box: int | Int32) -> StageBarriers:
        """Return the barriers of one box."""
        return StageBarriers(self.base + box * self.stages, self.stages)

    def stage(self, box: int | Int32, tile: Int32) -> Int32:
        """Return the stage of a box of a tile, among those of all boxes."""
        return box * self.stages + StageBarriers(self.base, self.stages).stage(tile)

    def initialise(self, boxes: int, arrivals: int) -> None:
        """Set the arrivals that complete a phase. One thread, before any use."""
        StageBarriers(self.base, boxes * self.stages).initialise(arrivals)


@dataclass(frozen=True)
class DenseDecodeSm90Fp8Smem:
    """Shared memory: tensors of rows x columns x stages, and barriers. Of a box, stage s of number b lies at b * stages + s.

    sm90_fp8.py says who arrives where.
    """

    sKv: cute.Tensor  # e4m3 (64 keys, 128 columns, 4 boxes of 3 stages)
    sRope: cute.Tensor  # e4m3 (64 keys, 128 columns, 3): 64 RoPE columns, then zeros that nobody reads
    sVt: cute.Tensor  # e4m3 (128 latent columns and 8 rows of ones, 64 keys, 4 boxes of 2 stages), in the orders of sm90_fp8_transpose.py
    sProbs: cute.Tensor  # e4m3 (64 rows, 64 keys, 2), the same order of keys
    sAlpha: cute.Tensor  # fp32 (64 rows, stages of P): rescale factors
    sInverse: cute.Tensor  # fp32 (64 rows): factor of a row of O, but for its division by the sum of rounded P
    sTarget: cute.Tensor  # int64 (64 rows): where rows of O go, by output_target
    kv_ready: DenseDecodeBoxBarriers
    rope_ready: StageBarriers
    keys_free: StageBarriers
    values_ready: DenseDecodeBoxBarriers
    values_free: DenseDecodeBoxBarriers
    probs_ready: StageBarriers
    probs_free: StageBarriers
    stats_ready: StageBarriers
    stats_free: StageBarriers

    d_v = D_LATENT
    valid_ready = None  # every tile has keys

    @staticmethod
    def create(memory: dict[str, Any]) -> DenseDecodeSm90Fp8Smem:
        """Return the allocated fields of SMEM."""
        boxes = {"kv_ready": STAGES, "values_ready": VALUE_STAGES, "values_free": VALUE_STAGES}
        by_box = {name: DenseDecodeBoxBarriers(memory[name].base, stages) for name, stages in boxes.items()}
        return DenseDecodeSm90Fp8Smem(**fields_of(DenseDecodeSm90Fp8Smem, {**memory, **by_box}))

    def initialise(self, cluster: int) -> None:
        """Set the arrivals of every barrier: warps of the arriving role, times the CTAs that share a stage."""
        self.kv_ready.initialise(LATENT_BOXES, 1)
        self.rope_ready.initialise(1)
        self.keys_free.initialise((WARPS_PER_GROUP + LATENT_BOXES) * cluster)
        self.values_ready.initialise(LATENT_BOXES, 1)
        self.values_free.initialise(LATENT_BOXES, WARPS_PER_GROUP)
        self.probs_ready.initialise(WARPS_PER_GROUP)
        self.probs_free.initialise(OUTPUT_WARPS)
        self.stats_ready.initialise(WARPS_PER_GROUP)
        self.stats_free.initialise(OUTPUT_WARPS)
        cute.arch.mbarrier_init_fence()

    def tile(self, number: Int32) -> LatentSm90TileState:
        """Return the states of a tile by its number: all of it lies in one stage."""
        stage = self.rope_ready.state(number)
        return LatentSm90TileState(number, stage, stage)

    def first_tile(self, side: Int32) -> LatentSm90TileState:
        """Return the states of the first tile."""
        stage = PipelineState(Int32(0), Int32(0))
        return LatentSm90TileState(Int32(0), stage, stage)

    def next_tile(self, state: LatentSm90TileState) -> LatentSm90TileState:
        """Return the states of the tile after one."""
        stage = self.rope_ready.advance(state.rope)
        return LatentSm90TileState(state.number + 1, stage, stage)


def tiled_mma(columns: int, source: warpgroup.OperandSource) -> cute.TiledMma:
    """Return 64 x columns x 32 WGMMA with fp32 accumulators."""
    major = OperandMajorMode.K
    op = warpgroup.MmaF8Op(Float8E4M3FN, Float8E4M3FN, Float32, (64, columns, K_STEP), source, major, major)
    return cute.make_tiled_mma(op)


def lane_dither(thread: Int32, odd: int) -> Float32:
    """Return the factor of the keys that are 2 (t % 4) + odd modulo 8."""
    factor = Float32(DITHER[odd])
    for quarter in range(1, 4):
        factor = cutlass.select_(thread % 4 == quarter, Float32(DITHER[2 * quarter + odd]), factor)
    return factor


@dataclass(frozen=True)
class DenseDecodeSm90Fp8Scores:
    """S (64 rows x 64 keys) = Q K^T of e4m3 operands, all of Q in registers. cluster: CTAs that share the key tiles."""

    cluster: int
    smem: DenseDecodeSm90Fp8Smem
    thread: Int32
    mma: cute.TiledMma
    rQ: cute.Tensor
    tK: cute.Tensor
    tRope: cute.Tensor
    scores: cute.Tensor
    dither: tuple[Float32, Float32]  # what the even and the odd one of this thread's pairs of probabilities are multiplied with
    probs: Int32  # where this lane's row of its warp's matrix stores lies in the first stage of P
    factors: RowPair  # rescale factors, beside P

    @staticmethod
    def create(cluster: int, smem: DenseDecodeSm90Fp8Smem, thread: Int32) -> DenseDecodeSm90Fp8Scores:
        """Partition the tiles for one thread of the score warpgroup."""
        mma = tiled_mma(TILE_KEYS, warpgroup.OperandSource.RMEM)
        slice_ = mma.get_slice(thread)
        rows = smem.sProbs.iterator.toint() + thread // 32 * (WARP_ROWS * ROW_BYTES)
        return DenseDecodeSm90Fp8Scores(
            cluster=cluster,
            smem=smem,
            thread=thread,
            mma=mma,
            rQ=cute.make_rmem_tensor(cute.make_layout((A_VALUES, 1, Q_STEPS), stride=(A_STRIDES, 0, 4 * WORDS_PER_STEP)), Float8E4M3FN),
            tK=slice_.make_fragment_B(slice_.partition_B(smem.sKv)),
            tRope=slice_.make_fragment_B(slice_.partition_B(smem.sRope)),
            scores=cute.make_rmem_tensor(slice_.partition_shape_C((TILE_ROWS, TILE_KEYS)), Float32),
            dither=(lane_dither(thread, 0), lane_dither(thread, 1)),
            probs=pin_register(writer_address(rows, thread % 32)),
            factors=RowPair.of(smem.sAlpha, thread),
        )

    reads_ahead = False  # this role loads Q itself

    def release_queries(self, last: Boolean) -> None:
        """Do nothing: this role loads Q itself."""

    @cute.jit
    def load_queries(self, operands: DenseDecodeOperands, req: Int32):
        """Load Q of a work tile to registers. Rows past the last one repeat it; their results go nowhere.

        Columns 16 n + 4 (t % 4) and the next three of row half h are register 2 n + h.
        """
        words, stored = cute.recast_tensor(flat(self.rQ), Int32), operands.row_range(req)
        for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
            source = stored.q_row(stored.nearest(query_row(self.thread, row_half))) + 4 * (self.thread % 4)
            for sixteen in cutlass.range_constexpr(2 * Q_STEPS):
                words[2 * sixteen + row_half] = load_word(source + 16 * sixteen)

    def multiply(self, state: LatentSm90TileState) -> None:
        """Issue the products of S of one key tile. Wait for each stage just before its first use."""
        self.mma.set(warpgroup.Field.ACCUMULATE, False)
        for i in range(LATENT_BOXES):
            self.smem.kv_ready.box(i).consumer_wait(state.kv)
            self._multiply_box(i * STEPS_PER_BOX, self.tK[None, None, None, i * STAGES + state.kv.stage])
        self.smem.rope_ready.consumer_wait(state.rope)
        self._multiply_box(LATENT_BOXES * STEPS_PER_BOX, self.tRope[None, None, None, state.rope.stage])
        warpgroup.commit_group()

    def arrival(self, state: LatentSm90TileState) -> tuple[cute.Pointer, Int32]:
        """Return barrier and phase of the RoPE columns."""
        return self.smem.rope_ready.barrier(state.rope), state.rope.phase

    def complete(self, state: LatentSm90TileState) -> None:
        """Wait until S of a tile is complete."""
        warpgroup.wait_group(0)

    def _multiply_box(self, first: int, tK: cute.Tensor) -> None:
        """Add to S the columns of a box that belong to keys, from step `first` of Q on."""
        warpgroup.fence()
        for step in range(first, min(first + STEPS_PER_BOX, Q_STEPS)):
            cute.gemm(self.mma, self.scores, self.rQ[None, None, step], tK[None, None, step - first], self.scores)
            self.mma.set(warpgroup.Field.ACCUMULATE, True)

    def release_keys(self, state: LatentSm90TileState) -> None:
        """Release the key tile in every CTA that shares it."""
        self.smem.keys_free.consumer_release_in_cluster(state.kv, self.cluster)

    @cute.jit
    def store_probs(self, state: LatentSm90TileState, alpha: list[Float32]):
        """Write P and the rescale factors to a stage of P. Wait probs_free."""
        stage = self.smem.probs_ready.stage(state.number)
        self.smem.probs_free.producer_acquire(state.number)
        self._store_rounded(stage)
        if self.thread % 4 == 0:
            self.factors.store(stage, alpha)

    def _store_rounded(self, stage: Int32) -> None:
        """Store the scores, by now probabilities, dithered and rounded to e4m3, to a stage of P.

        A thread's words are groups of 16 keys.
        """
        rP = flat(self.scores)
        place = self.probs + stage * PROBS_BYTES
        for pair in range(KEY_GROUPS // 2):
            words = []
            for group in (2 * pair, 2 * pair + 1):
                for row_half in range(ROWS_PER_THREAD):
                    first = CHUNK // 2 * group + 2 * row_half
                    registers = (first, first + 1, first + CHUNK // 4, first + CHUNK // 4 + 1)
                    words.append(pack_word([rP[i] * self.dither[i % 2] for i in registers], Float8E4M3FN))
            store_groups(place, 0, pair, words)

    def probs_barrier(self, state: LatentSm90TileState) -> cute.Pointer:
        """Return the barrier that hands over P of a tile."""
        return self.smem.probs_ready.barrier(state.number)


@dataclass(frozen=True)
class DenseDecodeSm90Fp8Output(LatentSm90Accumulators):
    """O (64 rows x 256 latent columns) += P V, as two chunks of 128 columns, one stage of V^T each.

    The rows of ones behind the columns of the second chunk make the row sums of P as it is multiplied.
    """

    summing: cute.TiledMma

    @staticmethod
    def create(smem: DenseDecodeSm90Fp8Smem, thread: Int32) -> DenseDecodeSm90Fp8Output:
        """Partition the tiles for one thread of an output warpgroup."""
        mma, summing = (tiled_mma(columns, warpgroup.OperandSource.SMEM) for columns in (BOX_COLUMNS, VALUE_ROWS))
        slice_ = summing.get_slice(thread)
        columns = [VALUE_ROWS if chunk == SUMMING_CHUNK else BOX_COLUMNS for chunk in range(CHUNKS)]
        shapes = [slice_.partition_shape_C((TILE_ROWS, VALUE_ROWS)), mma.get_slice(thread).partition_shape_C((TILE_ROWS, BOX_COLUMNS))]
        return DenseDecodeSm90Fp8Output(
            thread=thread,
            mma=mma,
            summing=summing,
            tProbs=slice_.make_fragment_A(slice_.partition_A(smem.sProbs)),
            tV=slice_.make_fragment_B(slice_.partition_B(smem.sVt)),
            factors=RowPair.of(smem.sAlpha, thread),
            accumulators=tuple(cute.make_rmem_tensor(shapes[0 if n == VALUE_ROWS else 1], Float32) for n in columns),
        )

    @cute.jit
    def add_tile(self, smem: DenseDecodeSm90Fp8Smem, state: LatentSm90TileState, begun: Boolean, keys: KeyTile, side: Int32) -> Boolean:
        """Add P V of one tile to O, or O = P V unless O has begun, which it has then."""
        first, tile = side * CHUNKS, state.number
        for chunk in cutlass.range_constexpr(CHUNKS):
            smem.values_ready.box(first + chunk).consumer_wait(tile)
        smem.probs_ready.consumer_wait(tile)
        stage = smem.probs_ready.stage(tile)
        self.rescale(stage, begun)
        warpgroup.fence()
        for chunk in cutlass.range_constexpr(CHUNKS):
            mma = self.summing if chunk == SUMMING_CHUNK else self.mma
            self.multiply_steps(mma, chunk, PROBS_STEPS, stage, smem.values_ready.stage(first + chunk, tile), begun)
        for chunk in cutlass.range_constexpr(CHUNKS):
            warpgroup.wait_group(CHUNKS - 1 - chunk)
            smem.values_free.box(first + chunk).consumer_release(tile)
        smem.probs_free.consumer_release(tile)
        return Boolean(True)

    def row_factors(self, factors: list[Float32], begun: Boolean) -> list[Float32]:
        """Return the published factors / the sum of P as it was multiplied, 0 for a row that attends to nothing."""
        weights = []
        for row_half in range(ROWS_PER_THREAD):
            total = cutlass.select_(begun, self.row_sum(row_half), Float32(0))
            weights.append(cutlass.select_(total == 0.0, Float32(0), factors[row_half] / total))
        return weights

    def row_sum(self, row_half: int) -> Float32:
        """Return the row sum of P as it was multiplied, for either of the thread's rows: any of the columns of ones."""
        return flat(self.accumulators[SUMMING_CHUNK])[BOX_COLUMNS // 2 + 2 * row_half]

    def lane_column(self) -> Int32:
        """Return the first column of the thread's first pair.

        Rows of V^T are the even columns of a group of 16, then the odd ones: a thread has four neighbouring columns of it.
        """
        return 4 * (self.thread % 4)

    def pair_column(self, pair: int) -> int:
        """Return the distance to another pair: every group of 16 columns has two pairs."""
        return pair // 2 * CHUNK + pair % 2 * 2

    def pair_registers(self, pair: int, row_half: int) -> tuple[int, int]:
        """Return the accumulators of the even column and of the odd one, eight rows of V^T apart."""
        first = pair // 2 * (CHUNK // 2) + 2 * row_half + pair % 2
        return first, first + CHUNK // 4

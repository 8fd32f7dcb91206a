"""The two products of the SM90 kernel whose operands are e4m3: S = Q K^T, and O += P V with V transposed by warps."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ...spec.dense_decode import TILE_ROWS
from ...spec.split_plan import TILE_KEYS
from ..attention.softmax import DITHER
from ..primitives.fragments import ROWS_PER_THREAD, RowPair, flat, pack_word
from ..primitives.registers import kept
from ..sm90.config import TilePlace
from ..sm90.gemm import WARP_ROWS, OutputGemm
from ..sm90.matrix_store import CHUNK, KEY_GROUPS, store_groups, writer_address
from .sm90_fp8_tiles import (
    CHUNKS,
    K_STEP,
    LATENT_SLOTS,
    PROBS_BYTES,
    PROBS_STEPS,
    Q_STEPS,
    SLOT_COLUMNS,
    STAGES,
    STEPS_PER_SLOT,
    VALUE_ROWS,
    Pipes,
    Tiles,
)

WORDS_PER_STEP = 4  # of A of one WGMMA: (row half, columns 0..15 or 16..31) of a thread, four columns each
A_VALUES = (4, 2, 2)
A_STRIDES = (1, 4, 8)
SUMMING_CHUNK = CHUNKS - 1
ROW_BYTES = TILE_KEYS


def tiled_mma(columns: int, source: warpgroup.OperandSource) -> cute.TiledMma:
    """64 x columns x 32 WGMMA with fp32 accumulators."""
    major = OperandMajorMode.K
    op = warpgroup.MmaF8Op(Float8E4M3FN, Float8E4M3FN, Float32, (64, columns, K_STEP), source, major, major)
    return cute.make_tiled_mma(op)


def lane_dither(thread: Int32, odd: int) -> Float32:
    """The factor of the keys that are 2 (t % 4) + odd modulo 8."""
    factor = Float32(DITHER[odd])
    for quarter in range(1, 4):
        factor = cutlass.select_(thread % 4 == quarter, Float32(DITHER[2 * quarter + odd]), factor)
    return factor


@dataclass(frozen=True)
class ScoreGemmFp8:
    """S (64 rows x 64 keys) = Q K^T, all of Q in registers."""

    thread: Int32
    mma: cute.TiledMma
    rQ: cute.Tensor
    tK: cute.Tensor
    tRope: cute.Tensor
    scores: cute.Tensor
    dither: tuple[Float32, Float32]  # what the even and the odd one of this thread's pairs of probabilities are multiplied with
    probs: Int32  # where this lane's row of its warp's matrix stores lies in the first slot of P
    factors: RowPair  # rescale factors, beside P

    @staticmethod
    def create(tiles: Tiles, thread: Int32) -> ScoreGemmFp8:
        """Partitions the tiles for one thread of the score warpgroup."""
        mma = tiled_mma(TILE_KEYS, warpgroup.OperandSource.RMEM)
        slice_ = mma.get_slice(thread)
        rows = tiles.sProbs.iterator.toint() + thread // 32 * (WARP_ROWS * ROW_BYTES)
        return ScoreGemmFp8(
            thread=thread,
            mma=mma,
            rQ=cute.make_rmem_tensor(cute.make_layout((A_VALUES, 1, Q_STEPS), stride=(A_STRIDES, 0, 4 * WORDS_PER_STEP)), Float8E4M3FN),
            tK=slice_.make_fragment_B(slice_.partition_B(tiles.sKv)),
            tRope=slice_.make_fragment_B(slice_.partition_B(tiles.sRope)),
            scores=cute.make_rmem_tensor(slice_.partition_shape_C((TILE_ROWS, TILE_KEYS)), Float32),
            dither=(lane_dither(thread, 0), lane_dither(thread, 1)),
            probs=kept(writer_address(rows, thread % 32)),
            factors=RowPair.of(tiles.sAlpha, thread),
        )

    def query_words(self) -> cute.Tensor:
        """Q as 32-bit registers: of columns 16 n + 4 (t % 4) and the next three of row half h, register 2 n + h."""
        return cute.recast_tensor(flat(self.rQ), Int32)

    def multiply(self, pipes: Pipes, place: TilePlace) -> None:
        """S of one key tile, complete on return. Waits for each slot just before its first use."""
        self.mma.set(warpgroup.Field.ACCUMULATE, False)
        for i in range(LATENT_SLOTS):
            pipes.kv_ready.of(i).wait_ready_at(place.kv)
            self._multiply_slot(i * STEPS_PER_SLOT, self.tK[None, None, None, i * STAGES + place.kv.slot])
        pipes.rope_ready.wait_ready_at(place.rope)
        self._multiply_slot(LATENT_SLOTS * STEPS_PER_SLOT, self.tRope[None, None, None, place.rope.slot])
        warpgroup.commit_group()
        warpgroup.wait_group(0)

    def _multiply_slot(self, first: int, tK: cute.Tensor) -> None:
        """S += the columns of a slot that are a key's, from step `first` of Q on."""
        warpgroup.fence()
        for step in range(first, min(first + STEPS_PER_SLOT, Q_STEPS)):
            cute.gemm(self.mma, self.scores, self.rQ[None, None, step], tK[None, None, step - first], self.scores)
            self.mma.set(warpgroup.Field.ACCUMULATE, True)

    def store_probs(self, slot: Int32) -> None:
        """The scores, by now probabilities, dithered and rounded to e4m3, to a slot of P. A thread's words are groups of 16 keys."""
        rP = flat(self.scores)
        place = self.probs + slot * PROBS_BYTES
        for pair in range(KEY_GROUPS // 2):
            words = []
            for group in (2 * pair, 2 * pair + 1):
                for row_half in range(ROWS_PER_THREAD):
                    first = CHUNK // 2 * group + 2 * row_half
                    registers = (first, first + 1, first + CHUNK // 4, first + CHUNK // 4 + 1)
                    words.append(pack_word([rP[i] * self.dither[i % 2] for i in registers], Float8E4M3FN))
            store_groups(place, 0, pair, words)


@dataclass(frozen=True)
class OutputGemmFp8(OutputGemm):
    """O (64 rows x 256 latent columns) += P V, as two chunks of 128 columns, one slot of V^T each. The rows of ones behind the
    columns of the second chunk make the row sums of P as it is multiplied."""

    summing: cute.TiledMma

    @staticmethod
    def of(tiles: Tiles, thread: Int32) -> OutputGemmFp8:
        """Partitions the tiles for one thread of an output warpgroup."""
        mma, summing = (tiled_mma(columns, warpgroup.OperandSource.SMEM) for columns in (SLOT_COLUMNS, VALUE_ROWS))
        slice_ = summing.get_slice(thread)
        columns = [VALUE_ROWS if chunk == SUMMING_CHUNK else SLOT_COLUMNS for chunk in range(CHUNKS)]
        shapes = [slice_.partition_shape_C((TILE_ROWS, VALUE_ROWS)), mma.get_slice(thread).partition_shape_C((TILE_ROWS, SLOT_COLUMNS))]
        return OutputGemmFp8(
            thread=thread,
            mma=mma,
            summing=summing,
            tProbs=slice_.make_fragment_A(slice_.partition_A(tiles.sProbs)),
            tV=slice_.make_fragment_B(slice_.partition_B(tiles.sVt)),
            factors=RowPair.of(tiles.sAlpha, thread),
            accumulators=tuple(cute.make_rmem_tensor(shapes[0 if n == VALUE_ROWS else 1], Float32) for n in columns),
        )

    def multiply(self, chunk: int, probs_slot: Int32, kv_slot: Int32, adds: Boolean) -> None:
        """Issues one chunk as its own group, which adds to O or else overwrites it."""
        mma = self.summing if chunk == SUMMING_CHUNK else self.mma
        self.multiply_steps(mma, chunk, PROBS_STEPS, probs_slot, kv_slot, adds)

    def row_sum(self, row_half: int) -> Float32:
        """Of P as it was multiplied, for either of the thread's rows: any of the columns of ones."""
        return flat(self.accumulators[SUMMING_CHUNK])[SLOT_COLUMNS // 2 + 2 * row_half]

    def lane_column(self) -> Int32:
        """Rows of V^T are the even columns of a group of 16, then the odd ones: a thread has four neighbouring columns of it."""
        return 4 * (self.thread % 4)

    def pair_column(self, pair: int) -> int:
        """Two pairs in every group of 16 columns."""
        return pair // 2 * CHUNK + pair % 2 * 2

    def pair_registers(self, pair: int, row_half: int) -> tuple[int, int]:
        """The even column and the odd one, eight rows of V^T apart."""
        first = pair // 2 * (CHUNK // 2) + 2 * row_half + pair % 2
        return first, first + CHUNK // 4

"""The two products of the SM90 kernel whose operands are e4m3: S = Q K^T, and O += P V with V transposed by warps."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float8E4M3FN, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ...spec.dense_decode import TILE_ROWS
from ...spec.split_plan import TILE_KEYS
from ..parts.fragments import ROWS_PER_THREAD, flat, pack_word
from ..parts.sm90_bytes import CHUNK, KEY_GROUPS, store_groups, writer_address
from ..parts.sm90_gemm import OutputGemm
from .sm90_fp8_tiles import CHUNKS, K_STEP, LATENT_SLOTS, PROBS_BYTES, PROBS_STEPS, Q_STEPS, SLOT_COLUMNS, STEPS_PER_SLOT, Pipes, Tiles

WORDS_PER_STEP = 4  # of A of one WGMMA: (row half, columns 0..15 or 16..31) of a thread, four columns each
A_VALUES = (4, 2, 2)
A_STRIDES = (1, 4, 8)
WARP_ROWS = 16
ROW_BYTES = TILE_KEYS


def tiled_mma(columns: int, source: warpgroup.OperandSource) -> cute.TiledMma:
    """64 x columns x 32 WGMMA with fp32 accumulators."""
    major = OperandMajorMode.K
    op = warpgroup.MmaF8Op(Float8E4M3FN, Float8E4M3FN, Float32, (64, columns, K_STEP), source, major, major)
    return cute.make_tiled_mma(op)


@dataclass(frozen=True)
class ScoreGemmFp8:
    """S (64 rows x 64 keys) = Q K^T, all of Q in registers."""

    thread: Int32
    mma: cute.TiledMma
    rQ: cute.Tensor
    tK: cute.Tensor
    tRope: cute.Tensor
    scores: cute.Tensor
    probs: Int32  # where this lane's row of its warp's matrix stores lies in the first slot of P

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
            probs=writer_address(rows, thread % 32),
        )

    def query_words(self) -> cute.Tensor:
        """Q as 32-bit registers: of columns 16 n + 4 (t % 4) and the next three of row half h, register 2 n + h."""
        return cute.recast_tensor(flat(self.rQ), Int32)

    def multiply(self, pipes: Pipes, tile: Int32) -> None:
        """S of one key tile, complete on return. Waits for each slot just before its first use."""
        self.mma.set(warpgroup.Field.ACCUMULATE, False)
        for i in range(LATENT_SLOTS):
            use = tile * LATENT_SLOTS + i
            pipes.kv_ready.wait_ready(use)
            self._multiply_slot(i * STEPS_PER_SLOT, self.tK[None, None, None, pipes.kv_ready.slot(use)])
        pipes.rope_ready.wait_ready(tile)
        self._multiply_slot(LATENT_SLOTS * STEPS_PER_SLOT, self.tRope[None, None, None, pipes.rope_ready.slot(tile)])
        warpgroup.commit_group()
        warpgroup.wait_group(0)

    def _multiply_slot(self, first: int, tK: cute.Tensor) -> None:
        """S += the columns of a slot that are a key's, from step `first` of Q on."""
        warpgroup.fence()
        for step in range(first, min(first + STEPS_PER_SLOT, Q_STEPS)):
            cute.gemm(self.mma, self.scores, self.rQ[None, None, step], tK[None, None, step - first], self.scores)
            self.mma.set(warpgroup.Field.ACCUMULATE, True)

    def quantise(self) -> list[list[Int32]]:
        """The scores, by now probabilities, rounded to e4m3: of either of the thread's rows, a word for each group of 16 keys."""
        rP = flat(self.scores)
        words: list[list[Int32]] = []
        for row_half in range(ROWS_PER_THREAD):
            firsts = [[CHUNK // 2 * group + CHUNK // 4 * i + 2 * row_half for i in range(2)] for group in range(KEY_GROUPS)]
            words.append([pack_word([rP[i + j] for i in pair for j in range(2)], Float8E4M3FN) for pair in firsts])
        return words

    def store_probs(self, words: list[list[Int32]], slot: Int32) -> None:
        """What quantise gave, to a slot of P."""
        place = self.probs + slot * PROBS_BYTES
        for pair in range(KEY_GROUPS // 2):
            store_groups(place, pair, [words[row_half][2 * pair + i] for i in range(2) for row_half in range(ROWS_PER_THREAD)])


@dataclass(frozen=True)
class OutputGemmFp8(OutputGemm):
    """O (64 rows x 256 latent columns) += P V, as two chunks of 128 columns, one slot of V^T each."""

    @staticmethod
    def of(tiles: Tiles, thread: Int32) -> OutputGemmFp8:
        """Partitions the tiles for one thread of an output warpgroup."""
        mma = tiled_mma(SLOT_COLUMNS, warpgroup.OperandSource.SMEM)
        slice_ = mma.get_slice(thread)
        shape = slice_.partition_shape_C((TILE_ROWS, SLOT_COLUMNS))
        return OutputGemmFp8(
            thread=thread,
            mma=mma,
            tProbs=slice_.make_fragment_A(slice_.partition_A(tiles.sProbs)),
            tV=slice_.make_fragment_B(slice_.partition_B(tiles.sVt)),
            accumulators=tuple(cute.make_rmem_tensor(shape, Float32) for _ in range(CHUNKS)),
        )

    def multiply(self, chunk: int, probs_slot: Int32, kv_slot: Int32) -> None:
        """Issues one chunk as its own group."""
        self.mma.set(warpgroup.Field.ACCUMULATE, True)
        accumulator = self.accumulators[chunk]
        for step in range(PROBS_STEPS):
            cute.gemm(self.mma, accumulator, self.tProbs[None, None, step, probs_slot], self.tV[None, None, step, kv_slot], accumulator)
        warpgroup.commit_group()

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

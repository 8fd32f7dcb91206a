"""The two matrix products of the SM90 decode kernels: S = Q K^T, and O += P V with V the transposed K tile."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ...spec.split_plan import TILE_KEYS
from ..attention.tiles import BOX_COLUMNS
from ..primitives.fragments import RowPair, aligned, flat, half, packed
from ..primitives.registers import kept
from .config import (
    BOX_BYTES,
    K_STEP,
    OUTPUT_COLUMNS,
    SLOT_COLUMNS,
    SLOTS_PER_TILE,
    STEPS_PER_BOX,
    WARPGROUP,
    Geometry,
    Pipes,
    TilePlace,
    Tiles,
)
from .matrix_store import BOX_ROW_BYTES, store_groups, writer_address

WARP_ROWS = 16
STEPS_PER_SLOT = SLOT_COLUMNS // K_STEP
OUTPUT_CHUNKS = OUTPUT_COLUMNS // SLOT_COLUMNS

# A operand of m64k16 in registers: (row half, column pair) of a thread are neighbouring accumulator registers
A_VALUES = (2, 2, 2)
A_STRIDES = (1, 2, 4)
REGISTERS_PER_STEP = 8


def tiled_mma(dtype: type[cutlass.Numeric], columns: int, source: warpgroup.OperandSource, b_major: OperandMajorMode) -> cute.TiledMma:
    """64 x columns x 16 WGMMA with fp32 accumulators."""
    op = warpgroup.MmaF16BF16Op(dtype, Float32, (64, columns, K_STEP), source, OperandMajorMode.K, b_major)
    return cute.make_tiled_mma(op)


@dataclass(frozen=True)
class ScoreGemm:
    """S (64 rows x 64 keys) = Q K^T: the first columns of Q from registers, the others from shared memory."""

    geometry: Geometry
    dtype: type[cutlass.Numeric]
    thread: Int32
    from_registers: cute.TiledMma
    from_smem: cute.TiledMma
    rQ: cute.Tensor  # A fragments of the column tiles kept in registers
    rStaged: cute.Tensor  # one column tile on its way to smem
    tQ: cute.Tensor
    tK: cute.Tensor
    tRope: cute.Tensor
    scores: cute.Tensor
    probs: Int32  # where this lane's row of its warp's matrix stores lies in the first RoPE slot, which P goes to
    staged: Int32  # and in the first smem tile of Q
    factors: RowPair  # rescale factors, beside P

    @staticmethod
    def create(geometry: Geometry, dtype: type[cutlass.Numeric], tiles: Tiles, thread: Int32) -> ScoreGemm:
        """Partitions the tiles for one thread of the score warpgroup."""
        mma = tiled_mma(dtype, TILE_KEYS, warpgroup.OperandSource.RMEM, OperandMajorMode.K)
        mma_smem = tiled_mma(dtype, TILE_KEYS, warpgroup.OperandSource.SMEM, OperandMajorMode.K)
        slice_, slice_smem = mma.get_slice(thread), mma_smem.get_slice(thread)
        steps = geometry.q_tiles_in_registers * STEPS_PER_BOX
        writer = writer_address(thread // 32 * (WARP_ROWS * BOX_ROW_BYTES), thread % 32, BOX_ROW_BYTES)
        scores = cute.make_rmem_tensor(slice_.partition_shape_C((64, TILE_KEYS)), Float32)
        return ScoreGemm(
            geometry=geometry,
            dtype=dtype,
            thread=thread,
            from_registers=mma,
            from_smem=mma_smem,
            rQ=cute.make_rmem_tensor(cute.make_layout((A_VALUES, 1, steps), stride=(A_STRIDES, 0, REGISTERS_PER_STEP)), dtype),
            rStaged=cute.make_rmem_tensor_like(scores, dtype),
            tQ=slice_smem.make_fragment_A(slice_smem.partition_A(tiles.sQ)),
            tK=slice_.make_fragment_B(slice_.partition_B(tiles.sKv)),
            tRope=slice_.make_fragment_B(slice_.partition_B(tiles.sRope)),
            scores=scores,
            probs=kept(tiles.sRope.iterator.toint() + writer),
            staged=tiles.sQ.iterator.toint() + writer,
            factors=RowPair.of(tiles.sAlpha, thread),
        )

    def query_tile(self, tile: int) -> cute.Tensor:
        """The 32-bit registers that column tile `tile` of Q is loaded into: of row half h and columns 8 e + 2 (t % 4) and
        the next, register 2 e + h."""
        if tile >= self.geometry.q_tiles_in_registers:
            return packed(self.rStaged)
        words = STEPS_PER_BOX * REGISTERS_PER_STEP // 2
        registers = cute.recast_tensor(flat(self.rQ), Int32)
        return cute.make_tensor(registers.iterator + tile * words, cute.make_layout(words))

    def store_query_tile(self, slot: int) -> None:
        """The staged column tile to smem, for the async proxy after a fence."""
        store_box(self.staged + slot * BOX_BYTES, self.rStaged)

    def multiply(self, pipes: Pipes, place: TilePlace) -> None:
        """S of one key tile, complete on return. Waits for each slot just before its first use."""
        self.from_registers.set(warpgroup.Field.ACCUMULATE, False)
        self.from_smem.set(warpgroup.Field.ACCUMULATE, True)
        kv = place.kv
        for i in range(SLOTS_PER_TILE):
            pipes.kv_ready.wait_ready_at(kv)
            warpgroup.fence()
            for step in range(STEPS_PER_SLOT):
                self.multiply_step(self.geometry.first_column(i) // K_STEP + step, self.tK[None, None, step, kv.slot])
            kv = pipes.kv_ready.further(kv, i)
        if self.geometry.has_rope:
            pipes.rope_ready.wait_ready_at(place.rope)
            warpgroup.fence()
            for step in range(STEPS_PER_BOX):
                self.multiply_step(SLOTS_PER_TILE * STEPS_PER_SLOT + step, self.tRope[None, None, step, place.rope.slot])
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        if not self.geometry.has_rope:
            pipes.rope_ready.wait_ready_at(place.rope)

    def multiply_step(self, step: int, tK: cute.Tensor) -> None:
        """S += 16 columns of Q times 16 columns of K; the first step of a tile overwrites S."""
        tile, step_in_tile = divmod(step, STEPS_PER_BOX)
        if tile < self.geometry.q_tiles_in_registers:
            cute.gemm(self.from_registers, self.scores, self.rQ[None, None, step], tK, self.scores)
            self.from_registers.set(warpgroup.Field.ACCUMULATE, True)
        else:
            tQ = self.tQ[None, None, step_in_tile, tile - self.geometry.q_tiles_in_registers]
            cute.gemm(self.from_smem, self.scores, tQ, tK, self.scores)

    def store_probs(self, slot: Int32) -> None:
        """The scores, by now probabilities, packed to 16 bits and written over the RoPE columns of their tile."""
        rP = cute.make_rmem_tensor_like(self.scores, self.dtype)
        rP.store(self.scores.load().to(self.dtype))
        store_box(self.probs + slot * BOX_BYTES, rP)


def store_box(place: Int32, fragment: cute.Tensor) -> None:
    """A 64x64 fragment of 16 bits to a box of 64 columns. place: writer_address in it."""
    words = packed(fragment)
    for pair in range(cute.size(words) // 4):
        store_groups(place, 0, pair, [words[4 * pair + i] for i in range(4)])


@dataclass(frozen=True)
class OutputGemm:
    """O (64 rows x 256 latent columns) += P V, as two chunks of 128 columns, one key slot each.

    The accumulators are two 64 x 128 fragments: ptxas refuses a single 64 x 256 one under the 128 registers that 512
    threads start with, although the role raises them."""

    thread: Int32
    mma: cute.TiledMma
    tProbs: cute.Tensor
    tV: cute.Tensor
    factors: RowPair
    accumulators: tuple[cute.Tensor, ...]

    chunks = OUTPUT_CHUNKS

    @staticmethod
    def create(geometry: Geometry, dtype: type[cutlass.Numeric], tiles: Tiles, thread: Int32) -> OutputGemm:
        """Partitions the tiles for one thread of an output warpgroup."""
        mma = tiled_mma(dtype, SLOT_COLUMNS, warpgroup.OperandSource.SMEM, OperandMajorMode.MN)
        slice_ = mma.get_slice(thread)
        shape = (SLOT_COLUMNS, TILE_KEYS, geometry.kv_slots)
        transposed = cute.make_layout(shape, stride=(TILE_KEYS, 1, TILE_KEYS * SLOT_COLUMNS))
        sV = cute.composition(tiles.sKv, transposed)
        shape = slice_.partition_shape_C((64, SLOT_COLUMNS))
        return OutputGemm(
            thread=thread,
            mma=mma,
            tProbs=slice_.make_fragment_A(slice_.partition_A(tiles.sRope)),
            tV=slice_.make_fragment_B(slice_.partition_B(sV)),
            factors=RowPair.of(tiles.sAlpha, thread),
            accumulators=tuple(cute.make_rmem_tensor(shape, Float32) for _ in range(OUTPUT_CHUNKS)),
        )

    def scale(self, factors: list[Float32]) -> None:
        """Multiplies the thread's two rows of O."""
        for accumulator in self.accumulators:
            rO = flat(accumulator)
            for i in range(cute.size(rO)):
                rO[i] = rO[i] * factors[half(i)]

    def multiply(self, chunk: int, probs_slot: Int32, kv_slot: Int32, adds: Boolean) -> None:
        """Issues one chunk as its own group, which adds to O or else overwrites it."""
        self.multiply_steps(self.mma, chunk, TILE_KEYS // K_STEP, probs_slot, kv_slot, adds)

    def multiply_steps(self, mma: cute.TiledMma, chunk: int, steps: int, probs_slot: Int32, kv_slot: Int32, adds: Boolean) -> None:
        """The same with any WGMMA. steps: to go over the keys of a tile."""
        accumulator = self.accumulators[chunk]
        for step in range(steps):
            mma.set(warpgroup.Field.ACCUMULATE, adds if step == 0 else True)
            tP, tV = self.tProbs[None, None, step, probs_slot], self.tV[None, None, step, kv_slot]
            cute.gemm(mma, accumulator, tP, tV, accumulator)
        warpgroup.commit_group()

    def lane_column(self) -> Int32:
        """The first column of the thread's first pair."""
        return 2 * (self.thread % 4)

    def pair_column(self, pair: int) -> int:
        """From there to the first column of another pair."""
        return 8 * pair

    def pair_registers(self, pair: int, row_half: int) -> tuple[int, int]:
        """The accumulators of a pair of neighbouring columns of one of the thread's rows."""
        first = 4 * pair + 2 * row_half
        return first, first + 1

    @cute.jit
    def clear_weightless(self, weights: list[Float32]):
        """Makes rows of weight 0 finite: they attend to nothing, and are 0 whatever was accumulated, if anything was."""
        if cute.arch.vote_any_sync((weights[0] == 0.0) | (weights[1] == 0.0)):
            for accumulator in self.accumulators:
                rO = flat(accumulator)
                for i in cutlass.range_constexpr(cute.size(rO)):
                    rO[i] = cutlass.select_(weights[half(i)] == 0.0, Float32(0), rO[i])

    def pair(self, pair: int, row_half: int, weight: Float32) -> tuple[Float32, Float32]:
        """A pair of neighbouring columns of one of the thread's rows, normalised."""
        values = []
        for register in self.pair_registers(pair, row_half):
            chunk, i = divmod(register, SLOT_COLUMNS // 2)
            values.append(flat(self.accumulators[chunk])[i] * weight)
        return values[0], values[1]


@cute.jit
def clear_rows(tiles: cute.Tensor, slot: Int32, first_row: Int32, thread: Int32, threads: int = WARPGROUP):
    """Zeroes the rows from first_row on of a slot of (rows, columns, slots). Whole 128-byte rows, so the swizzle does not
    matter. `thread` is one of `threads`, a multiple of 8."""
    rows, columns = cute.size(tiles, mode=[0]), cute.size(tiles, mode=[1])
    chunk_elements = 8  # 16 bytes
    chunks_per_row = BOX_COLUMNS // chunk_elements
    rows_per_pass = threads // chunks_per_row
    zeros = cute.make_rmem_tensor(cute.make_layout(chunk_elements), tiles.element_type)
    zeros.fill(0.0)
    base = tiles.iterator + slot * (rows * columns)
    for box in cutlass.range_constexpr(columns // BOX_COLUMNS):
        for step in cutlass.range_constexpr(rows // rows_per_pass):
            row = step * rows_per_pass + thread // chunks_per_row
            if row >= first_row:
                offset = (box * rows + row) * BOX_COLUMNS + thread % chunks_per_row * chunk_elements
                cute.autovec_copy(zeros, cute.make_tensor(aligned(base + offset, 16), cute.make_layout(chunk_elements)))

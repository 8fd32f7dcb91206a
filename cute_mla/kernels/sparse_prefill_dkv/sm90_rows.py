"""The multiply role of sparse_prefill_dkv on Hopper: rows = dS^T Q + P^T dO, from registers to the rows of the slots."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import BOX_COLUMNS
from ..dense_prefill.sm90_gemm import gather_runs, store_row_words
from ..primitives.arithmetic import pack_pair
from ..primitives.wgmma import K_STEP, ROWS_PER_THREAD, flat, fragment_row, tiled_mma
from ..sparse_prefill.operands import SparsePrefillOperands
from .sm90_config import DkvSm90Geometry
from .tiles import END, DkvSmem, DkvTile

COLUMNS_AT_ONCE = 32  # of a row that a quad stores: four times 16 bytes


@dataclass(frozen=True)
class DkvSm90Product:
    """G = A^T B, or G += A^T B: 64 slots, and some columns of 64 heads a step of B. Both operands lie in shared memory, heads in rows."""

    overwrite: cute.TiledMma
    add: cute.TiledMma
    tB: cute.Tensor
    sum: cute.Tensor

    @staticmethod
    def create(
        dtype: type[cutlass.Numeric], streamed: cute.Tensor, columns: int, total: cute.Tensor | None, thread: Int32
    ) -> DkvSm90Product:
        """Return the product of one thread. streamed: (64 heads, all columns, head tiles). columns: of a part. total: G of another one."""
        overwrite, add = (row_mma(dtype, columns) for _ in range(2))
        overwrite.set(warpgroup.Field.ACCUMULATE, False)
        add.set(warpgroup.Field.ACCUMULATE, True)
        of_thread = add.get_slice(thread)
        parts, head_tiles = cute.size(streamed, mode=[1]) // columns, cute.size(streamed, mode=[2])
        strides = (TILE_ROWS, 1, TILE_ROWS * columns, TILE_ROWS * columns * parts)
        transposed = cute.composition(streamed, cute.make_layout((columns, TILE_ROWS, parts, head_tiles), stride=strides))
        if total is None:
            total = cute.make_rmem_tensor(of_thread.partition_shape_C((TILE_KEYS, columns)), Float32)
        return DkvSm90Product(overwrite, add, of_thread.make_fragment_B(of_thread.partition_B(transposed)), total)

    def start(self, tA: cute.Tensor, stage: Int32, part: Int32 | int, head_tile: int, adds: bool) -> None:
        """Issue the product of a stage of A and a part of the columns. adds: to G."""
        for step in range(TILE_ROWS // K_STEP):
            mma = self.add if adds or step else self.overwrite
            cute.gemm(mma, self.sum, tA[None, None, step, stage], self.tB[None, None, step, part, head_tile], self.sum)


def row_mma(dtype: type[cutlass.Numeric], columns: int) -> cute.TiledMma:
    """Return the WGMMA of both operands transposed."""
    return tiled_mma(dtype, columns, warpgroup.OperandSource.SMEM, OperandMajorMode.MN, OperandMajorMode.MN)


def slot_operand(dtype: type[cutlass.Numeric], tiles: cute.Tensor, columns: int, thread: Int32) -> cute.Tensor:
    """Return tiles (64 heads, 64 slots, stages) as operand A with slots in rows, for a product of so many columns."""
    of_thread = row_mma(dtype, columns).get_slice(thread)
    shape = (TILE_KEYS, TILE_ROWS, cute.size(tiles, mode=[2]))
    transposed = cute.make_layout(shape, stride=(TILE_ROWS, 1, TILE_ROWS * TILE_KEYS))
    return of_thread.make_fragment_A(of_thread.partition_A(cute.composition(tiles, transposed)))


@dataclass(frozen=True)
class DkvSm90RowRole:
    """One of two warpgroups. side: which; the first one also has the RoPE columns that the CTA takes."""

    dtype: type[cutlass.Numeric]
    geometry: DkvSm90Geometry
    side: int

    @property
    def has_rope(self) -> bool:
        """Return whether the warpgroup may have RoPE columns."""
        return self.geometry.has_rope and self.side == 0

    @cute.jit
    def run(self, operands: SparsePrefillOperands, smem: DkvSmem, thread: Int32):
        """Wait tile_ready, query_ready. Signal tile_free. Write rows."""
        columns, head_tiles = self.geometry.group_columns, self.geometry.config.head_tiles
        first = cute.arch.block_idx()[0] * self.geometry.columns
        keys = DkvSm90Product.create(self.dtype, smem.sQ, columns, None, thread)
        values = DkvSm90Product.create(self.dtype, smem.sD, columns, keys.sum, thread)
        tP, tS = (slot_operand(self.dtype, tiles, columns, thread) for tiles in (smem.sP, smem.sS))
        products = [(keys, tS, self.side), (values, tP, self.side)]
        rope = None
        if cutlass.const_expr(self.has_rope):
            rope = DkvSm90Product.create(self.dtype, smem.sRope, BOX_COLUMNS, None, thread)
        use, done = Int32(0), Int32(0)
        tile = DkvTile.load(smem, use)
        while tile.first_row != END:
            if tile.begins != 0:
                smem.query_ready.consumer_wait(done)
                done = done + 1
            with_rope = Boolean(self.has_rope) & self.geometry.takes_rope(done - 1)
            self.multiply(smem, products, rope, with_rope, tS, use)
            for head_tile in cutlass.range_constexpr(head_tiles):
                smem.tile_free.consumer_release(use + head_tile)
            self.store(operands, keys.sum, tile, first + self.side * columns, thread)
            if cutlass.const_expr(self.has_rope):  # noqa: SIM102  # one is known when compiling
                if with_rope:
                    self.store(operands, rope.sum, tile, Int32(D_LATENT), thread)
            use = use + head_tiles
            tile = DkvTile.load(smem, use)

    @cute.jit
    def multiply(
        self,
        smem: DkvSmem,
        products: cutlass.Constexpr[list],
        rope: DkvSm90Product | None,
        with_rope: Boolean,
        tS: cute.Tensor,
        use: Int32,
    ):
        """Compute the rows of a tile. products: of the warpgroup's columns, with their A and part. Wait tile_ready of its other stages."""
        for head_tile in cutlass.range_constexpr(self.geometry.config.head_tiles):
            if cutlass.const_expr(head_tile > 0):
                smem.tile_ready.consumer_wait(use + head_tile)
            stage = smem.tile_ready.stage(use + head_tile)
            warpgroup.fence()
            if cutlass.const_expr(self.has_rope):  # noqa: SIM102  # one is known when compiling
                if with_rope:
                    rope.start(tS, stage, 0, head_tile, head_tile > 0)
            for number, (product, tA, part) in enumerate(products):
                product.start(tA, stage, part, head_tile, head_tile + number > 0)
        warpgroup.commit_group()
        warpgroup.wait_group(0)

    @cute.jit
    def store(self, operands: SparsePrefillOperands, total: cute.Tensor, tile: DkvTile, first_column: Int32, thread: Int32):
        """Store the rows of slots that name a row of kv, rounded. A quad stores runs of 64 bytes."""
        rG, width = flat(total), self.geometry.config.d_qk
        columns = 2 * cute.size(rG)
        for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
            slot = fragment_row(thread, row_half)
            word = cutlass.select_(slot < TILE_KEYS // 2, tile.low, tile.high)
            target = operands.args.rows + (Int64(tile.first_row + slot) * width + first_column)
            for run in cutlass.range_constexpr(0, columns, COLUMNS_AT_ONCE):
                registers = range(run // 2 + 2 * row_half, (run + COLUMNS_AT_ONCE) // 2, 4)
                words = gather_runs([pack_pair(rG[i], rG[i + 1], self.dtype) for i in registers], thread)
                if ((word >> (slot % (TILE_KEYS // 2))) & 1) != 0:
                    store_row_words(target + run, words, thread, True)

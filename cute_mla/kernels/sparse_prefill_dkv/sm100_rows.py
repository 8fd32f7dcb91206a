"""The rows role of sparse_prefill_dkv on Blackwell: sums from tensor memory to the rows of the slots."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from ...spec.mla import D_LATENT
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import BOX_COLUMNS
from ..primitives import tcgen05
from ..primitives.arithmetic import pack_pair
from ..primitives.rows import SECTOR_WORDS, store_packed_row
from ..sparse_prefill.operands import SparsePrefillOperands
from .sm100_config import PART_COLUMNS, PART_HALVES, PART_TMEM, TMEM_LANE, DkvSm100Geometry, DkvSm100Smem
from .tiles import END, DkvTile


@dataclass(frozen=True)
class DkvSm100RowRole:
    """Four warps. A thread has a slot, and half of the columns of a part."""

    dtype: type[cutlass.Numeric]
    geometry: DkvSm100Geometry

    @cute.jit
    def run(self, operands: SparsePrefillOperands, smem: DkvSm100Smem, tmem: Int32):
        """Wait tile_ready, part_ready. Signal tile_free, part_free. Write rows."""
        head_tiles = self.geometry.config.head_tiles
        thread = cute.arch.thread_idx()[0]
        lanes = tmem + cute.arch.make_warp_uniform(cute.arch.warp_idx()) * (32 * TMEM_LANE)
        slot, half = thread % TILE_KEYS, thread // TILE_KEYS
        columns = cute.arch.block_idx()[0] * self.geometry.columns
        use, part, done = Int32(0), Int32(0), Int32(0)
        tile = DkvTile.load(smem, use)
        while tile.first_row != END:
            done = done + tile.begins
            for head_tile in cutlass.range_constexpr(head_tiles):
                if cutlass.const_expr(head_tile > 0):
                    smem.tile_ready.consumer_wait(use + head_tile)
                smem.tile_free.consumer_release(use + head_tile)
            word = cutlass.select_(slot < TILE_KEYS // 2, tile.low, tile.high)
            named = ((word >> (slot % (TILE_KEYS // 2))) & 1) != 0
            row = operands.args.rows + Int64(tile.first_row + slot) * self.geometry.config.d_qk
            for first in cutlass.range_constexpr(0, self.geometry.columns, PART_COLUMNS):
                self.store(smem, lanes, part, row + (columns + first + half * PART_TMEM), PART_COLUMNS, named)
                part = part + 1
            if cutlass.const_expr(self.geometry.has_rope):  # noqa: SIM102  # one is known when compiling
                if self.geometry.takes_rope(done - 1):
                    target = row + (D_LATENT + half * (BOX_COLUMNS // PART_HALVES))
                    self.store(smem, lanes, part, target, BOX_COLUMNS, named)
                    part = part + 1
            use = use + head_tiles
            tile = DkvTile.load(smem, use)

    @cute.jit
    def store(self, smem: DkvSm100Smem, lanes: Int32, part: Int32, target: cute.Pointer, width: cutlass.Constexpr[int], named: Boolean):
        """Store this thread's columns of a part, rounded, if the slot names a row of kv. Wait part_ready, signal part_free."""
        smem.part_ready.consumer_wait(part)
        tcgen05.fence_after_wait()
        count = width // PART_HALVES
        values = tcgen05.load_columns(lanes + smem.part_ready.stage(part) * PART_TMEM, count)
        tcgen05.await_loads()
        tcgen05.fence_before_signal()
        smem.part_free.consumer_release(part)
        words = [pack_pair(values[i], values[i + 1], self.dtype) for i in range(0, count, 2)]
        if named:
            store_packed_row(target, words, True, SECTOR_WORDS)

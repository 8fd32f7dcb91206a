"""The roles of sparse_prefill_dq on Blackwell that fill shared memory: keys by cp.async, dO by TMA."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Uint32, cute

from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import BOX_COLUMNS, first_query_row
from ..primitives.copies import load_box, pair_box
from ..sm100.config import BOX_BYTES, EVEN_CTA, PAIR
from ..sm100.gather import NO_POSITION, store_seen, warp_rows
from ..sparse_prefill.sm100_gather import SparsePrefillHalvesRoleSm100
from .abi import DqOperands
from .sm100_config import DOUT_BOXES, DOUT_BYTES, DqSm100Smem


class DqSm100GatherRole(SparsePrefillHalvesRoleSm100):
    """Four warps: sparse prefill's, but that a tile is handed over before the stage of the next one is waited for."""

    @cute.jit
    def fill_tiles(
        self, operands: DqOperands, smem: DqSm100Smem, count: Int32, token: Int32, found: tuple[Int32, Int32], first_tile: Int32,
        warp: Int32,
    ):  # fmt: skip
        """Copy the tiles of one token. Of this lane's keys, the list is asked a tile ahead. first_tile: number of the first tile.

        With two stages, the next tile's stage is free when dQ of the tile before is complete, which comes after S of this tile.
        """
        listed = self.source.key_list(operands, token)
        position = self.source.first_key(Int32(0), warp)
        for t in cutlass.range(count, unroll=1):
            keys = self.source.locate(operands, listed, found, position)
            position = position + TILE_KEYS
            found = self.source.look_up(listed, cutlass.select_(t + 1 < count, position, Int32(NO_POSITION)))
            tile = first_tile + t
            rows, filled = warp_rows(smem, tile, warp), keys.any_seen()
            smem.left_free.producer_acquire(tile)
            self.copy_half(0, rows, keys, filled)
            store_seen(smem, tile, warp, keys)
            smem.seen_ready.producer_commit(tile)
            smem.kv_free.producer_acquire(tile)
            self.copy_half(1, rows, keys, filled)
            self.hand_over(smem.left_ready, tile, 1)
            self.hand_over(smem.kv_ready, tile, 0)


class DqSm100DoutRole:
    """One warp."""

    @cute.jit
    def run(self, operands: DqOperands, smem: DqSm100Smem):
        """Load dO of every token that has tiles. Wait dout_free. Signal dout_ready."""
        schedule, args = operands.schedule, operands.args
        token, first = schedule.first_work_tile()
        number = Int32(0)
        while token <= schedule.last_request():
            if schedule.tile_range(token, first).tiles > 0:
                request = Int32(Uint32(token) // Uint32(args.s_q))
                for part in cutlass.range_constexpr(smem.dout_ready.stages):
                    smem.dout_free.producer_acquire(number + part)
                    where = token - request * args.s_q, request
                    self.load(smem, args.dout_map, where, smem.dout_ready.barrier(number + part), part)
                number = number + smem.dout_ready.stages
            token = schedule.work_tile(token, first).next_req

    @cute.jit
    def load(self, smem: DqSm100Smem, dout_map: Any, where: tuple[Int32, Int32], ready: cute.Pointer, part: cutlass.Constexpr[int]):
        """Load a part of the columns of dO of the CTA's heads of a token. In a pair, the even CTA waits for the bytes of both.

        where: the token, its request.
        """
        paired, parts = smem.geometry.paired, smem.dout_ready.stages
        start, boxes = pair_box if paired else load_box, DOUT_BOXES // parts
        with cute.arch.elect_one():
            if cutlass.const_expr(not paired):
                cute.arch.mbarrier_arrive_and_expect_tx(ready, DOUT_BYTES // parts)
            elif cute.arch.block_idx_in_cluster() == EVEN_CTA:
                cute.arch.mbarrier_arrive_and_expect_tx(ready, PAIR * DOUT_BYTES // parts)
            for box in cutlass.range_constexpr(part * boxes, (part + 1) * boxes):
                start(smem.sD + box * BOX_BYTES, dout_map, (box * BOX_COLUMNS, first_query_row(), *where), ready)

"""The gather role of sparse_prefill_dq on Blackwell, of a pair of CTAs.

A CTA holds half of the columns of all 64 keys of a tile, for S and dQ, and all latent columns of half of the keys, for dP: in each half of
S, 32 keys, the even CTA has the first 16. A warp has 8 keys of each CTA: its lane l has the l-th of these 16, l < 16, and the other lanes
look whether other keys count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, Uint8, cute

from ...spec.mla import D_LATENT, ELEMENT_BYTES
from ...spec.split_plan import TILE_KEYS
from ..primitives.copies import start_copy
from ..primitives.pipeline import StageBarriers
from ..sm100.config import BOX_BYTES, CTA_COLUMNS, CTA_ROPE, EVEN_CTA, GROUP_WARPS, HALF_KEYS, ROW_BYTES, WORD_BYTES
from ..sm100.gather import CHUNK, CHUNKS_PER_ROW, LANES, NO_POSITION, WARP_KEYS, LaneKeys
from ..sparse_prefill.sm100_gather import SparsePrefillHalvesRoleSm100, SparsePrefillTokenEntries, TileKeys
from .abi import DqOperands
from .sm100_config import DPROBS_PARTS, ROPE_ROW_BYTES, VALUE_BOX_BYTES, DqSm100Smem

OCTET = 8  # keys of a warp, of each CTA
assert DPROBS_PARTS * LANES * CHUNK == D_LATENT * ELEMENT_BYTES
ROPE_CHUNKS = ROPE_ROW_BYTES // CHUNK


class PairEntries(SparsePrefillTokenEntries):
    """The rows that the indices of a query token name. A warp looks at all 64 of a tile, two a lane."""

    def first_key(self, begin_tile: Int32, warp: Int32) -> Int32:
        """Return the position of the lane's key, of a token's first tile."""
        lane = cute.arch.lane_idx()
        return begin_tile * TILE_KEYS + first_row((warp + lane // WARP_KEYS) % GROUP_WARPS) + key_row(lane % WARP_KEYS)


def first_row(warp: Int32) -> Int32:
    """Return the row of a tile of the first of a warp's 16 keys."""
    return warp // 2 * HALF_KEYS + warp % 2 * OCTET


def key_row(key: Int32 | int) -> Int32 | int:
    """Return the row of one of the warp's 16 keys, counted from the first."""
    return key % OCTET + key // OCTET * (HALF_KEYS // 2)


@dataclass(frozen=True)
class PairCopies:
    """The copies of a warp of one CTA. rank: of the CTA."""

    rank: Int32
    warp: Int32

    def latent(self, stage: cute.Pointer, keys: LaneKeys) -> None:
        """Start the copies of the CTA's latent columns: 512 bytes a key and pass."""
        chunk = cute.arch.lane_idx()
        box, place = chunk // CHUNKS_PER_ROW, chunk % CHUNKS_PER_ROW
        source = self.rank * (CTA_COLUMNS * ELEMENT_BYTES) + chunk * CHUNK
        for key in range(WARP_KEYS):
            row = keys.row_of(Int32(key))
            offset = (first_row(self.warp) + key_row(key)) * ROW_BYTES + (place ^ (key % CHUNKS_PER_ROW)) * CHUNK
            start_copy(stage + (box * BOX_BYTES + offset), row + source, row != 0, CHUNK)

    def rope(self, box: cute.Pointer, keys: LaneKeys) -> None:
        """Start the copies of the CTA's RoPE columns, 64 bytes a key, to rows of 64 swizzled bytes."""
        lane = cute.arch.lane_idx()
        chunk = lane % ROPE_CHUNKS
        source = D_LATENT * ELEMENT_BYTES + self.rank * (CTA_ROPE * ELEMENT_BYTES) + chunk * CHUNK
        for first in range(0, WARP_KEYS, LANES // ROPE_CHUNKS):
            key = first + lane // ROPE_CHUNKS
            row = keys.row_of(key)
            place = chunk ^ (key // 2 % ROPE_CHUNKS)
            offset = (first_row(self.warp) + key_row(key)) * ROPE_ROW_BYTES + place * CHUNK
            start_copy(box + offset, row + source, row != 0, CHUNK)

    def values(self, stage: cute.Pointer, keys: LaneKeys, part: int) -> None:
        """Start the copies of a part of the latent columns of the CTA's keys: 512 bytes a key."""
        chunk = part * LANES + cute.arch.lane_idx()
        for key in range(OCTET):
            row = keys.row_of(self.rank * OCTET + key)
            place = (chunk % CHUNKS_PER_ROW) ^ key
            offset = chunk // CHUNKS_PER_ROW * VALUE_BOX_BYTES + (self.warp * OCTET + key) * ROW_BYTES + place * CHUNK
            start_copy(stage + offset, row + chunk * CHUNK, row != 0, CHUNK)


class DqSm100PairGatherRole(SparsePrefillHalvesRoleSm100):
    """Four warps. All columns of some keys of a tile come before the CTA's columns of the next one, of whatever token."""

    source: Any = PairEntries()

    @cute.jit
    def run(self, operands: DqOperands, smem: DqSm100Smem, warp: Int32):
        """Wait kv_free, value_free. Signal kv_ready, value_ready, seen_ready. Of this lane's keys, the list is asked a tile ahead."""
        schedule = operands.schedule
        copies = PairCopies(cute.arch.block_idx_in_cluster(), warp)
        token, _ = schedule.first_work_tile()
        tile, row, filled = Int32(0), Int64(0), Boolean(False)  # number of a tile; the lane's key of the tile before, and if it has any
        first, other = self.first_entries(operands, token, warp)
        while token <= schedule.last_request():
            count = schedule.tile_range(token, Int32(0)).tiles
            following = schedule.work_tile(token, Int32(0)).next_req
            next_first, next_other = self.first_entries(operands, following, warp)
            listed, position = self.source.key_list(operands, token), self.source.first_key(Int32(0), warp)
            for t in cutlass.range(count, unroll=1):
                keys = self.source.locate(operands, listed, (first, other), position)
                position = position + TILE_KEYS
                first, other = self.source.look_up(listed, cutlass.select_(t + 1 < count, position, Int32(NO_POSITION)))
                next_filled = keys.any_seen()
                self.copy_values(smem, copies, tile - 1, LaneKeys(row), filled)
                self.copy_columns(smem, copies, tile, keys, next_filled)
                if tile > 0:
                    self.hand_over(smem.value_ready, tile - 1, 1)
                self.hand_over(smem.kv_ready, tile)
                tile, row, filled = tile + 1, keys.row, next_filled
            token, first, other = following, next_first, next_other
        self.copy_values(smem, copies, tile - 1, LaneKeys(row), filled)
        if tile > 0:
            self.hand_over(smem.value_ready, tile - 1)
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def copy_values(self, smem: DqSm100Smem, copies: PairCopies, tile: Int32, keys: LaneKeys, filled: Boolean):
        """Start the copies of all columns of the CTA's keys of a tile, if there is such a tile, and it has keys."""
        if tile >= 0:
            for part in cutlass.range_constexpr(DPROBS_PARTS):
                smem.value_free.producer_acquire(tile * DPROBS_PARTS + part)
                if filled:
                    copies.values(smem.sV, keys, part)
            cute.arch.cp_async_commit_group()

    @cute.jit
    def copy_columns(self, smem: DqSm100Smem, copies: PairCopies, tile: Int32, keys: TileKeys, filled: Boolean):
        """Start the copies of the CTA's columns of a tile, if it has keys, and say which count."""
        stage = smem.stage(smem.kv_ready.stage(tile))
        smem.kv_free.producer_acquire(tile)
        if filled:
            copies.latent(stage, keys)
            if cutlass.const_expr(self.has_rope):
                copies.rope(stage + smem.geometry.rope_box * BOX_BYTES, keys)
        cute.arch.cp_async_commit_group()
        bits = keys.seen()
        if cute.arch.lane_idx() == 0:
            target = cute.recast_ptr(smem.seen_words(tile), dtype=Uint8) + (copies.warp // 2 * WORD_BYTES + copies.warp % 2)
            for octet in cutlass.range_constexpr(WARP_KEYS // OCTET):
                (target + 2 * octet).store(Uint8((bits >> (octet * OCTET)) & 0xFF))
        smem.seen_ready.producer_commit(tile)

    def hand_over(self, ready: StageBarriers | None, tile: Int32, under_way: int = 0) -> None:
        """Signal the even CTA that the warp's share is in its stage: all copies have landed but those of the last `under_way` groups."""
        cute.arch.cp_async_wait_group(under_way)
        cute.arch.fence_proxy("async.shared", space="cta")
        ready.producer_commit(tile, cta=EVEN_CTA)

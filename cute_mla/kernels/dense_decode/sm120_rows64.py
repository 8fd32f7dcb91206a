"""The roles of dense decode on RTX boards for more than 16 query rows, keys on M (sm120/keys_on_m.py): 64 rows a CTA.

The role that brings keys has four warps, each with 8 keys of every stage, which share a page. 16-bit keys land by cp.async. Codes of e4m3
land at the beginning of the row that they become, and are converted there, exactly:

    k_free -> codes to the stage -> landed -> codes to registers -> k_ready

Meanwhile the other stage is multiplied. L2 is asked for the bytes of a stage while the one before lands, and for Q of the next work tile
by lines, a stage each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import cutlass
from cutlass import Boolean, Int32, Int64, Uint8, cute

from ...spec.dense_decode import FP8, LATENT
from ...spec.mla import ELEMENT_BYTES
from ..primitives.arithmetic import smaller, widen_in_pairs
from ..primitives.copies import LINE_BYTES, arrive_landed, prefetch_line
from ..primitives.pipeline import PipelineState
from ..primitives.rows import registers
from ..sm120.attend import chunk_at
from ..sm120.cta import KEYS, LANES, STAGES, WARP_KEYS, Sm120Smem, Sm120Thread, pitch_of
from ..sm120.keys_on_m import Sm120KeysOnMRole
from ..sm120.rows import LANE_COLUMNS, PASS_COLUMNS, Sm120Columns, ask_for_queries, convert_in_place, pair_at, query_parts
from .operands import DenseDecodeOperands
from .page_walk import look_up_key

KEY_LANES = LANES // WARP_KEYS  # that ask L2 for a key together


class DenseDecodeSm120Fp8KeysOnMRole(Sm120KeysOnMRole):
    """The role that multiplies, over e4m3 queries, which become the products' type, exactly."""

    query_bytes = 1

    def query_words(self, words: cute.Tensor) -> cute.Tensor:
        """Return 8 columns of a row of Q as products take them."""
        return widen_in_pairs(words, self.dtype)


@dataclass(frozen=True)
class DenseDecodeSm120CopyRole:
    """The role that brings keys. operands: LATENT, FP8_CACHE or FP8. d_qk: columns of a key. dtype: what e4m3 becomes."""

    operands: str
    d_qk: int
    dtype: type[cutlass.Numeric]

    @property
    def coded(self) -> bool:
        """Return whether keys are e4m3."""
        return self.operands != LATENT

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a key in the cache."""
        return self.d_qk if self.coded else self.d_qk * ELEMENT_BYTES

    @property
    def pitch(self) -> int:
        """Return the bytes from a key to the next in shared memory."""
        return pitch_of(self.d_qk)

    @cute.jit
    def run(self, operands: DenseDecodeOperands, smem: Sm120Smem):
        """Wait k_free. Signal k_ready."""
        schedule, thread = operands.schedule, Sm120Thread.create()
        query_bytes = self.d_qk if self.operands == FP8 else self.d_qk * ELEMENT_BYTES
        key = thread.warp * WARP_KEYS + thread.lane % WARP_KEYS
        state = PipelineState(Int32(0), Int32(0))
        req, begin_tile = schedule.first_work_tile()
        last = schedule.last_request()
        while req <= last:
            tile_range = schedule.tile_range(req, begin_tile)
            work_tile = schedule.work_tile_of(tile_range, req, begin_tile)
            _, skipped = schedule.lengths.keys_and_skipped(req)
            another = (work_tile.next_req > req) & (work_tile.next_req <= last)
            stages = tile_range.tiles * STAGES
            page, row = look_up_key(operands, tile_range, skipped, key)
            address = operands.cache_address(page, row, Int32(0))
            page, row = look_up_key(operands, tile_range, skipped, KEYS + key)
            for i in cutlass.range(stages, unroll=1):
                place = smem.sK.toint() + (state.stage * KEYS + thread.warp * WARP_KEYS) * self.pitch
                smem.k_free.producer_acquire(state)
                Sm120Columns(0, 0, self.row_bytes // ELEMENT_BYTES, self.pitch).start(thread, place, address, Int32(0))
                address = operands.cache_address(page, row, Int32(0))
                page, row = look_up_key(operands, tile_range, skipped, (i + 2) * KEYS + key)
                self.ask_for(thread, address != 0, address)
                if another & (i < query_parts(query_bytes)):
                    ask_for_queries(operands, work_tile.next_req, i, query_bytes)
                self.hand_over(smem, thread, state, place)
                state = smem.k_ready.advance(state)
            req, begin_tile = work_tile.next_req, work_tile.next_tile
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def ask_for(self, thread: Sm120Thread, wanted: Boolean, row: Int64):
        """Ask L2 for the bytes of the warp's keys. row: address of key lane % 8."""
        if wanted:
            for first in cutlass.range_constexpr(0, self.row_bytes - 1 + LINE_BYTES, KEY_LANES * LINE_BYTES):
                byte = smaller(first + thread.lane // WARP_KEYS * LINE_BYTES, Int32(self.row_bytes - 1))
                prefetch_line(cute.make_ptr(Uint8, row + Int64(byte), cute.AddressSpace.gmem))

    def hand_over(self, smem: Sm120Smem, thread: Sm120Thread, state: PipelineState, place: Int32) -> None:
        """Signal k_ready for the warp's keys of a stage: as they land, or when they have landed and are converted."""
        if not self.coded:
            arrive_landed(smem.k_ready.barrier(state))
            return
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()
        self.convert(thread, place)
        smem.k_ready.producer_commit(state)

    def convert(self, thread: Sm120Thread, place: Int32) -> None:
        """Convert the warp's keys of a stage: first columns of several keys at once, those behind the last that all lanes have."""
        whole = self.d_qk // PASS_COLUMNS * PASS_COLUMNS
        tail_lanes = (self.d_qk - whole) // LANE_COLUMNS
        column = whole + thread.lane % tail_lanes * LANE_COLUMNS
        for first in range(0, WARP_KEYS, LANES // tail_lanes):
            row = place + (first + thread.lane // tail_lanes) * self.pitch
            cute.autovec_copy(self.widen(self.load(row + column)), chunk_at(row + column * ELEMENT_BYTES))
        for key in range(WARP_KEYS):
            row = place + key * self.pitch
            convert_in_place(row, thread, whole, partial(self.load, row + thread.lane * LANE_COLUMNS), self.widen)

    @staticmethod
    def load(place: Int32, column: int = 0) -> cute.Tensor:
        """Load the codes of a lane's columns. place: of the lane's first code."""
        words = registers(2)
        cute.autovec_copy(pair_at(place + column), words)
        return words

    def widen(self, words: cute.Tensor) -> cute.Tensor:
        """Return a lane's columns as the products' type."""
        return widen_in_pairs(words, self.dtype)

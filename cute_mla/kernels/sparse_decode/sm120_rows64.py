"""The role that brings keys of more than 16 heads on RTX boards: cp.async of rows, and codes converted where they have landed.

A warp has 8 keys of every stage. It looks at all 32 indices, one a lane, so that each knows which keys exist. Codes of a key land at the
beginning of its row in shared memory, one behind the other, and become 16 bits in the same row:

    k_free -> codes, scales and 16-bit columns to the stage -> landed -> codes to registers, value x scale, rounded once -> k_ready

Meanwhile the other stage is multiplied. L2 is asked for the bytes of a stage while the one before lands and is converted, and for Q of the
next request by lines, a stage each.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint8, cute

from ...spec.cache_format import CacheFormat, paged_twin
from ...spec.mla import ELEMENT_BYTES
from ...spec.sparse_decode import SparseDecodeConfig
from ...spec.split_plan import TILE_KEYS
from ..primitives.arithmetic import E2M1_SCALE, e4m3_of_e2m1, e8m0_scale, from_lane, pack_pair
from ..primitives.copies import CHUNK, arrive_landed, prefetch_row, smem_pointer, start_copy
from ..primitives.pipeline import PipelineState
from ..primitives.rows import exact, registers
from ..sm120.attend import CHUNK_WORDS
from ..sm120.cta import KEYS, WARP_KEYS, Sm120Smem, Sm120Thread, pitch_of
from ..sm120.rows import LANE_COLUMNS, Sm120Columns, ask_for_queries, convert_in_place, pair_at, query_parts
from .operands import SparseDecodeIndices, SparseDecodeOperands, look_up, slot_address


@dataclass(frozen=True)
class SparseDecodeSm120CopyRole:
    """Four warps, each with 8 keys of a stage."""

    config: SparseDecodeConfig
    dtype: type[cutlass.Numeric]

    @property
    def format(self) -> CacheFormat:
        """Return the format of the first cache."""
        return self.config.format

    @property
    def pitch(self) -> int:
        """Return the bytes from a key to the next in shared memory."""
        return pitch_of(self.format.d_qk)

    @property
    def scale_bytes(self) -> int:
        """Return the bytes of shared memory for the scales of a key."""
        return max(self.format.scale_bytes, self.config.extra_format.scale_bytes)

    @property
    def group_keys(self) -> int:
        """Return the keys of a warp that are converted as soon as they have landed.

        By the clock a block takes 6 to 7 % less by twos than all at once, but as much more over 584 bytes and with two formats.
        """
        return 2 if self.format.scales_inside and not self.config.mixes_formats else WARP_KEYS

    @property
    def asks_for_scales(self) -> bool:
        """Return whether L2 is asked for scales that may lie behind all rows of a page. With two formats ptxas would wait for an index."""
        return not self.format.scales_inside or (paged_twin(self.format) is not None and not self.config.mixes_formats)

    @cute.jit
    def run(self, operands: SparseDecodeOperands, smem: Sm120Smem):
        """Wait k_free. Signal k_ready."""
        schedule, thread = operands.schedule, Sm120Thread.create()
        query_bytes = self.format.d_qk * ELEMENT_BYTES
        state = PipelineState(Int32(0), Int32(0))
        req, begin_tile = schedule.first_work_tile()
        last = schedule.last_request()
        while req <= last:
            tile_range = schedule.tile_range(req, begin_tile)
            work_tile = schedule.work_tile_of(tile_range, req, begin_tile)
            indices = SparseDecodeIndices.create(operands, req)
            another = (work_tile.next_req > req) & (work_tile.next_req <= last)
            stages = tile_range.tiles * (TILE_KEYS // KEYS)
            position = begin_tile * TILE_KEYS + thread.lane
            row, scales = self.slot(operands, indices, position, look_up(indices, position))
            index = look_up(indices, position + KEYS)
            for i in cutlass.range(stages, unroll=1):
                present = cute.arch.vote_ballot_sync(row != 0)
                narrow = cute.arch.vote_ballot_sync(indices.in_extra(position)) if self.config.mixes_formats else Int32(0)
                smem.k_free.producer_acquire(state)
                if present != 0:
                    self.start(smem, thread, state.stage, row, scales, narrow)
                position = position + KEYS
                row, scales = self.slot(operands, indices, position, index)
                index = look_up(indices, position + KEYS)
                self.ask_for(thread, (i + 1 < stages) & (row != 0), row, scales)
                if another & (i < query_parts(query_bytes)):
                    ask_for_queries(operands, work_tile.next_req, i, query_bytes)
                if present != 0:
                    self.convert_stage(smem, thread, state.stage, narrow)
                self.hand_over(smem, thread, state, present)
                state = smem.k_ready.advance(state)
            req, begin_tile = work_tile.next_req, work_tile.next_tile
        cute.arch.griddepcontrol_launch_dependents()

    def slot(self, operands: SparseDecodeOperands, indices: SparseDecodeIndices, position: Int32, index: Int32) -> tuple[Int64, Int64]:
        """Return the addresses of the row and the scales of key lane."""
        return slot_address(operands, self.config, index, indices.in_extra(position))

    @cute.jit
    def ask_for(self, thread: Sm120Thread, wanted: Boolean, row: Int64, scales: Int64):
        """Ask L2 for the bytes of the warp's keys. row, scales: of key lane."""
        if wanted & (thread.lane // WARP_KEYS == thread.warp):
            prefetch_row(row, self.format.row_bytes)
            if cutlass.const_expr(self.asks_for_scales):
                prefetch_row(scales, self.format.scale_bytes)

    @cute.jit
    def hand_over(self, smem: Sm120Smem, thread: Sm120Thread, state: PipelineState, present: Int32):
        """Signal k_ready, with the bits of a stage."""
        if cutlass.const_expr(not self.format.quantised):
            arrive_landed(smem.k_ready.barrier(state))
        if thread.warp == 0:
            (smem.sPresent + state.stage).store(present)
        if cutlass.const_expr(self.format.quantised):
            smem.k_ready.producer_commit(state)
        else:
            if thread.warp == 0:
                smem.k_ready.producer_commit(state)

    def place(self, smem: Sm120Smem, thread: Sm120Thread, stage: Int32) -> Int32:
        """Return the address of the warp's first key of a stage."""
        return smem.sK.toint() + (stage * KEYS + thread.warp * WARP_KEYS) * self.pitch

    def start(self, smem: Sm120Smem, thread: Sm120Thread, stage: Int32, row: Int64, scales: Int64, narrow: Int32) -> None:
        """Start the copies of the warp's keys. row, scales: addresses of key lane. narrow: a bit for each key of the second cache."""
        first, place, coded = thread.warp * WARP_KEYS, self.place(smem, thread, stage), self.format.quantised
        wide = Sm120Columns(self.format.wide_offset, coded * ELEMENT_BYTES, self.format.d_qk - coded, self.pitch)
        if coded:
            byte = thread.lane * CHUNK
            self.start_scales(smem, thread, scales, narrow)
            for key in range(WARP_KEYS):
                source, target = from_lane(row, first + key), smem_pointer(place + key * self.pitch + byte)
                start_copy(target, source + byte, (source != 0) & (byte < self.code_bytes(narrow, first + key)), CHUNK)
                if (key + 1) % self.group_keys == 0 and key + 1 != WARP_KEYS:
                    cute.arch.cp_async_commit_group()
        wide.start(thread, place, row, first)
        if coded:
            cute.arch.cp_async_commit_group()

    def convert_stage(self, smem: Sm120Smem, thread: Sm120Thread, stage: Int32, narrow: Int32) -> None:
        """Convert the warp's keys, once they have landed, where they have codes."""
        if not self.format.quantised:
            return
        first, place = thread.warp * WARP_KEYS, self.place(smem, thread, stage)
        for key in range(WARP_KEYS):
            if key % self.group_keys == 0:
                cute.arch.cp_async_wait_group((WARP_KEYS - 1 - key) // self.group_keys)
                cute.arch.sync_warp()
            self.convert(smem, thread, place + key * self.pitch, first + key, narrow)

    def code_bytes(self, narrow: Int32, key: Int32) -> Int32 | int:
        """Return the bytes of a key's codes."""
        if not self.config.mixes_formats:
            return self.format.code_bytes
        return cutlass.select_(is_narrow(narrow, key), Int32(self.config.extra_format.code_bytes), Int32(self.format.code_bytes))

    @cute.jit
    def start_scales(self, smem: Sm120Smem, thread: Sm120Thread, scales: Int64, narrow: Int32):
        """Start the copies of the scales of the warp's keys."""
        if thread.lane // WARP_KEYS == thread.warp:
            target = smem.sScales.toint() + thread.lane * self.scale_bytes
            nbytes = self.format.scale_bytes
            start_copy(scale_pointer(target), scales, scales != 0, nbytes)
            if cutlass.const_expr(self.config.mixes_formats):
                start_copy(scale_pointer(target + nbytes), scales + nbytes, (scales != 0) & is_narrow(narrow, thread.lane), nbytes)

    def convert(self, smem: Sm120Smem, thread: Sm120Thread, place: Int32, key: Int32, narrow: Int32) -> None:
        """Convert a key. place: its row, which begins with its codes."""

        def load(first: int) -> tuple[cute.Tensor, Float32]:
            scale = self.scale(smem, thread, key, first, narrow)
            return self.load_codes(thread, place, key, first, narrow), scale

        convert_in_place(place, thread, self.format.quantised, load, self.scaled)

    def scaled(self, loaded: tuple[cute.Tensor, Float32]) -> cute.Tensor:
        """Return value x scale of a lane's columns, rounded once."""
        words, scale = loaded
        values = [value * scale for value in exact(words, cutlass.Float8E4M3FN)]
        packed = registers(CHUNK_WORDS)
        for i in range(CHUNK_WORDS):
            packed[i] = pack_pair(values[2 * i], values[2 * i + 1], self.dtype)
        return packed

    def load_codes(self, thread: Sm120Thread, place: Int32, key: Int32, first: int, narrow: Int32) -> cute.Tensor:
        """Load the e4m3 values of a lane's columns."""
        words, column = registers(2), first + thread.lane * LANE_COLUMNS
        if not self.config.mixes_formats:
            cute.autovec_copy(pair_at(place + column), words)
            return words
        both, two = registers(2), is_narrow(narrow, key)
        cute.autovec_copy(pair_at(place + cutlass.select_(two, column // (2 * LANE_COLUMNS) * LANE_COLUMNS, column)), both)
        codes = e4m3_of_e2m1(cutlass.select_(thread.lane % 2 != 0, both[1], both[0]))
        for i in range(2):
            words[i] = cutlass.select_(two, codes[i], both[i])
        return words

    def scale(self, smem: Sm120Smem, thread: Sm120Thread, key: Int32, first: int, narrow: Int32) -> Float32:
        """Return the scale of a lane's columns."""
        place = smem.sScales.toint() + key * self.scale_bytes
        group = (first + thread.lane * LANE_COLUMNS) // self.format.group
        if self.format.scale == "fp32":
            return cute.make_ptr(Float32, place + group * 4, cute.AddressSpace.smem, assumed_align=4).load()
        two = is_narrow(narrow, key)
        if self.config.mixes_formats:
            group = cutlass.select_(two, (first + thread.lane * LANE_COLUMNS) // self.config.extra_format.group, group)
        code = Int32(cute.make_ptr(Uint8, place + group, cute.AddressSpace.smem).load())
        if not self.config.mixes_formats:
            return e8m0_scale(code)
        return mixed_scale(code, two)


def mixed_scale(code: Int32, narrow: Boolean) -> Float32:
    """Return the scale that a code stands for: e8m0, or if narrow e4m3, times that of e2m1 values in e4m3."""
    word = registers(1)
    word[0] = code
    return cutlass.select_(narrow, exact(word, cutlass.Float8E4M3FN)[0] * E2M1_SCALE, e8m0_scale(code))


def is_narrow(narrow: Int32, key: Int32) -> Boolean:
    """Return the bit of a key."""
    return (narrow >> key) & 1 != 0


def scale_pointer(address: Int32) -> cute.Pointer:
    """Return the address of the scales of a key as a pointer."""
    return cute.make_ptr(Uint8, address, cute.AddressSpace.smem, assumed_align=8)

"""Sparse MLA decode on RTX boards and DGX Spark.

For a query token of a request with heads h, over the slots j that its indices name:

    s_hj = <q_h, k_j>    p = softmax(scale * s)    out_h = sum_j p_hj k_j[:512]

Roles (384 threads):
  attend   warps 0..3: Q to shared memory, S = Q K^T, softmax, O += P V, lse, out (sm120/attend.py)
  load     warps 4..7 and 8..11, for the first and the second stage of each tile: indices, bytes of 8 keys to registers, value x scale,
           rounded once, to shared memory

A CTA has 16 heads of a query token; CTAs of other heads of the same token find the keys in L2. A stage is 32 keys, half a tile of the plan.

Pipelines (producer -> consumer; arrivals per phase):
  k_ready[2]   load -> attend   4: keys of a stage, and which of them exist, are written
  k_free[2]    attend -> load   4: a stage has been multiplied

The trick: codes become 16 bits on their way through registers, so that products read rows of shared memory as they lie, K by rows and V
by columns of the same bytes; the bytes of a stage are asked for before the wait for its place, and two stages are under way at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint8, cute

from ...spec.arch import Arch
from ...spec.cache_format import CacheFormat
from ...spec.mla import D_V, ELEMENT_BYTES
from ...spec.sparse_decode import SparseDecodeConfig
from ...spec.split_plan import TILE_KEYS
from ..attention.kernel import ELEMENT_TYPES
from ..attention.scheduler import KeyTile
from ..attention.softmax import SinkScale
from ..definition import KernelDefinition
from ..primitives.arithmetic import as_float, e4m3_of_e2m1, e8m0_scale, from_lane, pack_pair
from ..primitives.copies import CHUNK
from ..primitives.pipeline import PipelineState
from ..primitives.rows import exact, load_if, registers
from ..primitives.smem import Array, SmemLayout
from ..sm120 import keys_on_m
from ..sm120.attend import CHUNK_WORDS, Sm120AttendRole, chunk_at
from ..sm120.cta import (
    COPY_ARRIVALS,
    KEYS,
    KEYS_ON_M_CONVERTING,
    STAGES,
    WARP_KEYS,
    WARPS,
    Sm120Kernel,
    Sm120Parts,
    Sm120Smem,
    Sm120Thread,
    pitch_of,
    products_of_stage,
)
from ..sm120.roles import Sm120BitMask, Sm120Mask
from ..sm120.rows import Sm120Columns, load_chunk, next_tile, rows_of
from .abi import SparseDecodeAbi
from .operands import SparseDecodeIndices, SparseDecodeOperands, look_up, slot_address
from .sm120_rows64 import SparseDecodeSm120CopyRole, mixed_scale


class Sm120Slot(NamedTuple):
    """A slot of a cache: addresses of its row and of its scales, 0 for one that does not exist; whether it is one of the second cache."""

    row: Int64
    scales: Int64
    in_extra: Int32


class SparseDecodeSm120LoadRole:
    """Four warps a stage, each with 8 keys of it."""

    def __init__(self, config: SparseDecodeConfig, dtype: type[cutlass.Numeric]) -> None:
        self.config = config
        self.format: CacheFormat = config.format
        self.dtype = dtype
        self.pitch = pitch_of(self.format.d_qk)
        wide = self.format.d_qk - self.format.quantised
        self.wide = Sm120Columns(self.format.wide_offset, self.format.quantised * ELEMENT_BYTES, wide, self.pitch)

    @cute.jit
    def run(self, operands: SparseDecodeOperands, smem: Sm120Smem):
        """Wait k_free. Signal k_ready."""
        schedule, thread = operands.schedule, Sm120Thread.create()
        state = PipelineState(thread.stage, Int32(0))
        req, begin_tile = schedule.first_work_tile()
        last = schedule.last_request()
        while req <= last:
            tile_range = schedule.tile_range(req, begin_tile)
            work_tile = schedule.work_tile_of(tile_range, req, begin_tile)
            indices = SparseDecodeIndices.create(operands, req)
            position = begin_tile * TILE_KEYS + thread.key
            index = look_up(indices, position)
            for _ in cutlass.range(tile_range.tiles, unroll=1):
                in_extra = indices.in_extra(position)
                row, scales = slot_address(operands, self.config, index, in_extra)
                slot = Sm120Slot(row, scales, cutlass.select_(in_extra, Int32(1), Int32(0)))
                position = position + TILE_KEYS
                index = look_up(indices, position)
                self.load_stage(smem, thread, slot, state)
                state = next_tile(state)
            req, begin_tile = work_tile.next_req, work_tile.next_tile
        cute.arch.griddepcontrol_launch_dependents()

    def load_stage(self, smem: Sm120Smem, thread: Sm120Thread, slot: Sm120Slot, state: PipelineState) -> None:
        """Bring the warp's keys of a stage. slot: of key lane % 8."""
        row, rows = slot.row, rows_of(slot.row)
        codes, factors, narrow = [], [], [None] * WARP_KEYS
        if self.format.quantised:
            lane_column = thread.lane * CHUNK
            coded = lane_column < self.format.quantised
            group = lane_column // self.format.group
            if self.config.mixes_formats:
                in_extra = cute.arch.vote_ballot_sync(slot.in_extra != 0)
                narrow = [in_extra & (1 << key) != 0 for key in range(WARP_KEYS)]
            for key in range(WARP_KEYS):
                column, scale = lane_column, group
                if self.config.mixes_formats:  # two lanes load the same 16 bytes of e2m1 values, and use a half each
                    column = cutlass.select_(narrow[key], thread.lane // 2 * CHUNK, column)
                    scale = cutlass.select_(narrow[key], thread.lane, scale)
                codes.append(load_chunk(rows[key] + column, (rows[key] != 0) & coded))
                factors.append(self.load_scale(from_lane(slot.scales, Int32(key)), scale, (rows[key] != 0) & coded))
        wide = self.wide.load(thread, row, rows)
        smem.k_free.producer_acquire(state)
        place = smem.sK.toint() + (state.stage * KEYS + thread.warp * WARP_KEYS) * self.pitch
        if self.format.quantised:
            for key in range(WARP_KEYS):
                words, factor = codes[key], self.scale_of(factors[key], narrow[key])
                if self.config.mixes_formats:
                    words = e4m3_codes(words, narrow[key], thread.lane)
                self.store_codes(place + key * self.pitch + 2 * lane_column, words, factor, coded)
        self.wide.store(thread, place, wide)
        store_if(thread.lane < WARP_KEYS, smem.sPresent + (state.stage * KEYS + thread.warp * WARP_KEYS + thread.lane), row)
        smem.k_ready.producer_commit(state)

    def load_scale(self, scales: Int64, group: Int32, wanted: Boolean) -> Int32:
        """Start the load of the scale of a group of columns: bits of fp32, or a code of 8 bits. 0, and no access, unless wanted."""
        if self.format.scale != "fp32":
            return load_byte_if(wanted, scales + group)
        bits = registers(1)
        bits.fill(0)
        load_if(wanted, bits, scales + group * 4)
        return bits[0]

    def scale_of(self, loaded: Int32, narrow: Boolean | None) -> Float32:
        """Return the scale that load_scale has brought. narrow: whether it is one of e4m3, for e2m1 values in e4m3."""
        if self.format.scale == "fp32":
            return as_float(loaded)
        if narrow is None:
            return e8m0_scale(loaded)
        return mixed_scale(loaded, narrow)

    @cute.jit
    def store_codes(self, target: Int32, words: cute.Tensor, scale: Float32, coded: Boolean):
        """Store 16 columns of a key: value x scale, rounded once."""
        values = [value * scale for value in exact(words, cutlass.Float8E4M3FN)]
        if coded:
            for half in cutlass.range_constexpr(2):
                packed = registers(CHUNK_WORDS)
                for i in cutlass.range_constexpr(CHUNK_WORDS):
                    packed[i] = pack_pair(values[8 * half + 2 * i], values[8 * half + 2 * i + 1], self.dtype)
                cute.autovec_copy(packed, chunk_at(target + half * CHUNK))


def e4m3_codes(words: cute.Tensor, narrow: Boolean, lane: Int32) -> cute.Tensor:
    """Return e4m3 values of a lane's 16 columns. narrow: words hold e2m1 values of 32 columns, the lane's in a half."""
    codes = registers(CHUNK_WORDS)
    for half in range(2):
        wide = e4m3_of_e2m1(cutlass.select_(lane % 2 != 0, words[2 + half], words[half]))
        for i in range(2):
            codes[2 * half + i] = cutlass.select_(narrow, wide[i], words[2 * half + i])
    return codes


def load_byte_if(wanted: Boolean, address: Int64) -> Int32:
    """Start the load of a byte; 0, and no access, unless wanted."""
    return cute.arch.inline_ptx(
        "{ .reg .pred wanted; setp.ne.b32 wanted, {$r1}, 0; mov.b32 {$w0}, 0; @wanted ld.global.b8 {$w0}, [{$r0}]; }",
        write_only_types=[Int32],
        read_only_args=[address, Int32(wanted)],
    )


@cute.jit
def store_if(wanted: Boolean, place: cute.Pointer, row: Int64):
    """Store whether a key exists, if wanted."""
    if wanted:
        place.store(cutlass.select_(row != 0, Int32(1), Int32(0)))


class SparseDecodeSm120Mask(Sm120Mask):
    """Mask of slots that do not exist."""

    @cute.jit
    def apply(self, operands: Any, smem: Sm120Smem, thread: Sm120Thread, scores: cute.Tensor, stage: Int32, keys: KeyTile):
        """Set the scores of keys that do not exist to -inf."""
        present = smem.sPresent + (stage * KEYS + thread.warp * WARP_KEYS + thread.column)
        for i in cutlass.range_constexpr(cute.size(scores)):
            scores[i] = cutlass.select_((present + i % 2).load() != 0, scores[i], -Float32.inf)


@dataclass(frozen=True)
class SparseDecodeSm120(Sm120Parts):
    """One variant of the kernel for up to 16 heads."""

    config: SparseDecodeConfig

    @property
    def dtype(self) -> type[cutlass.Numeric]:
        """Return the element type of out and of products' operands."""
        return ELEMENT_TYPES[self.config.dtype]

    @property
    def d_qk(self) -> int:
        """Return the columns of a key."""
        return self.config.format.d_qk

    @property
    def layout(self) -> SmemLayout:
        """Return the fields of shared memory."""
        return Sm120Smem.layout(self.dtype, self.d_qk, Array("sPresent", Int32, STAGES * KEYS, 16))

    @property
    def expected(self) -> int:
        """Return the products in the code."""
        return products_of_stage(self.d_qk, D_V)

    def load(self, operands: SparseDecodeOperands, smem: Sm120Smem) -> None:
        """Run the role that brings keys."""
        SparseDecodeSm120LoadRole(self.config, self.dtype).run(operands, smem)

    def attend(self, operands: SparseDecodeOperands, smem: Sm120Smem) -> None:
        """Run the role that multiplies."""
        Sm120AttendRole(SparseDecodeSm120Mask(), SinkScale(), self.dtype, self.d_qk, D_V, plan_first=True).run(operands, smem)


@dataclass(frozen=True)
class SparseDecodeSm120Rows64(SparseDecodeSm120):
    """One variant of the kernel for more heads."""

    form = KEYS_ON_M_CONVERTING

    @property
    def role(self) -> SparseDecodeSm120CopyRole:
        """Return the role that brings keys."""
        return SparseDecodeSm120CopyRole(self.config, self.dtype)

    @property
    def producers(self) -> int:
        """Return the arrivals that hand over a stage."""
        return WARPS if self.config.format.quantised else COPY_ARRIVALS

    @property
    def layout(self) -> SmemLayout:
        """Return the fields of shared memory."""
        scales = (Array("sScales", Uint8, KEYS * self.role.scale_bytes, 16),) if self.config.format.quantised else ()
        return Sm120Smem.layout(self.dtype, self.d_qk, Array("sPresent", Int32, STAGES), *scales, form=self.form)

    @property
    def expected(self) -> int:
        """Return the products in the code."""
        return keys_on_m.products_of_stage(self.d_qk, D_V)

    def load(self, operands: SparseDecodeOperands, smem: Sm120Smem) -> None:
        """Run the role that brings keys."""
        self.role.run(operands, smem)

    def attend(self, operands: SparseDecodeOperands, smem: Sm120Smem) -> None:
        """Run the role that multiplies."""
        role = keys_on_m.Sm120KeysOnMRole
        role(Sm120BitMask(role), SinkScale(), self.dtype, self.d_qk, D_V, plan_first=True).run(operands, smem)


def build(config: SparseDecodeConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    parts = SparseDecodeSm120Rows64 if config.rows64 else SparseDecodeSm120
    return Sm120Kernel(SparseDecodeAbi(config, 1), arch, parts(config)).complete()

"""Dense MLA decode on RTX boards and DGX Spark, over a cache with one KV head: of 16 bits, or of e4m3, which becomes bf16.

So do e4m3 queries: what bounds the kernel is memory, or L2, and not its products.

For every request and every query row r = (query token i, head), over the keys j that the row sees:

    s_rj = <q_r, k_j> over 576 columns     p = softmax(scale * s)     out_r = sum_j p_rj k_j[:512]

Roles (384 threads):
  attend   warps 0..3: Q to shared memory, S = Q K^T, mask, softmax, O += P V, lse, out (sm120/attend.py)
  load     warps 4..7 and 8..11, for the first and the second stage of each tile: pages, 8 keys to registers, from there to shared memory
           (sm120/rows.py); e4m3 exactly as bf16, since its scale is a factor of the scores and of the output

A CTA has 16 query rows; CTAs of other rows find the keys in L2. A stage is 32 keys, half a tile of the plan.

Pipelines (producer -> consumer; arrivals per phase):
  k_ready[2]   load -> attend   4: keys of a stage are written, those that no query token sees as zeros
  k_free[2]    attend -> load   4: a stage has been multiplied

The trick: a page has 16 keys or a multiple, so that a warp's 8 keys share one, which all its lanes look up a tile ahead; the bytes of a
stage are asked for before the wait for its place, and two stages are under way at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from ...spec.arch import Arch
from ...spec.dense_decode import FP8, LATENT, DenseDecodeConfig
from ...spec.mla import D_LATENT, ELEMENT_BYTES
from ...spec.split_plan import TILE_KEYS
from ..attention.kernel import ELEMENT_TYPES
from ..attention.lengths import tiles_of
from ..attention.scheduler import KeyTile, TileRange
from ..definition import KernelDefinition
from ..primitives.arithmetic import from_lane, registers, widen
from ..primitives.copies import CHUNK
from ..primitives.pipeline import PipelineState
from ..primitives.smem import SmemLayout
from ..primitives.warp_products import M, N
from ..sm120.attend import CHUNK_WORDS, Sm120AttendRole, chunk_at
from ..sm120.cta import (
    KEYS,
    WARP_KEYS,
    Sm120Kernel,
    Sm120Parts,
    Sm120Smem,
    Sm120Thread,
    first_query_row,
    pitch_of,
    products_of_stage,
)
from ..sm120.roles import HALVES, Sm120Mask
from ..sm120.rows import Sm120Columns, load_chunk, next_tile, rows_of
from .abi import DenseDecodeAbi
from .operands import NO_PAGE, DenseDecodeOperands, DenseDecodeRowScale
from .visible_keys import visible_word

TAIL_CHUNKS = 4  # of 64 e4m3 columns: a warp has those of its 8 keys at once


class DenseDecodeSm120LoadRole:
    """Four warps a stage, each with 8 keys of it."""

    def __init__(self, config: DenseDecodeConfig) -> None:
        self.pitch = pitch_of(config.d_qk)
        wide = Sm120Columns(0, 0, config.d_qk, self.pitch)
        self.columns = wide if config.operands == LATENT else DenseDecodeSm120Codes(self.pitch, ELEMENT_TYPES[config.dtype])

    @cute.jit
    def run(self, operands: DenseDecodeOperands, smem: Sm120Smem):
        """Wait k_free. Signal k_ready."""
        schedule, thread = operands.schedule, Sm120Thread.create()
        state = PipelineState(thread.stage, Int32(0))
        req, begin_tile = schedule.first_work_tile()
        last = schedule.last_request()
        while req <= last:
            tile_range = schedule.tile_range(req, begin_tile)
            work_tile = schedule.work_tile_of(tile_range, req, begin_tile)
            _, skipped = schedule.lengths.keys_and_skipped(req)
            page, row = self.look_up(operands, tile_range, skipped, thread.key)
            for i in cutlass.range(tile_range.tiles, unroll=1):
                address = operands.cache_address(page, row, Int32(0))
                page, row = self.look_up(operands, tile_range, skipped, (i + 1) * TILE_KEYS + thread.key)
                self.load_stage(smem, thread, address, state)
                state = next_tile(state)
            req, begin_tile = work_tile.next_req, work_tile.next_tile
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def look_up(self, operands: DenseDecodeOperands, tile_range: TileRange, skipped: Int32, index: Int32) -> tuple[Int32, Int32]:
        """Return (page, row in it) of a key of a work tile; NO_PAGE for one that no query token sees, whose entry is not read.

        skipped: tiles of the request between those with keys that every token sees and those of its windows.
        """
        tile = tile_range.begin + index // TILE_KEYS
        unseen_begin, unseen_end = operands.unseen_keys(tile_range.tile(Int32(0)))
        tile = tile + cutlass.select_(tile < tiles_of(operands.args.sink_keys), Int32(0), skipped)
        entry, row = operands.page_entry(tile * TILE_KEYS + index % TILE_KEYS)
        page = Int32(NO_PAGE)
        if (index < tile_range.keys) & ((index < unseen_begin) | (index >= unseen_end)):
            page = (operands.table_row(tile_range.req) + entry).load()
        return page, row

    def load_stage(self, smem: Sm120Smem, thread: Sm120Thread, row: Int64, state: PipelineState) -> None:
        """Bring the warp's keys of a stage. row: address of key lane % 8, 0 for a key of zeros."""
        loaded = self.columns.load(thread, row, rows_of(row))
        smem.k_free.producer_acquire(state)
        self.columns.store(thread, smem.sK.toint() + (state.stage * KEYS + thread.warp * WARP_KEYS) * self.pitch, loaded)
        smem.k_ready.producer_commit(state)


@dataclass(frozen=True)
class DenseDecodeSm120Codes:
    """The 576 e4m3 columns of a key: 32 chunks of 16 bytes, and 4. pitch: as in Sm120Columns. dtype: what e4m3 becomes."""

    pitch: int
    dtype: type[cutlass.Numeric]

    def load(self, thread: Sm120Thread, row: Int64, rows: list[Int64]) -> tuple[list[Any], Any]:
        """Ask for the columns of the warp's keys, as Sm120Columns does."""
        codes = [load_chunk(key + thread.lane * CHUNK, key != 0) for key in rows]
        mine = from_lane(row, thread.lane // TAIL_CHUNKS)
        return codes, load_chunk(mine + (D_LATENT + thread.lane % TAIL_CHUNKS * CHUNK), mine != 0)

    def store(self, thread: Sm120Thread, place: Int32, loaded: tuple[list[Any], Any]) -> None:
        """Write what `load` returned. place: the row of the warp's first key in shared memory."""
        codes, tail = loaded
        for key, words in enumerate(codes):
            self.store_chunk(place + key * self.pitch + thread.lane * (CHUNK * ELEMENT_BYTES), words)
        column = D_LATENT + thread.lane % TAIL_CHUNKS * CHUNK
        self.store_chunk(place + thread.lane // TAIL_CHUNKS * self.pitch + column * ELEMENT_BYTES, tail)

    def store_chunk(self, target: Int32, words: cute.Tensor) -> None:
        """Convert and write 16 columns of a key."""
        wide = widen(words, self.dtype)
        for half in range(ELEMENT_BYTES):
            part = registers(CHUNK_WORDS)
            for i in range(CHUNK_WORDS):
                part[i] = wide[half * CHUNK_WORDS + i]
            cute.autovec_copy(part, chunk_at(target + half * CHUNK))


class DenseDecodeSm120Fp8AttendRole(Sm120AttendRole):
    """The role over e4m3 queries, which become the products' type in shared memory, exactly."""

    query_bytes = 1

    @cute.jit
    def store_chunk_if(self, wanted: Boolean, target: Int32, words: cute.Tensor):
        """Convert and write 16 columns of a row, if wanted."""
        if wanted:
            DenseDecodeSm120Codes(self.pitch, self.dtype).store_chunk(target, words)


class DenseDecodeSm120Mask(Sm120Mask):
    """Mask of keys past the end, and of those that causal, tree_mask or a window hide."""

    @cute.jit
    def apply(self, operands: DenseDecodeOperands, smem: Any, thread: Sm120Thread, scores: cute.Tensor, stage: Int32, keys: KeyTile):
        """Set the scores of keys that a row does not see to -inf."""
        if operands.hides_keys(keys):
            for half in cutlass.range_constexpr(HALVES):
                token, _ = operands.token_and_head(first_query_row() + thread.row + half * N)
                seen = visible_word(operands, keys, token, 0) >> (thread.warp * WARP_KEYS + thread.column)
                for i in cutlass.range_constexpr(2):
                    scores[2 * half + i] = cutlass.select_((seen >> i) & 1 != 0, scores[2 * half + i], -Float32.inf)


@dataclass(frozen=True)
class DenseDecodeSm120(Sm120Parts):
    """One variant of the kernel."""

    config: DenseDecodeConfig

    @property
    def dtype(self) -> type[cutlass.Numeric]:
        """Return the element type of out, and of products' operands."""
        return ELEMENT_TYPES[self.config.dtype]

    @property
    def layout(self) -> SmemLayout:
        """Return the fields of shared memory."""
        return Sm120Smem.layout(self.dtype, self.config.d_qk)

    @property
    def expected(self) -> int:
        """Return the products in the code."""
        return products_of_stage(self.config.d_qk, self.config.dims.latent)

    def load(self, operands: DenseDecodeOperands, smem: Sm120Smem) -> None:
        """Run the role that brings keys."""
        DenseDecodeSm120LoadRole(self.config).run(operands, smem)

    def attend(self, operands: DenseDecodeOperands, smem: Sm120Smem) -> None:
        """Run the role that multiplies."""
        scale, columns = DenseDecodeRowScale(self.config.operands, rounds_probs=False), self.config.dims
        role = DenseDecodeSm120Fp8AttendRole if self.config.operands == FP8 else Sm120AttendRole
        role(DenseDecodeSm120Mask(), scale, self.dtype, columns.d_qk, columns.latent).run(operands, smem)


def build(config: DenseDecodeConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    return Sm120Kernel(DenseDecodeAbi(config, M), arch, DenseDecodeSm120(config)).complete()

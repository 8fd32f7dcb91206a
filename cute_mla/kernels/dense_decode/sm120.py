"""Dense MLA decode on RTX boards and DGX Spark, over a cache with one KV head: of 16 bits, or of e4m3, which becomes bf16.

So do e4m3 queries: what bounds the kernel is memory, or L2, and not its products.

For every request and every query row r = (query token i, head), over the keys j that the row sees:

    s_rj = <q_r, k_j> over 576 columns     p = softmax(scale * s)     out_r = sum_j p_rj k_j[:512]

Up to 16 rows. For more see sm120_rows64.py. Roles (384 threads):
  attend   warps 0..3: Q to shared memory, S = Q K^T, mask, softmax, O += P V, lse, out (sm120/attend.py)
  load     warps 4..7 and 8..11, for the first and the second stage of each tile: pages, 8 keys to registers, from there to shared memory
           (sm120/rows.py); e4m3 exactly as bf16, since its scale is a factor of the scores and of the output

A stage is 32 keys, half a tile of the plan. In batch-invariant calls CTAs of other rows find the keys in L2.

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
from ...spec.mla import D_LATENT, D_QK, ELEMENT_BYTES
from ...spec.split_plan import TILE_KEYS
from ..attention.kernel import ELEMENT_TYPES
from ..attention.scheduler import KeyTile
from ..definition import KernelDefinition
from ..primitives.arithmetic import registers, widen
from ..primitives.copies import CHUNK
from ..primitives.pipeline import PipelineState
from ..primitives.smem import SmemLayout
from ..primitives.warp_products import M
from ..sm120 import keys_on_m
from ..sm120.attend import CHUNK_WORDS, Sm120AttendRole, chunk_at
from ..sm120.cta import (
    KEYS,
    KEYS_ON_M_CONVERTING,
    LANES,
    WARP_KEYS,
    WARPS,
    Sm120Kernel,
    Sm120Parts,
    Sm120Smem,
    Sm120Thread,
    pitch_of,
    products_of_stage,
)
from ..sm120.roles import Sm120Mask
from ..sm120.rows import Sm120Columns, next_tile, rows_of
from .abi import DenseDecodeAbi
from .operands import DenseDecodeOperands, DenseDecodeRowScale
from .page_walk import look_up_key
from .sm120_rows64 import DenseDecodeSm120CopyRole, DenseDecodeSm120Fp8KeysOnMRole
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
            page, row = look_up_key(operands, tile_range, skipped, thread.key)
            for i in cutlass.range(tile_range.tiles, unroll=1):
                address = operands.cache_address(page, row, Int32(0))
                page, row = look_up_key(operands, tile_range, skipped, (i + 1) * TILE_KEYS + thread.key)
                self.load_stage(smem, thread, address, state)
                state = next_tile(state)
            req, begin_tile = work_tile.next_req, work_tile.next_tile
        cute.arch.griddepcontrol_launch_dependents()

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

    def load(self, thread: Sm120Thread, row: Int64, rows: list[Int64]) -> tuple[list[Any], list[Any]]:
        """Ask for the columns of the warp's keys, as Sm120Columns does."""
        return Sm120Columns(0, 0, D_QK // ELEMENT_BYTES, self.pitch).load(thread, row, rows)

    def store(self, thread: Sm120Thread, place: Int32, loaded: tuple[list[Any], list[Any]]) -> None:
        """Write what `load` returned. place: the row of the warp's first key in shared memory."""
        codes, (tail,) = loaded
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


@dataclass(frozen=True)
class DenseDecodeSm120Mask(Sm120Mask):
    """Mask of keys past the end, and of those that causal, tree_mask or a window hide. attend: the role."""

    attend: Any

    @cute.jit
    def apply(self, operands: DenseDecodeOperands, smem: Any, thread: Sm120Thread, scores: cute.Tensor, stage: Int32, keys: KeyTile):
        """Set the scores of keys that a row does not see to -inf."""
        if operands.hides_keys(keys):
            for which, mine in enumerate(self.attend.by_row(list(range(cute.size(scores))))):
                token, _ = operands.token_and_head(self.attend.query_row(operands, thread, which))
                seen = visible_word(operands, keys, token, 0) >> self.attend.first_key(thread)
                for i in mine:
                    bit = (seen >> self.attend.key_behind_first(i)) & 1
                    scores[i] = cutlass.select_(bit != 0, scores[i], -Float32.inf)


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
        role(DenseDecodeSm120Mask(role), scale, self.dtype, columns.d_qk, columns.latent).run(operands, smem)


@dataclass(frozen=True)
class DenseDecodeSm120Rows64(DenseDecodeSm120):
    """One variant of the kernel for more rows."""

    form = KEYS_ON_M_CONVERTING

    @property
    def producers(self) -> int:
        """Return the arrivals that hand over a stage."""
        return WARPS * LANES if self.config.operands == LATENT else WARPS

    @property
    def layout(self) -> SmemLayout:
        """Return the fields of shared memory."""
        return Sm120Smem.layout(self.dtype, self.config.d_qk, form=self.form)

    @property
    def expected(self) -> int:
        """Return the products in the code."""
        return keys_on_m.products_of_stage(self.config.d_qk, self.config.dims.latent)

    def load(self, operands: DenseDecodeOperands, smem: Sm120Smem) -> None:
        """Run the role that brings keys."""
        DenseDecodeSm120CopyRole(self.config.operands, self.config.d_qk, self.dtype).run(operands, smem)

    def attend(self, operands: DenseDecodeOperands, smem: Sm120Smem) -> None:
        """Run the role that multiplies."""
        scale, columns = DenseDecodeRowScale(self.config.operands, rounds_probs=False), self.config.dims
        role = DenseDecodeSm120Fp8KeysOnMRole if self.config.operands == FP8 else keys_on_m.Sm120KeysOnMRole
        role(DenseDecodeSm120Mask(role), scale, self.dtype, columns.d_qk, columns.latent, plan_first=True).run(operands, smem)


def build(config: DenseDecodeConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    if config.rows64:
        return Sm120Kernel(DenseDecodeAbi(config), arch, DenseDecodeSm120Rows64(config)).complete()
    return Sm120Kernel(DenseDecodeAbi(config, M), arch, DenseDecodeSm120(config)).complete()

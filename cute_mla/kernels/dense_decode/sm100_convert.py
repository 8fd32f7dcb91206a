"""Dense MLA decode on Blackwell over an e4m3 cache, multiplied as 16-bit elements.

The kernel of sm100.py with another role in front: four warps of each CTA copy its half of the columns of every key, page by page,
to where the TMA would, and convert them there to 16-bit columns two tiles later. Every e4m3 number is one of either 16-bit type, so
nothing is rounded; the scale of the cache goes into those of the scores and of the output. Roles and pipelines:
../sm100/row_producer.py, whose gather role is called convert here; the other roles are the 16-bit kernel's.

Of a key behind the end of the request, or in a page that the cache does not have, nothing is read, and its row is zeros: nothing is
left to clear.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Uint32, cute

from ...spec.arch import Arch
from ...spec.dense_decode import FP8_CACHE, DenseDecodeConfig
from ...spec.mla import D_LATENT
from ..attention.kernel import AttentionKernel
from ..definition import KernelDefinition
from ..primitives.arithmetic import widen_in_pairs
from ..sm100.config import CTA_ROPE, EVEN_CTA, SIXTEEN_BIT, TMEM_COLUMNS, Pipes, Tiles
from ..sm100.mma import MmaRole, PairGemm
from ..sm100.output import OutputRole
from ..sm100.pair import begin, end, initialise
from ..sm100.row_conversion import ConvertedTile, E4m3Columns, latent_e4m3_columns
from ..sm100.row_copy import CHUNK, LaneKeys
from ..sm100.row_producer import (
    KV_ARRIVALS,
    MMA_REGISTERS,
    MMA_WARP,
    OUTPUT_REGISTERS,
    OUTPUT_WARP,
    PRODUCER_REGISTERS,
    PRODUCER_WARP,
    SCORE_REGISTERS,
    THREADS,
    RowProducer,
    first_lane_key,
    role_table,
)
from ..sm100.score import NAMED_BARRIERS, QueryLoader, ScoreRole
from .abi import DenseDecodeAbi
from .operands import NO_PAGE, DescaledRows, Operands
from .sm100_mask import KeyMask

ROPE_LANES = CTA_ROPE // CHUNK  # that fetch the RoPE columns of one key: all keys of a warp at once


@dataclass(frozen=True)
class WidenedColumns:
    """e4m3 columns, which become the same numbers in 16 bits."""

    columns: E4m3Columns
    dtype: type[cutlass.Numeric]

    @property
    def passes(self) -> int:
        """Return the copies of a lane and tile."""
        return self.columns.passes

    def copy(self, step: int, rows: cute.Pointer, keys: LaneKeys) -> None:
        """Start a copy of one pass; zeros for keys that are not there."""
        self.columns.copy(step, rows, keys)

    def load(self, step: int, rows: cute.Pointer) -> cute.Tensor:
        """Return the bytes that this lane has copied in one pass."""
        return self.columns.load(step, rows)

    def store(self, step: int, rows: cute.Pointer, chunk: cute.Tensor) -> None:
        """Convert one pass and write it to the warp's rows of a stage."""
        self.columns.write(step, rows, widen_in_pairs(chunk, self.dtype))


def rope_e4m3_columns(rank: Int32) -> E4m3Columns:
    """Return the mover of a CTA's half of the RoPE columns, in the box behind the values.

    A key's columns fill half of its row there, so the eight lanes that store together have keys that differ in the bits 0 and 2 of
    their numbers.
    """
    lane = cute.arch.lane_idx()
    key, chunk = lane // ROPE_LANES, lane % ROPE_LANES
    shuffled = key % 2 | key // 2 % 2 << 2 | key // 4 % 2 << 1 | key // 8 << 3
    source = D_LATENT + rank * CTA_ROPE + chunk * CHUNK
    return E4m3Columns(source, None, 1, shuffled, 0, Int32(SIXTEEN_BIT.latent_boxes), chunk)


@dataclass(frozen=True)
class RequestKeys:
    """The keys of one request. table: its row of the block table. count: how many there are."""

    table: cute.Pointer
    page_size: Int32
    count: Int32


@cute.jit
def page_and_row(keys: RequestKeys, position: Int32) -> tuple[Int32, Int32]:
    """Return the page of a key, and its row there; NO_PAGE for a key behind the last one, whose entry is never read."""
    page, row = Int32(NO_PAGE), Int32(0)
    if position < keys.count:
        entry = Int32(Uint32(position) // Uint32(keys.page_size))
        page, row = (keys.table + entry).load(), position - entry * keys.page_size
    return page, row


class DenseDecodeSm100Fp8Cache(AttentionKernel):
    """One variant of the kernel of an e4m3 cache and 16-bit queries."""

    threads = THREADS

    def __init__(self, config: DenseDecodeConfig, arch: Arch) -> None:
        super().__init__(DenseDecodeAbi(config), arch)
        self.smem = SIXTEEN_BIT.smem()

    @cute.jit
    def run(self, operands: Operands):
        """Allocate, initialise the barriers, and give each role its warps."""
        memory = self.smem.allocate()
        tiles, pipes = Tiles.create(SIXTEEN_BIT, memory), Pipes.create(memory)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == PRODUCER_WARP:
            with cute.arch.elect_one():
                initialise(pipes, SIXTEEN_BIT, KV_ARRIVALS)
        tmem = begin(tiles, warp, MMA_WARP)
        if warp < OUTPUT_WARP:
            cute.arch.setmaxregister_increase(SCORE_REGISTERS)
            queries = QueryLoader(SIXTEEN_BIT, has_rope=True)
            mask, row_scale = KeyMask(clears_unused=False), DescaledRows(FP8_CACHE)
            ScoreRole(SIXTEEN_BIT, self.dtype, mask, row_scale, queries).run(operands.with_descales(FP8_CACHE), tiles, pipes, tmem)
        elif warp < PRODUCER_WARP:
            cute.arch.setmaxregister_increase(OUTPUT_REGISTERS)
            OutputRole(SIXTEEN_BIT, self.dtype).run(operands, tiles, pipes, tmem)
        elif warp < MMA_WARP:
            cute.arch.setmaxregister_increase(PRODUCER_REGISTERS)
            RowProducer(self.columns, PagedKeys()).run(operands, tiles, pipes, warp - PRODUCER_WARP)
        else:
            cute.arch.setmaxregister_decrease(MMA_REGISTERS)
            if warp == MMA_WARP and cute.arch.block_idx_in_cluster() == EVEN_CTA:
                gemm = PairGemm(self.dtype, True, tiles, tmem)
                MmaRole(SIXTEEN_BIT).run(operands.schedule, pipes, gemm)
        end(warp, MMA_WARP, tmem)

    def columns(self, rank: Int32) -> ConvertedTile:
        """Return the mover of the latent and the RoPE columns of a CTA."""
        return ConvertedTile(tuple(WidenedColumns(run(rank), self.dtype) for run in (latent_e4m3_columns, rope_e4m3_columns)))


class PagedKeys:
    """The keys of a request, page by page."""

    def key_list(self, operands: Operands, req: Int32) -> RequestKeys:
        """Return the keys of a request."""
        return RequestKeys(operands.table_row(req), operands.args.page_size, operands.schedule.lengths.keys(req))

    def first_key(self, begin_tile: Int32, warp: Int32) -> Int32:
        """Return the position of the lane's key, of a work tile's first tile."""
        return first_lane_key(begin_tile, warp)

    def look_up(self, keys: RequestKeys, position: Int32) -> tuple[Int32, Int32]:
        """Return page and row of a key."""
        return page_and_row(keys, position)

    def locate(self, operands: Operands, keys: RequestKeys, found: tuple[Int32, Int32], position: Int32) -> LaneKeys:
        """Return the where a key's row lies."""
        return LaneKeys(operands.e4m3_address(*found, Int32(0)))


def fp8_cache_definition(config: DenseDecodeConfig, arch: Arch) -> KernelDefinition:
    """Return the variant of an e4m3 cache, ready to compile."""
    kernel = DenseDecodeSm100Fp8Cache(config, arch)
    return kernel.definition(
        smem_bytes=kernel.smem.nbytes,
        barriers=kernel.smem.barriers(),
        named_barriers=NAMED_BARRIERS,
        roles=role_table("convert"),
        expected={"UTCHMMA": SIXTEEN_BIT.products_per_tile(has_rope=True)},
        tmem_columns=TMEM_COLUMNS,
    )

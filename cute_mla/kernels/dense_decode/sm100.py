"""Dense MLA decode on Blackwell. sm100_convert.py is the kernel of an e4m3 cache that is converted.

For every request and every query row r = (query token i, head) of one KV head, over the keys j that the row sees:

    s_rj = <q_r, k_j> over 576 columns     p = softmax(scale * s)     out_r = sum_j p_rj k_j[:512]

A pair of CTAs holds 128 query rows, 64 each, and walks the work tiles of one partition, 64 keys (one tile) at a time.
Each CTA holds all keys of the tile but half of their columns: latent columns 256 c .. + 255 and RoPE columns 32 c .. + 31
of CTA c, which are also the value columns that it multiplies.

Roles of a CTA (384 threads):
  score   warps 0..3: Q to tensor memory, softmax, P to shared memory, lse
  output  warps 4..7: rescale of O, epilogue
  load    warp 8: TMA of this CTA's columns, page by page
  mma     warp 9, of the even CTA: S = Q K^T and O += P V for both

Tensor memory: O in 256 columns, Q in 144, S in 64. A lane is a query row; the lanes 0..63 and 64..127 are the same rows.
Shared memory: 5 stages of 64 keys x 256 latent columns and, in a box of its own, the RoPE columns.

Pipelines (producer -> consumer; arrivals per phase). Barriers that the mma role waits for count in the even CTA; what it
commits arrives in both:
  kv_ready[5]      load -> mma             1 and the bytes of five boxes from each CTA
  kv_free[5]       mma -> load, output     1: P V of the tile is done, so O is complete up to it
  query_ready      score -> mma            8: Q of a work tile is in tensor memory
  scores_ready[2]  mma -> score            1: 32 keys of S, lower and upper half of the tile
  scores_free[2]   score -> mma            8: they are in registers
  alpha_ready[2]   score -> output         2: rescale factors; the two warps that have the upper keys send none
  probs_ready[2]   score -> mma            8: P is written, keys past the end are cleared
  output_ready[2]  output -> mma           8: O is scaled, or read out
  stats_ready      score -> output         4: 1 / row sum, once per work tile
  stats_free       output -> score         4

With e4m3 operands all is the same but for what the half of the bytes brings about: 7 stages of two latent boxes, Q in 72
columns of tensor memory, two groups of score warps that take tiles in turn (512 threads, S of two tiles, S two tiles ahead of
P V; ../sm100/alternating.py), 3 stages where the table says 2, and 2 for the scores, each of a whole tile. P is e4m3, too: its reference
follows every tile, and what O is divided by is the sum of P as it was rounded, which the tensor cores add up as P times ones.

The trick: every byte of the cache is fetched once per pair. In a product of 64 rows a CTA, the lower lanes multiply with the
operand of the even CTA and the upper lanes with that of the odd one. With Q in tensor memory the two halves of the lanes can
hold different columns of the same rows, so each CTA contributes its half of the columns of K to every score, and the same
bytes, read transposed, are the half of V that it has to provide. The score role adds the two halves. README.md has the
clocks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import cutlass
from cutlass import Int32, cute

from ...manifest import Role
from ...spec.arch import Arch
from ...spec.dense_decode import FP8, FP8_CACHE, DenseDecodeConfig
from ..attention.kernel import AttentionKernel
from ..definition import KernelDefinition
from ..primitives.copies import pair_box, prefetch_map
from ..sm100.alternating import NAMED_BARRIERS as ALTERNATING_BARRIERS
from ..sm100.alternating import AlternatingPipes, AlternatingRows
from ..sm100.config import (
    BOX_BYTES,
    CTA_ROPE,
    EVEN_CTA,
    GROUP_WARPS,
    PAIR,
    ROW_BYTES,
    SCORE_WARP,
    TMEM_COLUMNS,
    Geometry,
    Pipes,
    Tiles,
)
from ..sm100.mma import MmaRole, PairGemm
from ..sm100.output import OutputRole
from ..sm100.pair import begin, end, initialise
from ..sm100.score import NAMED_BARRIERS, QueryLoader, ScoreRole, ScoreRows
from .abi import DenseDecodeAbi
from .operands import DescaledRows, LaneBox, Operands
from .page_walk import for_each_tile_in_groups
from .sm100_convert import fp8_cache_definition
from .sm100_mask import KeyMask

# registers of a thread, of 512 in four groups of warps; with two groups of score warps, where 512 threads share them out
SCORE_REGISTERS = 136  # two groups
OUTPUT_REGISTERS = 160
OTHER_REGISTERS = 80


class DenseDecodeSm100(AttentionKernel):
    """One variant of the kernel whose products take the operands as they are: 16-bit or e4m3."""

    def __init__(self, config: DenseDecodeConfig, arch: Arch) -> None:
        abi = DenseDecodeAbi(config)
        super().__init__(abi, arch)
        self.kind = config.operands
        self.operand_dtype = abi.query_dtype
        self.geometry = Geometry.of(self.operand_dtype, config.dims.latent)
        self.has_rope = config.dims.rotary > 0
        self.smem = self.geometry.smem()
        self.pipes_type: Any = AlternatingPipes if self.geometry.score_groups > 1 else Pipes
        self.mma_warp = self.geometry.load_warp + 1
        self.threads = 32 * (self.geometry.load_warp + GROUP_WARPS)  # the last two warps idle: the warps of a CTA come in fours

    @cute.jit
    def run(self, operands: Operands):
        """Allocate, initialise the barriers, and give each role its warps."""
        memory, geometry = self.smem.allocate(), self.geometry
        tiles = Tiles.create(geometry, memory)
        pipes = self.pipes_type.create(memory)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == geometry.load_warp:
            with cute.arch.elect_one():
                if cutlass.const_expr(geometry.score_groups > 1):
                    pipes.reference_ready.initialise(GROUP_WARPS)
                initialise(pipes, geometry, kv_arrivals=1)
                prefetch_map(operands.args.kv_map)
        tmem = begin(tiles, warp, self.mma_warp)
        operands = operands.with_descales(self.kind)
        if warp < geometry.output_warp:
            self.set_registers(SCORE_REGISTERS)
            self.score_role().run(operands, tiles, pipes, tmem)
        elif warp < geometry.load_warp:
            self.set_registers(OUTPUT_REGISTERS)
            OutputRole(geometry, self.dtype).run(operands, tiles, pipes, tmem)
        else:
            self.set_registers(OTHER_REGISTERS)
            if warp == geometry.load_warp:
                LoadRole(geometry, self.has_rope).run(operands, tiles, pipes)
            elif warp == self.mma_warp and cute.arch.block_idx_in_cluster() == EVEN_CTA:
                MmaRole(geometry).run(operands.schedule, pipes, PairGemm(self.operand_dtype, self.has_rope, tiles, tmem))
        end(warp, self.mma_warp, tmem)

    def score_role(self) -> ScoreRole:
        """Return the score role: with e4m3 operands, two groups of warps take tiles in turn."""
        queries = QueryLoader(self.geometry, self.has_rope)
        rows = AlternatingRows.create if self.geometry.score_groups > 1 else ScoreRows.create
        return ScoreRole(self.geometry, self.operand_dtype, KeyMask(clears_unused=True), DescaledRows(self.kind), queries, rows)

    def set_registers(self, count: int) -> None:
        """Set the registers of the warps of a role, where 512 threads begin with 128 each."""
        if self.geometry.score_groups > 1:
            (cute.arch.setmaxregister_decrease if count == OTHER_REGISTERS else cute.arch.setmaxregister_increase)(count)


class LoadRole:
    """One warp: TMA of this CTA's columns, page by page."""

    def __init__(self, geometry: Geometry, has_rope: bool) -> None:
        self.geometry = geometry
        self.has_rope = has_rope

    @cute.jit
    def run(self, operands: Operands, tiles: Tiles, pipes: Pipes):
        """Wait kv_free. Signal kv_ready."""
        tiles_done = for_each_tile_in_groups(operands, partial(self.load_tile, operands, tiles, pipes))
        cute.arch.griddepcontrol_launch_dependents()
        # no signal may reach a CTA that is gone
        for i in cutlass.range(self.geometry.kv_stages, unroll=1):
            pipes.kv_free.producer_acquire(tiles_done + i)

    @cute.jit
    def load_tile(self, operands: Operands, tiles: Tiles, pipes: Pipes, box: LaneBox, tile: Int32):
        """Load this CTA's columns of the tile-th tile: of all keys, with zeros where the request has no page."""
        rank = cute.arch.block_idx_in_cluster()
        ready = pipes.kv_ready.barrier(tile)
        pipes.kv_free.producer_acquire(tile)
        if rank == EVEN_CTA and cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(ready, PAIR * self.geometry.loaded_bytes(self.has_rope))
        cute.arch.sync_warp()
        if box.in_tile:
            where = (operands.kv_head(), box.row, box.page)
            target = tiles.stage(pipes.kv_ready.stage(tile)) + box.offset * ROW_BYTES
            columns = self.geometry.box_columns
            for i in cutlass.range_constexpr(self.geometry.latent_boxes):
                pair_box(target + i * BOX_BYTES, operands.args.kv_map, (rank * self.geometry.cta_columns + i * columns, *where), ready)
            # a whole box, although half of it or less is used: its other columns are the peer's, or none
            if cutlass.const_expr(self.has_rope):
                rope = self.geometry.latent + rank * CTA_ROPE
                pair_box(target + self.geometry.probs_offset, operands.args.kv_map, (rope, *where), ready)


def tma_definition(config: DenseDecodeConfig, arch: Arch) -> KernelDefinition:
    """Return the variant whose products take the operands as they are, ready to compile."""
    kernel = DenseDecodeSm100(config, arch)
    geometry = kernel.geometry
    return kernel.definition(
        smem_bytes=kernel.smem.nbytes,
        barriers=kernel.smem.barriers(),
        named_barriers=ALTERNATING_BARRIERS if geometry.score_groups > 1 else NAMED_BARRIERS,
        roles=(
            Role("score", SCORE_WARP, geometry.output_warp),
            Role("output", geometry.output_warp, GROUP_WARPS),
            Role("load", geometry.load_warp, 1),
            Role("mma", kernel.mma_warp, 1),
        ),
        expected={"UTCQMMA" if kernel.kind == FP8 else "UTCHMMA": geometry.products_per_tile(kernel.has_rope)},
        tmem_columns=TMEM_COLUMNS,
    )


def build(config: DenseDecodeConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    return fp8_cache_definition(config, arch) if config.operands == FP8_CACHE else tma_definition(config, arch)

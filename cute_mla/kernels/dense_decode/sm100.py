"""Dense MLA decode on Blackwell. sm100_convert.py has what changes where an e4m3 cache is converted.

For every request and every query row r = (query token i, head) of one KV head, over the keys j that the row sees:

    s_rj = <q_r, k_j> over 576 columns     p = softmax(scale * s)     out_r = sum_j p_rj k_j[:512]

A pair of CTAs holds 128 query rows, 64 each, and walks the pieces of one part of the plan, 64 keys (one tile) at a time.
Each CTA holds all keys of the tile but half of their columns: latent columns 256 c .. + 255 and RoPE columns 32 c .. + 31
of CTA c, which are also the value columns that it multiplies.

Roles of a CTA (384 threads):
  score   warps 0..3: Q to tensor memory, softmax, P to shared memory, lse
  output  warps 4..7: rescale of O, epilogue
  load    warp 8: TMA of this CTA's columns, page by page
  mma     warp 9, of the even CTA: S = Q K^T and O += P V for both

Tensor memory: O in 256 columns, Q in 144, S in 64. A lane is a query row; the lanes 0..63 and 64..127 are the same rows.
Shared memory: a ring of 5 slots of 64 keys x 256 latent columns and, in a box of its own, the RoPE columns.

Pipelines (producer -> consumer; arrivals per phase). Barriers that the mma role waits for count in the even CTA; what it
commits arrives in both:
  kv_ready[5]      load -> mma             1 and the bytes of five boxes from each CTA
  kv_free[5]       mma -> load, output     1: P V of the tile is done, so O is complete up to it
  query_ready      score -> mma            8: Q of a piece is in tensor memory
  scores_ready     mma -> score            1
  scores_free      score -> mma            8: S is in registers
  alpha_ready[2]   score -> output         2: rescale factors; the two warps that have the upper keys send none
  probs_ready[2]   score -> mma            8: P is written, keys past the end are cleared
  output_ready[2]  output -> mma           8: O is scaled, or read out
  stats_ready      score -> output         4: 1 / row sum, once per piece
  stats_free       output -> score         4

With e4m3 operands all is the same but for what the half of the bytes brings about: 7 slots of two latent boxes, Q in 72
columns of tensor memory, two groups of score warps that take tiles in turn (512 threads, S of two tiles, S two tiles ahead of
P V; sm100/alternating.py), rings of 3 where the table says 2 and of 2 for the scores. P is e4m3, too: its reference
follows every tile, and what O is divided by is the sum of P as it was rounded, which the tensor cores add up as P times ones.

The trick: every byte of the cache is fetched once per pair. In a product of 64 rows a CTA, the lower lanes multiply with the
operand of the even CTA and the upper lanes with that of the odd one. With Q in tensor memory the two halves of the lanes can
hold different columns of the same rows, so each CTA contributes its half of the columns of K to every score, and the same
bytes, read transposed, are the half of V that it has to provide. The score role adds the two halves. README.md has the
clocks.
"""

from __future__ import annotations

from enum import IntEnum
from functools import partial

import cutlass
from cutlass import Int32, cute

from ...manifest import Role
from ...spec.arch import Arch
from ...spec.dense_decode import FP8, FP8_CACHE, LATENT, TILE_ROWS, DenseDecodeConfig
from ...spec.mla import D_LATENT
from ...spec.split_plan import TILE_KEYS
from ..definition import KernelDefinition
from ..primitives.pipeline import barrier_table
from ..primitives.tma import pair_box, prefetch_map
from ..sm100.alternating import AlternatingDecode
from ..sm100.boxes import clear_rows
from ..sm100.config import (
    BOX_BYTES,
    CTA_COLUMNS,
    CTA_ROPE,
    GROUP_WARPS,
    PAIR,
    ROW_BYTES,
    SCORE_WARP,
    TMEM_COLUMNS,
    Pipes,
    Tiles,
)
from ..sm100.gemm import PairGemm
from ..sm100.roles import EVEN_CTA
from ..sm100.score_rows import ScoreRows
from .operands import LaneBox, Operands
from .page_walk import load_pieces
from .sm100_convert import ConvertingSm100
from .sm100_rows import DenseRowsSm100


class Share(IntEnum):
    """Registers of a thread, of 512 in four groups of warps, where 512 threads share them out."""

    SCORE = 136  # two groups
    OUTPUT = 160
    OTHERS = 80


class DenseDecodeSm100(DenseRowsSm100):
    """One variant of the kernel."""

    has_rope = True
    kv_arrivals = 1

    def __init__(self, config: DenseDecodeConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        self.mma_warp = self.geometry.load_warp + 1
        self.threads = 32 * (self.geometry.load_warp + GROUP_WARPS)  # the last two warps idle: the warps of a CTA come in fours

    @property
    def operand_dtype(self) -> type[cutlass.Numeric]:
        """Type of Q, K, V and P."""
        return self.query_dtype

    @cute.jit
    def run(self, operands: Operands):
        tiles, pipes = self.carve_smem(cutlass.memory.SmemAllocator())
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        geometry = self.geometry
        if warp == geometry.load_warp:
            with cute.arch.elect_one():
                self.initialise(pipes)
                prefetch_map(operands.kv_map)
        tmem = self.begin(tiles, warp)
        operands = operands.with_descales(self.config.operands)
        if warp < geometry.output_warp:
            self.take_registers(Share.SCORE)
            self.score(operands, tiles, pipes, tmem)
        elif warp < geometry.load_warp:
            self.take_registers(Share.OUTPUT)
            self.output(operands, tiles, pipes, tmem)
        else:
            self.take_registers(Share.OTHERS)
            if warp == geometry.load_warp:
                self.load(operands, tiles, pipes)
            elif warp == self.mma_warp and cute.arch.block_idx_in_cluster() == EVEN_CTA:
                self.multiply(operands.schedule, pipes, PairGemm(self.operand_dtype, self.has_rope, tiles, tmem))
        self.end(warp, tmem)

    def take_registers(self, share: Share) -> None:
        """Gives the warps of a role more or fewer registers than they begin with, where that is needed."""

    # ---- load -------------------------------------------------------------------------------------------------------

    @cute.jit
    def load(self, operands: Operands, tiles: Tiles, pipes: Pipes):
        """Waits kv_free. Signals kv_ready."""
        tiles_done = load_pieces(operands, partial(self.load_tile, operands, tiles, pipes))
        cute.arch.griddepcontrol_launch_dependents()
        # no signal may reach a CTA that is gone
        for i in cutlass.range(self.geometry.kv_slots, unroll=1):
            pipes.kv_free.wait_free(tiles_done + i)

    @cute.jit
    def load_tile(self, operands: Operands, tiles: Tiles, pipes: Pipes, box: LaneBox, tile: Int32):
        """Loads this CTA's columns of the tile-th tile."""
        rank = cute.arch.block_idx_in_cluster()
        ready = pipes.kv_ready.barrier(tile)
        pipes.kv_free.wait_free(tile)
        if rank == EVEN_CTA and cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(ready, PAIR * self.geometry.slot_boxes * box.tile_bytes)
        cute.arch.sync_warp()
        if box.active:
            where = (operands.kv_head(), box.row, box.page)
            target = tiles.slot(pipes.kv_ready.slot(tile)) + box.offset * ROW_BYTES
            columns = self.geometry.box_columns
            for i in cutlass.range_constexpr(self.geometry.latent_boxes):
                pair_box(target + i * BOX_BYTES, operands.kv_map, (rank * CTA_COLUMNS + i * columns, *where), ready)
            # a whole box, although half of it or less is used: its other columns are the peer's, or none
            rope = D_LATENT + rank * CTA_ROPE
            pair_box(target + self.geometry.probs_offset, operands.kv_map, (rope, *where), ready)

    # ---- what no row sees -------------------------------------------------------------------------------------------

    @cute.jit
    def clear_values(self, rows: ScoreRows, slot: Int32, left: Int32):
        """P is 0 past the end, but 0 times a NaN of an unused row is NaN."""
        if left < TILE_KEYS:
            clear_rows(rows.tiles.slot(slot), self.geometry.latent_boxes, left, rows.half * TILE_ROWS + rows.row)

    def variant(self) -> KernelDefinition:
        """Ready to compile."""
        geometry = self.geometry
        return self.source(
            smem_bytes=geometry.smem_used,
            barriers=barrier_table(geometry.barrier_offset, geometry.barriers),
            named_barriers=self.named_barriers,
            roles=(
                Role("score", SCORE_WARP, geometry.output_warp),
                Role("output", geometry.output_warp, GROUP_WARPS),
                Role("load", geometry.load_warp, 1),
                Role("mma", self.mma_warp, 1),
            ),
            expected={"UTCQMMA" if self.config.operands == FP8 else "UTCHMMA": geometry.products_per_tile(has_rope=True)},
            tmem_columns=TMEM_COLUMNS,
        )


class DenseDecodeSm100Fp8(AlternatingDecode, DenseDecodeSm100):
    """The same with e4m3 operands, whose products take half the time: two softmaxes at a time."""

    def take_registers(self, share: Share) -> None:
        """512 threads begin with 128 each."""
        if share is Share.OTHERS:
            cute.arch.setmaxregister_decrease(share.value)
        else:
            cute.arch.setmaxregister_increase(share.value)


KERNELS: dict[str, type[DenseRowsSm100]] = {LATENT: DenseDecodeSm100, FP8_CACHE: ConvertingSm100, FP8: DenseDecodeSm100Fp8}


def build(config: DenseDecodeConfig, arch: Arch) -> KernelDefinition:
    """The variant, ready to compile."""
    return KERNELS[config.operands](config, arch).variant()

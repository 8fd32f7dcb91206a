"""Dense MLA decode on Hopper.

This file is the kernel of a 16-bit cache; sm90_convert.py and sm90_fp8.py are the kernels of an e4m3 one.

For every request and every query row r = (query token i, head) of one KV head, over the keys j that the row sees:

    s_rj = <q_r, k_j> over 576 columns     p = softmax(scale * s)     out_r = sum_j p_rj k_j[:512]

A CTA holds 64 query rows and walks the work tiles of one partition, 64 keys (one tile) at a time.

Roles (512 threads):
  load     warpgroup 0, one warp: TMA of the key tiles, page by page
  score    warpgroup 1: S = Q K^T, softmax, P to shared memory, lse
  output   warpgroups 2, 3: O[:, 0:256] and O[:, 256:512] += P V in registers, rescale, epilogue

Shared memory: 10 stages of 64 keys x 128 latent columns (a tile takes four), 3 stages of 64 keys x 64
RoPE columns, and the last 256 columns of Q. V is the same memory as K, read transposed.

Pipelines (producer -> consumer; arrivals per phase, c = CTAs of the cluster):
  kv_ready[10]    load -> score           1 and the bytes of two boxes
  kv_free[10]     output -> load          4 c: the warps of the side that reads the stage
  rope_ready[3]   load -> score           1 and the bytes of one box
  probs_ready[3]  score -> output         4: P and alpha are written
  right_turn[3]   output -> output        4: the left output group has issued its products of a tile, the right one may
  stats_ready     score -> output         4: 1 / row sum and places of rows are written, once per work tile
  stats_free      output -> score         8

The RoPE columns of a tile come behind its second stage. A RoPE stage has no barrier of its own that tells when it is free, and the
output role does not wait for keys: kv_free of the stages loaded before says that P of the tile three before has been read, and
probs_ready that the score role has waited for the keys.

The trick: the RoPE columns of K are dead once S is known, so P (64 x 64, the same bytes) is written over them. With five of
the nine column tiles of Q in the registers of a warpgroup that accumulates nothing else, that leaves shared memory for 2.5
key tiles, and the roles exchange nothing but P: while the tensor cores multiply P V of one tile, the score warpgroup
computes the softmax of the next. Two stages of a tile take the place of stages of the tile two before, while that is multiplied: the
left output group goes first, so that its two stages come free early, and the last two stages of a tile are its refill. README.md has
the clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import cutlass
from cutlass import Int32, cute

from ...spec.arch import Arch
from ...spec.dense_decode import FP8, FP8_CACHE, LATENT, DenseDecodeConfig
from ...spec.mla import D_LATENT, LATENT_DIMS
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import KeyTile
from ..attention.softmax import OnlineSoftmax
from ..definition import KernelDefinition
from ..primitives.arithmetic import computed_with
from ..primitives.copies import load_box, multicast_box, prefetch_box, prefetch_map
from ..sm90 import column_pair
from ..sm90.column_pair import ColumnPairOutputRole, ColumnPairScoreRole, ColumnPairScores, ColumnPairSmem
from ..sm90.cta import (
    BOX_BYTES,
    BOX_ELEMENTS,
    ROPE,
    ROW_ELEMENTS,
    STAGE_BOXES,
    STAGE_BYTES,
    STAGE_COLUMNS,
    STAGE_ELEMENTS,
    LatentSm90Kernel,
    LatentSm90Parts,
    LatentSm90Queries,
    LatentSm90Smem,
    LatentSm90Stages,
    LatentSm90TileState,
    warpgroup_roles,
)
from ..sm90.few_heads_cta import FewHeadsSm90Kernel
from ..sm90.output import LatentSm90Output, LatentSm90OutputRole
from ..sm90.score import LatentSm90ScoreRole, LatentSm90Scores, mask_absent
from .abi import DenseDecodeAbi
from .operands import DenseDecodeOperands, DenseDecodeRowScale, LaneBox
from .page_walk import for_each_tile, for_each_tile_in_groups
from .sm90_convert import DenseDecodeSm90Fp8Cache
from .sm90_few_heads import DenseDecodeSm90FewHeads
from .sm90_fp8 import DenseDecodeSm90Fp8
from .visible_keys import WORD_KEYS, visible_word

# By columns of a key: column tiles of Q in registers, stages of keys and of RoPE columns or P, stages before the RoPE columns, optional
# fields of shared memory. What Q leaves of shared memory are stages.
TILINGS = {
    576: (5, (10, 3), 2, {"sTarget", "rope_ready", "right_turn"}),
    512: (5, (11, 3), 2, {"sTarget", "right_turn"}),
    320: (4, (10, 6), 1, {"sTarget", "rope_ready"}),
}
# By columns of a key and CTAs of a cluster: stages of a tile that L2 is asked for before the tile is loaded, those whose place comes free
# last before their keys are needed. With 576 columns a CTA alone gains nothing: HBM binds.
PREFETCHED = {(576, 2): (3,), (512, 1): (3,), (512, 2): (3,)}


class DenseDecodeSm90(LatentSm90Parts):
    """One variant of the kernel of a 16-bit cache."""

    registers = (32, 160)
    roles = warpgroup_roles("load")

    def __init__(self, config: DenseDecodeConfig) -> None:
        super().__init__(config)
        in_registers, rings, before_rope, optional = TILINGS[config.d_qk]
        columns = range(0, LATENT_DIMS[config.d_qk].latent, STAGE_COLUMNS)
        self.stages = LatentSm90Stages(config.d_qk, tuple(columns), before_rope)
        self.queries = LatentSm90Queries(config.d_qk, in_registers)
        self.layout = LatentSm90Smem.layout(self.stages, self.queries, self.dtype, rings, optional)
        self.expected = ("HGMMA", self.stages.wgmma_per_tile)
        self.prefetched = PREFETCHED.get((config.d_qk, config.cluster), ())

    def initialise(self, operands: DenseDecodeOperands, smem: LatentSm90Smem) -> None:
        """Initialise the barriers, and prefetch the tensor map."""
        smem.initialise(self.cluster)
        prefetch_map(operands.args.kv_map)

    @cute.jit
    def produce(self, operands: DenseDecodeOperands, smem: LatentSm90Smem, warp: Int32, thread: Int32):
        """Run the load role."""
        if warp == 0:
            DenseDecodeSm90LoadRole(self.cluster, self.prefetched).run(operands, smem)

    def score(self, operands: DenseDecodeOperands, smem: LatentSm90Smem, thread: Int32) -> None:
        """Run the score role."""
        scores = partial(LatentSm90Scores.create, self.queries)
        LatentSm90ScoreRole(scores, DenseDecodeSm90KeyMask(), DenseDecodeRowScale(LATENT)).run(operands, smem, thread)

    def output(self, operands: DenseDecodeOperands, smem: LatentSm90Smem, thread: Int32, side: Int32) -> None:
        """Run the output role."""
        output = partial(LatentSm90Output.create, self.cluster, operands)
        LatentSm90OutputRole(output, self.dtype).run(operands, smem, thread, side)


class DenseDecodeSm90LoadRole:
    """One warp: TMA of the key tiles. cluster: CTAs that share them. prefetched: stages of a tile that L2 is asked for ahead."""

    awaits_peer = False  # whether stages are released by both CTAs of a pair, though each fills its own

    def __init__(self, cluster: int, prefetched: tuple[int, ...]) -> None:
        self.cluster = cluster
        self.prefetched = prefetched

    def column(self, stages: LatentSm90Stages, part: int, box: int | Int32 = 0) -> int | Int32:
        """Return the first column of a box of a stage, or of ROPE."""
        return stages.column(part, box)

    @cute.jit
    def run(self, operands: DenseDecodeOperands, smem: LatentSm90Smem):
        """Wait kv_free. Signal kv_ready, rope_ready."""
        # a look-up takes longer than the copies of a tile of few stages are issued in
        for_each = for_each_tile if smem.d_v == D_LATENT else for_each_tile_in_groups
        tiles_done = for_each(operands, partial(self.load_tile, operands, smem))
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.cluster > 1 or self.awaits_peer):
            smem.await_peer(tiles_done)

    @cute.jit
    def load_tile(self, operands: DenseDecodeOperands, smem: LatentSm90Smem, box: LaneBox, tile: Int32):
        """Load the tile-th tile of this CTA: all of it, with zeros where the request has no page."""
        lane, stages = cute.arch.lane_idx(), smem.stages
        where = (operands.kv_head(), box.row, box.page)
        offset = box.offset * ROW_ELEMENTS  # a box of fewer keys is a run of rows of the 64-key box
        if cutlass.const_expr(len(self.prefetched) > 0):
            self.prefetch_stages(operands, smem, box)
        kv = smem.kv_ready.state(tile * stages.count)
        for part in stages.parts:
            if cutlass.const_expr(part != ROPE):
                ready = smem.kv_ready.barrier(kv)
                smem.kv_free.producer_acquire(kv)
                if lane == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(ready, STAGE_BYTES)
                cute.arch.sync_warp()
                if box.in_tile:
                    target = smem.sKv.iterator + (kv.stage * STAGE_ELEMENTS + offset)
                    self.load_stage(operands.args.kv_map, target, partial(self.column, stages, part), where, ready)
                # two stages side by side, then divided anew: no registers are left to carry a state over more
                kv = smem.kv_ready.advance_in_tile(kv, 0) if part % 2 == 0 else smem.kv_ready.state(tile * stages.count + (part + 1))
            elif cutlass.const_expr(stages.has_rope):
                self.load_rope(operands, smem, box, tile)

    @cute.jit
    def load_rope(self, operands: DenseDecodeOperands, smem: LatentSm90Smem, box: LaneBox, tile: Int32):
        """Load the RoPE columns of a tile, over P of the tile three before, which has been read: its last stages came free before."""
        ready = smem.rope_ready.barrier(tile)
        kv_map, where = operands.args.kv_map, (self.column(smem.stages, ROPE), operands.kv_head(), box.row, box.page)
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(ready, BOX_BYTES)
        cute.arch.sync_warp()
        if box.in_tile:
            target = smem.sRope.iterator + (smem.rope_ready.stage(tile) * BOX_ELEMENTS + box.offset * ROW_ELEMENTS)
            if cutlass.const_expr(self.cluster == 1):
                load_box(target, kv_map, where, ready)
            elif cute.arch.block_idx_in_cluster() == tile % 2:
                multicast_box(target, kv_map, where, ready)

    @cute.jit
    def prefetch_stages(self, operands: DenseDecodeOperands, smem: LatentSm90Smem, box: LaneBox):
        """Ask L2 for what load_stage fetches of the stages that come free last."""
        kv_map, where = operands.args.kv_map, (operands.kv_head(), box.row, box.page)
        if box.in_tile:
            for stage in self.prefetched:
                for own in range(STAGE_BOXES) if self.cluster == 1 else (cute.arch.block_idx_in_cluster(),):
                    prefetch_box(kv_map, (self.column(smem.stages, stage, own), *where))

    def load_stage(
        self, kv_map: Any, target: cute.Pointer, column: Callable[[Any], Any], where: tuple[Int32, ...], ready: cute.Pointer
    ) -> None:
        """Load two boxes of columns; of a pair, each CTA fetches one for both. column: the first one of a box."""
        if self.cluster == 1:
            load_box(target, kv_map, (column(0), *where), ready)
            load_box(target + BOX_ELEMENTS, kv_map, (column(1), *where), ready)
        else:
            rank = cute.arch.block_idx_in_cluster()
            multicast_box(target + rank * BOX_ELEMENTS, kv_map, (column(rank), *where), ready)


class DenseDecodeSm90KeyMask:
    """Mask of keys past the end, and of those that causal, tree_mask or a window hide."""

    @cute.jit
    def apply(self, operands: DenseDecodeOperands, smem: Any, scores: LatentSm90Scores, state: LatentSm90TileState, keys: KeyTile):
        """Set the scores of keys that a row does not see to -inf."""
        if operands.hides_keys(keys):
            for row_half, first in product(range(scores.row_halves), range(0, TILE_KEYS, WORD_KEYS)):
                # no registers are left to keep what follows from a row
                token, _ = operands.token_and_head(computed_with(scores.query_row(row_half), keys.remaining))
                word = visible_word(operands, keys, token, first)
                mask_absent(scores.scores, scores.thread, {first // WORD_KEYS: word}, row_half)


class DenseDecodeSm90Wide(DenseDecodeSm90):
    """The variant of 1,024 latent columns, which a pair of CTAs divides."""

    def __init__(self, config: DenseDecodeConfig) -> None:
        LatentSm90Parts.__init__(self, config)
        self.stages = LatentSm90Stages(column_pair.D_QK, before_rope=2)
        self.queries = LatentSm90Queries(column_pair.D_QK, 5)
        optional = {"sTarget", "rope_ready", "right_turn"}
        self.layout = LatentSm90Smem.layout(self.stages, self.queries, self.dtype, (10, 3), optional, *column_pair.ADDED)
        self.expected = ("HGMMA", self.stages.wgmma_per_tile)

    def smem(self, memory: dict[str, Any]) -> ColumnPairSmem:
        """Return the allocated shared memory as the roles see it."""
        return ColumnPairSmem.create(self.stages, memory)

    @cute.jit
    def produce(self, operands: DenseDecodeOperands, smem: Any, warp: Int32, thread: Int32):
        """Run the load role."""
        if warp == 0:
            DenseDecodeSm90WideLoadRole(1, (3,)).run(operands, smem)

    def score(self, operands: DenseDecodeOperands, smem: Any, thread: Int32) -> None:
        """Run the score role."""
        scores, softmax = partial(ColumnPairScores.create, self.queries), partial(OnlineSoftmax.create, rows=1)
        ColumnPairScoreRole(scores, DenseDecodeSm90KeyMask(), DenseDecodeRowScale(LATENT), softmax).run(operands, smem, thread)

    def output(self, operands: DenseDecodeOperands, smem: Any, thread: Int32, side: Int32) -> None:
        """Run the output role."""
        output = partial(LatentSm90Output.create, self.cluster, operands)
        ColumnPairOutputRole(output, self.dtype).run(operands, smem, thread, side)


class DenseDecodeSm90WideLoadRole(DenseDecodeSm90LoadRole):
    """One warp: TMA of this CTA's columns of the key tiles. The second half of a RoPE box, which nobody reads, may lie beside the cache."""

    awaits_peer = True

    def column(self, stages: LatentSm90Stages, part: int, box: int | Int32 = 0) -> int | Int32:
        """Return the first column of a box of a stage, or of ROPE."""
        if part == ROPE:
            return column_pair.first_rope_column()
        return column_pair.first_column() + stages.column(part, box)


PARTS = {LATENT: DenseDecodeSm90, FP8_CACHE: DenseDecodeSm90Fp8Cache, FP8: DenseDecodeSm90Fp8}


def build(config: DenseDecodeConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    if config.column_ctas > 1:
        return LatentSm90Kernel(DenseDecodeAbi(config), arch, DenseDecodeSm90Wide(config)).complete()
    if config.few_heads:
        return FewHeadsSm90Kernel(DenseDecodeAbi(config), arch, DenseDecodeSm90FewHeads(config)).complete()
    return LatentSm90Kernel(DenseDecodeAbi(config), arch, PARTS[config.operands](config)).complete()

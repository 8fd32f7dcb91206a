"""The output role of sparse_prefill_dq on Hopper: dQ += dS K of the latent columns, in two warpgroups."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import KeyTile
from ..primitives.wgmma import tiled_mma
from ..sm90.cta import OUTPUT_GROUPS, STAGE_COLUMNS, LatentSm90TileState
from ..sm90.output import LatentSm90Output
from .abi import DqOperands
from .sm90_config import DqSm90Smem
from .sm90_score import store_dq


@dataclass(frozen=True)
class DqSm90Sums(LatentSm90Output):
    """dQ += dS K: forward's O += P V, with dS for P and without a rescale. dS has one stage."""

    @staticmethod
    def partition(smem: DqSm90Smem, thread: Int32) -> DqSm90Sums:
        """Partition the tiles for one thread of an output warpgroup."""
        mma = tiled_mma(smem.sKv.element_type, STAGE_COLUMNS, warpgroup.OperandSource.SMEM, OperandMajorMode.MN)
        own = mma.get_slice(thread)
        shape = (STAGE_COLUMNS, TILE_KEYS, smem.kv_ready.stages)
        keys = cute.composition(smem.sKv, cute.make_layout(shape, stride=(TILE_KEYS, 1, TILE_KEYS * STAGE_COLUMNS)))
        shape = own.partition_shape_C((64, STAGE_COLUMNS))
        return DqSm90Sums(
            thread=thread,
            mma=mma,
            tProbs=own.make_fragment_A(own.partition_A(smem.sS)),
            tV=own.make_fragment_B(own.partition_B(keys)),
            factors=None,  # type: ignore[arg-type]  # of a rescale
            accumulators=tuple(cute.make_rmem_tensor(shape, Float32) for _ in range(smem.stages.output_stages)),
            cluster=1,
            unseen=None,
        )

    @cute.jit
    def add_tile(self, smem: DqSm90Smem, state: LatentSm90TileState, begun: Boolean, keys: KeyTile, side: Int32) -> Boolean:
        """Add dS K of one tile to dQ. Wait valid_ready, probs_ready, right_turn. Signal kv_free, rope_free, right_turn.

        Validity comes long before dS does.
        """
        smem.valid_ready.consumer_wait(state.rope)
        present = smem.has_keys(state.rope.stage)
        smem.probs_ready.consumer_wait(state.rope)
        if present:
            self.add_values(smem, state, begun, keys, side)
        else:
            self.give_turn(smem, state, side)
            for stage in self.stages(smem, state):
                smem.kv_free.consumer_release(stage)
        smem.rope_free.consumer_release(state.rope)
        return begun

    def multiply_steps(self, mma: cute.TiledMma, chunk: int, steps: int, probs_stage: Int32, kv_stage: Int32, adds: Boolean) -> None:
        """Issue one chunk, as the base class does, with the only stage of dS."""
        super().multiply_steps(mma, chunk, steps, Int32(0), kv_stage, adds)

    def rescale(self, stage: Int32, begun: Boolean) -> None:
        """Do nothing: P is final."""


@dataclass(frozen=True)
class DqSm90OutputRole:
    """One of two warpgroups."""

    dtype: type[cutlass.Numeric]

    @cute.jit
    def run(self, operands: DqOperands, smem: DqSm90Smem, thread: Int32, side: Int32):
        """Wait probs_ready. Signal kv_free, rope_free, dscores_free. Write the latent columns of dq."""
        schedule = operands.schedule
        token, first = schedule.first_work_tile()
        state = smem.first_tile(side)
        sums = DqSm90Sums.partition(smem, thread)
        while token <= schedule.last_request():
            for total in sums.accumulators:
                total.fill(0.0)
            tile_range = schedule.tile_range(token, first)
            for t in cutlass.range(tile_range.tiles, unroll=1):
                self.add_tile(smem, sums, state, tile_range.tile(t), side)
                state = smem.next_tile(state)
            columns = smem.d_v // OUTPUT_GROUPS
            for chunk in cutlass.range_constexpr(len(sums.accumulators)):
                store_dq(operands, token, sums.accumulators[chunk], side * columns + chunk * STAGE_COLUMNS, thread)
            token = schedule.work_tile(token, first).next_req

    @cute.jit
    def add_tile(self, smem: DqSm90Smem, sums: DqSm90Sums, state: LatentSm90TileState, keys: KeyTile, side: Int32):
        """Add dS K of one tile to dQ. Wait probs_ready. Signal kv_free, rope_free, dscores_free."""
        sums.add_tile(smem, state, Boolean(True), keys, side)
        smem.dscores_free.consumer_release(state.number)

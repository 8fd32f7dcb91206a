"""Sparse prefill's own parts of the SM120 roles: rows by indices, the greatest logit and lse of a token's first indices.

lse_indexer sums up the first indexer_topk keys. At the first stage that reaches beyond this bound and has a key, the state that its keys
before the bound alone would give waits in shared memory for the end of the token. The logarithm has the bits that lse would have if
topk_length ended there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from ...spec.split_plan import TILE_KEYS
from ..attention.lengths import RowRange
from ..attention.scheduler import KeyTile
from ..attention.softmax import LN2
from ..primitives.arithmetic import product
from ..primitives.copies import arrive_landed
from ..primitives.pipeline import PipelineState
from ..sm120.cta import KEYS, WARP_KEYS, Sm120Smem, Sm120Thread, pitch_of
from ..sm120.roles import Sm120RowResults
from ..sm120.rows import Sm120Columns
from .operands import SparsePrefillOperands

NEVER = (1 << 31) - 1  # at or beyond the end of every list


@dataclass(frozen=True)
class SparsePrefillSm120LoadRole:
    """Four warps: cp.async of rows, each of 8 keys of a stage. Every warp looks at all 32 indices, one a lane."""

    d_qk: int

    @cute.jit
    def run(self, operands: SparsePrefillOperands, smem: Sm120Smem):
        """Wait k_free. Signal k_ready."""
        schedule, thread = operands.schedule, Sm120Thread.create()
        columns = Sm120Columns(0, 0, self.d_qk, pitch_of(self.d_qk))
        state = PipelineState(Int32(0), Int32(0))
        token, first = schedule.first_work_tile()
        last = schedule.last_request()
        while token <= last:
            indices = operands.index_list(token)
            position = thread.lane
            entry = indices.entry(position)
            for _ in cutlass.range(schedule.tile_range(token, first).tiles * (TILE_KEYS // KEYS), unroll=1):
                row = indices.row_address(indices.checked(entry))
                position = position + KEYS
                entry = indices.entry(position)
                present = cute.arch.vote_ballot_sync(row != 0)
                smem.k_free.producer_acquire(state)
                if present != 0:
                    place = smem.sK.toint() + (state.stage * KEYS + thread.warp * WARP_KEYS) * columns.pitch
                    columns.start(thread, place, row, thread.warp * WARP_KEYS)
                arrive_landed(smem.k_ready.barrier(state))
                if thread.warp == 0:
                    (smem.sPresent + state.stage).store(present)
                    smem.k_ready.producer_commit(state)
                state = smem.k_ready.advance(state)
            token = token + cute.arch.grid_dim()[2]
        cute.arch.griddepcontrol_launch_dependents()


@dataclass(frozen=True)
class SparsePrefillSm120Results(Sm120RowResults):
    """The greatest logit of a row, and lse_indexer.

    rMax: of the thread's rows, scaled, log2 units. rBound: int32 (1): the position at which the sum for lse_indexer ends, NEVER where it is
    not asked for, and once it is done.
    """

    operands: SparsePrefillOperands
    rMax: cute.Tensor
    rBound: cute.Tensor

    @staticmethod
    def create(operands: SparsePrefillOperands) -> SparsePrefillSm120Results:
        """Return the results of a thread."""
        return SparsePrefillSm120Results(
            operands, cute.make_rmem_tensor(cute.make_layout(2), Float32), cute.make_rmem_tensor(cute.make_layout(1), Int32)
        )

    def begin(self) -> None:
        """Begin a token."""
        self.rMax.fill(-Float32.inf)
        self.rBound[0] = cutlass.select_(self.operands.asks_lse_indexer(), self.operands.args.indexer_topk, Int32(NEVER))

    def see_top(self, which: int, top: Float32) -> None:
        """See the scaled maximum of a stage."""
        self.rMax[which] = cute.arch.fmax(self.rMax[which], top)

    @cute.jit
    def see_stage(self, attend: Any, smem: Sm120Smem, rows: Any, thread: Any, scores: cute.Tensor, keys: KeyTile):
        """Sum up the keys before the bound, if this stage is the first to have others."""
        if keys.first + KEYS > self.rBound[0]:
            limit = self.rBound[0] - keys.first - attend.first_key(thread)
            before = [cutlass.select_(attend.key_behind_first(i) < limit, scores[i], -Float32.inf) for i in range(cute.size(scores))]
            kept = attend.kept(smem)
            tops = attend.tops(kept.tops, thread, before)
            steps = [rows.step(which, attend.by_row(before)[which], product(top, rows.scale)) for which, top in enumerate(tops)]
            attend.keep_sums(kept.sums, thread, [step.total for step in steps])
            attend.keep(kept.references, thread, [step.reference for step in steps])
            self.rBound[0] = Int32(NEVER)

    @cute.jit
    def store(self, attend: Any, smem: Sm120Smem, stored: RowRange, thread: Any, row: Int32, which: int, state: tuple[Float32, Float32]):
        """Write the greatest logit of a row, and lse_indexer if it is asked for. If the bound is still ahead, all keys lie before it."""
        self.operands.max_logit_of(stored.unit, row).store(self.rMax[which] * LN2)
        if self.operands.asks_lse_indexer():
            total, reference = state
            if self.rBound[0] == NEVER:
                kept = attend.kept(smem)
                total, reference = attend.sum_of(kept.sums, thread, which), attend.kept_number(kept.references, thread, which)
            lse = (reference + cute.math.log2(total, fastmath=True)) * LN2
            self.operands.lse_indexer_of(stored.unit, row).store(cutlass.select_(total == 0.0, self.operands.empty_lse, lse))

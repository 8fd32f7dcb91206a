"""The shared part of the SM120 roles that multiply: the walk over work tiles and stages, softmax of a thread's rows, results of an op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from ...spec.split_plan import TILE_KEYS
from ..attention.lengths import RowRange
from ..attention.scheduler import KeyTile, LatentOperands, WorkTile
from ..attention.softmax import LN2, RowScale, follow_maximum, shift_of
from ..primitives.arithmetic import pin_register
from ..primitives.pipeline import PipelineState
from .cta import KEYS, Sm120Smem, pitch_of

HALVES = 2  # rows of a thread
SIGN_BIT = 31


class RowStep(NamedTuple):
    """The state of a row with more keys. alpha: factor of sums so far. total: the sum with the keys. probs: of the keys, unnormalised."""

    reference: Float32
    alpha: Float32
    total: Float32
    probs: list[Float32]


@dataclass(frozen=True)
class Sm120RowResults:
    """Results of a thread's two rows besides out and lse. The base class has none. attend: the role."""

    def begin(self) -> None:
        """Begin a work tile."""

    def see_stage(self, attend: Any, smem: Any, rows: Any, thread: Any, scores: cute.Tensor, keys: KeyTile) -> None:
        """See the scores of a stage before they are added to the rows."""

    def see_top(self, which: int, top: Float32) -> None:
        """See the scaled maximum of a stage."""

    def store(
        self, attend: Any, smem: Any, stored: RowRange, thread: Any, row: Int32, which: int, state: tuple[Float32, Float32]
    ) -> None:  # fmt: skip
        """Write results of a row that exists, with its lse. which: of the thread's rows. state: (sum, reference) of all its keys."""


LSE_ONLY = Sm120RowResults()


class Kept(NamedTuple):
    """Places of what an op keeps until the end of a work tile, fp32: numbers of rows, as `tops` and `keep` of a role have them."""

    tops: cute.Pointer | None
    sums: cute.Pointer
    references: cute.Pointer


@dataclass(frozen=True)
class Sm120Rows:
    """Running state of the thread's two rows.

    scale: of the scores, log2 units. reference: what the sums are relative to, log2 units. rSum: this thread's share of the sums, of its
    keys. rO: of its columns.
    """

    scale: Float32
    results: Sm120RowResults
    reference: cute.Tensor
    rSum: cute.Tensor
    rO: cute.Tensor

    @staticmethod
    def create(scale: Float32, results: Sm120RowResults, values: int) -> Sm120Rows:
        """Return registers for the state. values: of O, of a thread."""
        reference, sums, out = (cute.make_rmem_tensor(cute.make_layout(size), Float32) for size in (HALVES, HALVES, values))
        return Sm120Rows(scale, results, reference, sums, out)

    def reset(self) -> None:
        """Forget all keys."""
        self.reference.fill(-Float32.inf)
        self.rSum.fill(0.0)
        self.rO.fill(0.0)
        self.results.begin()

    def step(self, which: int, scores: list[Float32], top: Float32) -> RowStep:
        """Return what keys would make of a row. scores: the thread's. top: the scaled maximum of all."""
        reference, alpha = follow_maximum(self.reference[which], top)
        shift = -shift_of(reference)
        probs = [cute.math.exp2(score * self.scale + shift, fastmath=True) for score in scores]
        return RowStep(reference, alpha, self.rSum[which] * alpha + sum(probs[1:], probs[0]), probs)

    def follow(self, which: int, scores: list[Float32], top: Float32) -> RowStep:
        """Bring the reference and the sum of a row to what keys make of it. As step."""
        self.results.see_top(which, top)
        step = self.step(which, scores, top)
        self.rSum[which], self.reference[which] = step.total, step.reference
        return step


class Sm120Mask:
    """Mask of an op. skips: whether stages without a key are passed by."""

    skips = False

    def has_keys(self, smem: Sm120Smem, stage: Int32) -> Boolean:
        """Return whether a stage has a key."""
        raise NotImplementedError

    def apply(self, operands: Any, smem: Sm120Smem, thread: Any, scores: cute.Tensor, stage: Int32, keys: KeyTile) -> None:
        """Set the scores of keys that a row does not see to -inf. keys: those of the stage, as if a tile began with them."""
        raise NotImplementedError


@dataclass(frozen=True)
class Sm120BitMask(Sm120Mask):
    """Mask of keys whose bit of sPresent is 0. attend: the role."""

    attend: Any

    skips = True

    def has_keys(self, smem: Sm120Smem, stage: Int32) -> Boolean:
        """Return whether a stage has a key."""
        return (smem.sPresent + stage).load() != 0

    @cute.jit
    def apply(self, operands: Any, smem: Sm120Smem, thread: Any, scores: cute.Tensor, stage: Int32, keys: KeyTile):
        """Set the scores of keys that do not exist to -inf."""
        present = (smem.sPresent + stage).load() >> self.attend.first_key(thread)
        for i in cutlass.range_constexpr(cute.size(scores)):
            bit = Int32(1 << self.attend.key_behind_first(i))
            scores[i] = cutlass.select_((present & bit) != 0, scores[i], -Float32.inf)


@dataclass(frozen=True)
class Sm120Role:
    """A role that multiplies.

    dtype: of out and of products' operands. d_qk, d_v: columns. plan_first: whether Q is asked for when the plan is here; else ptxas may
    ask for the plan when Q has come. It costs dense decode registers: 5,052 clocks a block instead of 4,590.
    """

    mask: Sm120Mask
    row_scale: RowScale
    dtype: type[cutlass.Numeric]
    d_qk: int
    d_v: int
    results: Sm120RowResults = LSE_ONLY
    plan_first: bool = False

    kept_floats = 0  # of shared memory, for results of an op

    @property
    def pitch(self) -> int:
        """Return the bytes from a row of Q or of a key to the next."""
        return pitch_of(self.d_qk)

    def thread(self) -> Any:
        """Return this thread."""
        raise NotImplementedError

    def create_rows(self, scale: Float32) -> Sm120Rows:
        """Return registers for the rows of a thread."""
        raise NotImplementedError

    def begin(self, operands: LatentOperands, smem: Sm120Smem, rows: Any, thread: Any, req: Int32) -> None:
        """Begin a work tile: bring Q."""
        raise NotImplementedError

    def attend_to(self, operands: LatentOperands, smem: Sm120Smem, rows: Any, thread: Any, stage: Int32, keys: KeyTile) -> None:
        """Attend to the keys of a stage."""
        raise NotImplementedError

    def finish(self, operands: LatentOperands, smem: Sm120Smem, rows: Any, thread: Any, req: Int32, work_tile: WorkTile) -> None:
        """Write out or out_accum, and lse."""
        raise NotImplementedError

    @cute.jit
    def run(self, operands: LatentOperands, smem: Sm120Smem):
        """Wait k_ready. Signal k_free. Write lse, and out or out_accum."""
        schedule, thread = operands.schedule, self.thread()
        rows = self.create_rows(self.row_scale.score_scale(operands))
        state = PipelineState(Int32(0), Int32(0))
        req, begin_tile = schedule.first_work_tile()
        last = schedule.last_request()
        while req <= last:
            tile_range = schedule.tile_range(req, begin_tile)
            work_tile = schedule.work_tile_of(tile_range, req, begin_tile)
            zero = pin_register(tile_range.tiles) >> SIGN_BIT if self.plan_first else 0  # tiles are never negative
            self.begin(operands, smem, rows, thread, req + zero)
            rows.reset()
            for i in cutlass.range(tile_range.tiles * (TILE_KEYS // KEYS), unroll=1):
                keys = KeyTile(req, begin_tile * TILE_KEYS + i * KEYS, tile_range.keys - i * KEYS)
                self.add_stage(operands, smem, rows, thread, state, keys)
                state = smem.k_ready.advance(state)
            self.finish(operands, smem, rows, thread, req, work_tile)
            req, begin_tile = work_tile.next_req, work_tile.next_tile

    @cute.jit
    def add_stage(self, operands: LatentOperands, smem: Sm120Smem, rows: Any, thread: Any, state: PipelineState, keys: KeyTile):
        """Attend to the keys of a stage, unless it is passed by."""
        smem.k_ready.consumer_wait(state)
        if cutlass.const_expr(self.mask.skips):
            if self.mask.has_keys(smem, state.stage):
                self.attend_to(operands, smem, rows, thread, state.stage, keys)
        else:
            self.attend_to(operands, smem, rows, thread, state.stage, keys)
        smem.k_free.consumer_release(state)


@cute.jit
def by_destination(work_tile: WorkTile, direct: cutlass.Constexpr[Callable[[], None]], split: cutlass.Constexpr[Callable[[], None]]):
    """Run what writes results of a work tile: the output itself, or a split of it."""
    if cutlass.const_expr(work_tile.always_direct):
        direct()
    else:
        if work_tile.direct:
            direct()
        else:
            split()


def store_lse(operands: LatentOperands, stored: RowRange, row: Int32, state: tuple[Float32, Float32], work_tile: WorkTile) -> None:
    """Write lse of a row: natural log if the request is not cut, else base 2. state: sum and reference."""
    total, reference = state
    empty, lse = total == 0.0, reference + cute.math.log2(total, fastmath=True)
    by_destination(
        work_tile,
        lambda: stored.lse_of(row).store(cutlass.select_(empty, operands.empty_lse, lse * LN2)),
        lambda: (operands.lse_accum + operands.accum_row(work_tile, row)).store(cutlass.select_(empty, -Float32.inf, lse)),
    )

"""The attend role of the SM100 dQ kernel: dS of half a tile's keys, a thread a row."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from ...spec.dense_prefill_dq import STATISTICS, TILE_ROWS
from ..dense_prefill.operands import DensePrefillItem, ItemQueue
from ..dense_prefill.sm100_config import BOX_BYTES, GROUP, first_lane
from ..dense_prefill.sm100_softmax import LOADED_AT_ONCE, exp2_on_fma, hide_keys, on_fma
from ..primitives import tcgen05
from ..primitives.arithmetic import pack_pair
from ..primitives.smem import BOX_ROWS, clear_rows
from .operands import DqOperands
from .sm100_config import DPROBS_COLUMN, GROUPS, SCORE_COLUMN, DqSm100Geometry, DqSm100Smem


@dataclass(frozen=True)
class DqRowSlice:
    """A thread's row of one tile, half of the columns.

    columns: tensor memory at the first lane of the warp, and the first of the group's columns of S. weights: the same of dS.
    rP: fp32 (64 or 32 keys): scores, then probabilities, then dS. statistics: fp32: lse in log2 units, delta.
    """

    dtype: type[cutlass.Numeric]
    row: Int32
    columns: Int32
    weights: Int32
    scale_log2: Float32
    rP: cute.Tensor
    statistics: cute.Tensor

    @staticmethod
    def create(dtype: type[cutlass.Numeric], geometry: DqSm100Geometry, tmem: Int32, group: Int32, scale_log2: Float32) -> DqRowSlice:
        """Return the row of this thread."""
        lanes = first_lane(tmem)
        rP, statistics = (cute.make_rmem_tensor(cute.make_layout(size), Float32) for size in (geometry.group_keys, STATISTICS))
        return DqRowSlice(
            dtype=dtype,
            row=cute.arch.thread_idx()[0] % GROUP,
            columns=lanes + (SCORE_COLUMN + group * geometry.group_keys),
            weights=lanes + (geometry.dscores_column + group * (geometry.group_keys // 2)),
            scale_log2=scale_log2,
            rP=rP,
            statistics=statistics,
        )

    def take_statistics(self, sStatistics: cute.Pointer) -> None:
        """Read the row's lse and delta."""
        for which in range(STATISTICS):
            self.statistics[which] = (sStatistics + (which * TILE_ROWS + self.row)).load()

    def load(self, column: int) -> list[Float32]:
        """Load the row's S or dP, whose columns begin at `column`."""
        first = self.columns + (column - SCORE_COLUMN)
        parts = [tcgen05.load_columns(first + i, LOADED_AT_ONCE) for i in range(0, cute.size(self.rP), LOADED_AT_ONCE)]
        tcgen05.await_loads()
        return [part[i] for part in parts for i in range(LOADED_AT_ONCE)]

    def exponentiate(self, scores: list[Float32]) -> None:
        """Set P. P of keys that a row does not see is whatever their scores make it."""
        scale, shift = (self.scale_log2,) * 2, (-self.statistics[0],) * 2
        for i in range(0, cute.size(self.rP), 2):
            exponents = cute.arch.fma_packed_f32x2((scores[i], scores[i + 1]), scale, shift)
            if on_fma(i // 2):
                probs = exp2_on_fma(exponents)
            else:
                probs = tuple(cute.math.exp2(exponent, fastmath=True) for exponent in exponents)
            self.rP[i], self.rP[i + 1] = probs

    def make_dscores(self, dprobs: list[Float32]) -> None:
        """Replace P by dS = P (dP - delta)."""
        shift = (-self.statistics[1],) * 2
        for i in range(0, cute.size(self.rP), 2):
            differences = cute.arch.add_packed_f32x2((dprobs[i], dprobs[i + 1]), shift)
            self.rP[i], self.rP[i + 1] = cute.arch.mul_packed_f32x2((self.rP[i], self.rP[i + 1]), differences)

    def mask(self, limit: Int32) -> None:
        """Set dS of keys from `limit` on, counted within the slice, to 0. Selects, so that NaN vanishes."""
        hide_keys(self.rP, limit, range(cute.size(self.rP)), Float32(0))

    def store(self) -> None:
        """Store dS as 16-bit A operand; done when this returns."""
        tcgen05.store_columns(self.weights, [pack_pair(self.rP[i], self.rP[i + 1], self.dtype) for i in range(0, cute.size(self.rP), 2)])
        tcgen05.await_stores()


@dataclass(frozen=True)
class DqSm100AttendRole:
    """Four warps, for half of the keys of every tile."""

    dtype: type[cutlass.Numeric]
    geometry: DqSm100Geometry

    @cute.jit
    def run(self, operands: DqOperands, queue: ItemQueue, smem: DqSm100Smem, tmem: Int32, group: Int32):
        """Wait item_ready, statistics_ready, scores_ready, dprobs_ready.

        Signal item_free, statistics_free, scores_free, dscores_ready.
        """
        rows = DqRowSlice.create(self.dtype, self.geometry, tmem, group, operands.args.scale_log2)
        more, turn, items, done, stage = Boolean(True), Int32(0), Int32(0), Int32(0), Int32(0)
        while more:
            more, item = queue.take(turn)
            count = self.geometry.key_tiles(item.keys)
            if count > 0:
                smem.statistics_ready.consumer_wait(items)
                rows.take_statistics(smem.sStatistics)
                smem.statistics_free.consumer_release(items)
                for t in cutlass.range(count, unroll=1):
                    self.attend_tile(smem, rows, item, group, (count - 1 - t, done + t, stage))
                    stage = stage + self.geometry.key_boxes
                    stage = cutlass.select_(stage >= self.geometry.key_stages, stage - self.geometry.key_stages, stage)
                items = items + 1
                done = done + count
            turn = turn + 1

    @cute.jit
    def attend_tile(self, smem: DqSm100Smem, rows: DqRowSlice, item: DensePrefillItem, group: Int32, where: tuple[Int32, Int32, Int32]):
        """Compute dS of a tile. where: the tile among the item's keys, its number, its first stage of keys."""
        tile, use, stage = where
        first_key = tile * self.geometry.tile_keys + group * self.geometry.group_keys
        smem.scores_ready.consumer_wait(use)
        tcgen05.fence_after_wait()
        scores = rows.load(SCORE_COLUMN)
        tcgen05.fence_before_signal()
        smem.scores_free.consumer_release(use)
        first_cleared = tile * self.geometry.tile_keys + self.boxes_of(group)[1] * BOX_ROWS
        if item.keys < first_cleared + BOX_ROWS:
            self.clear_keys(smem, stage, group, item.keys - first_cleared, rows.row)
        rows.exponentiate(scores)
        smem.dprobs_ready.consumer_wait(use)
        tcgen05.fence_after_wait()
        rows.make_dscores(rows.load(DPROBS_COLUMN))
        if item.key_limit(Int32(0)) < first_key + self.geometry.group_keys:
            rows.mask(item.key_limit(rows.row) - first_key)
        rows.store()
        tcgen05.fence_before_signal()
        smem.dscores_ready.producer_commit(use)

    def boxes_of(self, group: Int32) -> tuple[Int32 | int, Int32 | int, int]:
        """Return which boxes of 64 rows of a tile a group clears: the first stage, the box in it, and the stages to the next.

        A stage has two boxes, one for each group, or one: then every other stage is a group's.
        """
        boxes = self.geometry.tile_keys // BOX_ROWS
        return (0, group, 1) if boxes == GROUPS else (group, 0, GROUPS)

    @cute.jit
    def clear_keys(self, smem: DqSm100Smem, stage: Int32, group: Int32, keys: Int32, thread: Int32):
        """Zero rows of a tile from `keys` on in the group's boxes: dS is 0 there, but 0 times a NaN of an unused row is NaN.

        S of the tile is complete, so the keys are there, and dQ has not begun: it waits for the arrival with dS.
        """
        first, part, step = self.boxes_of(group)
        for box in cutlass.range_constexpr(0, self.geometry.key_boxes, step):
            place = stage + box + first
            place = cutlass.select_(place >= self.geometry.key_stages, place - self.geometry.key_stages, place)
            clear_rows(smem.sK + (place * self.geometry.stage_bytes + part * BOX_BYTES), 1, keys, thread)
        cute.arch.fence_proxy("async.shared", space="cta")

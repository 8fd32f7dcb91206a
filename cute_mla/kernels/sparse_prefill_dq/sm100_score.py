"""The score role of sparse_prefill_dq on Blackwell: P and dS of a tile, to memory, and dS to shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute

from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import first_query_row
from ..primitives import tcgen05
from ..primitives.arithmetic import pack_pair
from ..primitives.copies import BOX_ROW_BYTES, store_groups, writer_address
from ..primitives.wgmma import ROWS_APART, ROWS_PER_THREAD, half
from ..sm100.config import SCORE_COLUMN, thread_and_lanes
from ..sm100.heads64 import LOWER_LANES
from ..sm100.heads64_rows import FRAGMENT, QUAD, Heads64RowsSm100
from .abi import STATISTIC_DELTA, STATISTIC_LSE, DqOperands
from .score_rows import WARP_ROWS, store_score_rows
from .sm100_config import DqSm100Smem


@dataclass(frozen=True)
class DqSm100Rows(Heads64RowsSm100):
    """One thread's scores, then P, then dS: two rows, 16 keys of each."""

    smem: DqSm100Smem

    def make_probs(self, operands: DqOperands, statistics: cute.Tensor) -> None:
        """Replace S by P."""
        scale = (self.scale_log2, self.scale_log2)
        for i in range(0, FRAGMENT, 2):
            shift = (-statistics[STATISTIC_LSE * ROWS_PER_THREAD + half(i)],) * 2
            exponents = cute.arch.fma_packed_f32x2((self.rS[i], self.rS[i + 1]), scale, shift)
            self.rS[i], self.rS[i + 1] = (cute.math.exp2(exponent, fastmath=True) for exponent in exponents)

    def make_dscores(self, tile: Int32, statistics: cute.Tensor) -> None:
        """Replace P by dS = P (dP - delta). Wait dprobs_ready. Signal dprobs_free."""
        self.smem.dprobs_ready.consumer_wait(tile)
        tcgen05.fence_after_wait()
        dprobs = tcgen05.load_fragment(self.tmem + (LOWER_LANES + SCORE_COLUMN), TILE_KEYS)
        tcgen05.await_loads()
        tcgen05.fence_before_signal()
        self.smem.dprobs_free.consumer_release(tile)
        for i in range(0, FRAGMENT, 2):
            shift = (-statistics[STATISTIC_DELTA * ROWS_PER_THREAD + half(i)],) * 2
            differences = cute.arch.add_packed_f32x2((dprobs[i], dprobs[i + 1]), shift)
            self.rS[i], self.rS[i + 1] = cute.arch.mul_packed_f32x2((self.rS[i], self.rS[i + 1]), differences)

    def store(self, place: Int32, factor: Float32 | None = None) -> None:
        """Round P, times a factor, or dS, and store it to the box. place: writer_address of the warp's rows."""
        words = []
        for i in range(0, FRAGMENT, 2):
            pair = (self.rS[i], self.rS[i + 1])
            if factor is not None:
                pair = cute.arch.mul_packed_f32x2(pair, (factor, factor))
            words.append(pack_pair(*pair, self.dtype))
        for first in range(0, len(words), 4):
            store_groups(place, 0, first // 4, words[first : first + 4])


@dataclass(frozen=True)
class DqSm100ScoreRole:
    """Four warps."""

    dtype: type[cutlass.Numeric]

    @cute.jit
    def run(self, operands: DqOperands, smem: DqSm100Smem, tmem: Int32):
        """Wait seen_ready, scores_ready, dprobs_ready, kv_free. Signal scores_free, dprobs_free, dscores_ready. Write P and dS."""
        schedule = operands.schedule
        thread, lanes = thread_and_lanes(tmem)
        rows = DqSm100Rows.create(self.dtype, smem, lanes, thread, operands.scale_log2)
        token, first = schedule.first_work_tile()
        tile = Int32(0)
        statistics, following = (cute.make_rmem_tensor(cute.make_layout(2 * ROWS_PER_THREAD), Float32) for _ in range(2))
        self.load_statistics(operands, token, thread, following)
        while token <= schedule.last_request():
            tiles = schedule.tile_range(token, first).tiles
            next_token = schedule.work_tile(token, first).next_req
            statistics.store(following.load())
            self.load_statistics(operands, next_token, thread, following)
            for t in cutlass.range(tiles, unroll=1):
                self.score_tile(operands, smem, rows, statistics, (token, t * TILE_KEYS), tile + t, thread)
            tile = tile + tiles
            token = next_token

    @cute.jit
    def load_statistics(self, operands: DqOperands, token: Int32, thread: Int32, target: cute.Tensor):
        """Load lse' and delta' of the thread's rows. Rows and tokens that do not exist have those of a row without gradient."""
        for which in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                row = first_query_row() + thread // 32 * WARP_ROWS + thread % 32 // QUAD + r * ROWS_APART
                value = Float32(Float32.inf if which == STATISTIC_LSE else 0)
                if (token <= operands.schedule.last_request()) & (row < operands.rows()):
                    value = operands.statistic_of(which, token, row).load()
                target[which * ROWS_PER_THREAD + r] = value

    @cute.jit
    def score_tile(
        self,
        operands: DqOperands,
        smem: DqSm100Smem,
        rows: DqSm100Rows,
        statistics: cute.Tensor,
        where: tuple[Int32, Int32],
        tile: Int32,
        thread: Int32,
    ):
        """Compute P and dS of a tile. statistics: lse' and delta' of the thread's rows. where: token, and position in its list."""
        box = Int32(smem.sS.toint())
        place = writer_address(box + thread // 32 * (WARP_ROWS * BOX_ROW_BYTES), cute.arch.lane_idx(), BOX_ROW_BYTES)
        smem.seen_ready.consumer_wait(tile)
        if smem.has_keys(tile):
            rows.read_scores(tile)
            rows.mask_seen(tile)
            rows.make_probs(operands, statistics)
            if tile > 0:
                smem.kv_free.consumer_wait(tile - 1)  # dS of the tile before has been read
            rows.store(place, operands.args.inverse_scale)
            store_score_rows(box, thread, operands.args.probs, operands, where)
            rows.make_dscores(tile, statistics)
            rows.store(place)
            cute.arch.fence_proxy("async.shared", space="cta")
            smem.dscores_ready.producer_commit(tile)
            store_score_rows(box, thread, operands.args.dscores, operands, where)
        else:
            smem.scores_ready.consumer_wait(tile)
            smem.scores_free.consumer_release(tile)
            if tile > 0:
                smem.kv_free.consumer_wait(tile - 1)
            smem.dprobs_ready.consumer_wait(tile)
            smem.dprobs_free.consumer_release(tile)
            smem.dscores_ready.producer_commit(tile)

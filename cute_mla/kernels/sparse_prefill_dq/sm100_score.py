"""The score role of sparse_prefill_dq on Blackwell: P and dS of a tile, to memory, and dS to shared memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import first_query_row
from ..primitives import tcgen05
from ..primitives.arithmetic import pack_pair
from ..primitives.copies import BOX_ROW_BYTES, CHUNK, store_groups, writer_address
from ..primitives.rows import SECTOR_WORDS, aligned, store_packed_row, store_vector
from ..primitives.smem import CHUNKS_PER_ROW
from ..primitives.wgmma import ROWS_APART, ROWS_PER_THREAD, half
from ..sm100.config import ALL_SEEN, HALF_KEYS, PAIR, SCORE_COLUMN, VECTOR, WORD_BYTES, thread_and_lanes
from ..sm100.heads64 import LOWER_LANES
from ..sm100.heads64_rows import FRAGMENT, Heads64RowsSm100
from ..sm100.score import LatentRowsSm100
from .abi import STATISTIC_DELTA, STATISTIC_LSE, DqOperands
from .score_rows import WARP_ROWS, store_score_rows
from .sm100_config import DPROBS_COLUMN, TOKENS, DqSm100Smem

RUN_CHUNKS = 2  # of 16 bytes, of a thread's keys of one part of S, in a pair


def make_probs(rS: cute.Tensor, scale_log2: Float32, lse: list[Float32]) -> None:
    """Replace S by P. lse: of the row of every pair of scores."""
    for i in range(0, cute.size(rS), 2):
        shift = (-lse[i // 2],) * 2
        exponents = cute.arch.fma_packed_f32x2((rS[i], rS[i + 1]), (scale_log2, scale_log2), shift)
        rS[i], rS[i + 1] = (cute.math.exp2(exponent, fastmath=True) for exponent in exponents)


def make_dscores(rS: cute.Tensor, dprobs: Any, delta: list[Float32]) -> None:
    """Replace P by dS = P (dP - delta). delta: of the row of every pair of scores."""
    for i in range(0, cute.size(rS), 2):
        differences = cute.arch.add_packed_f32x2((dprobs[i], dprobs[i + 1]), (-delta[i // 2],) * 2)
        rS[i], rS[i + 1] = cute.arch.mul_packed_f32x2((rS[i], rS[i + 1]), differences)


def rounded(rS: cute.Tensor, dtype: type[cutlass.Numeric], factor: Float32 | None = None) -> list[Int32]:
    """Return pairs of numbers, times a factor, rounded."""
    words = []
    for i in range(0, cute.size(rS), 2):
        pair = (rS[i], rS[i + 1])
        if factor is not None:
            pair = cute.arch.mul_packed_f32x2(pair, (factor, factor))
        words.append(pack_pair(*pair, dtype))
    return words


class DqSm100Rows(Heads64RowsSm100):
    """One thread's scores, then P, then dS, in a CTA that works alone: two rows, 16 keys of each."""

    smem: DqSm100Smem

    rows = ROWS_PER_THREAD  # of a thread, ROWS_APART

    def of_pairs(self, of_rows: list[Float32]) -> list[Float32]:
        """Return a number of the row of every pair of scores."""
        return [of_rows[half(i)] for i in range(0, FRAGMENT, 2)]

    def load_dprobs(self) -> Any:
        """Start to load dP."""
        return tcgen05.load_fragment(self.tmem + (LOWER_LANES + SCORE_COLUMN), TILE_KEYS)

    @cute.jit
    def put_probs(self, operands: DqOperands, where: tuple[Int32, Int32], tile: Int32):
        """Write P to memory, by way of the box of dS, when dS of the tile before has been read."""
        if tile > 0:
            self.smem.kv_free.consumer_wait(tile - 1)
        self._store(rounded(self.rS, self.dtype, operands.args.inverse_scale))
        self._copy_rows(operands.args.probs, operands, where)

    def put_dscores(self, operands: DqOperands, where: tuple[Int32, Int32], tile: Int32) -> None:
        """Hand dS to the mma role, and write it to memory. Signal dscores_ready."""
        self._store(rounded(self.rS, self.dtype))
        cute.arch.fence_proxy("async.shared", space="cta")
        self.smem.dscores_ready.producer_commit(tile)
        self._copy_rows(operands.args.dscores, operands, where)

    def _store(self, words: list[Int32]) -> None:
        """Store the thread's share to the box of dS."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        box = Int32(self.smem.sS.toint()) + warp * (WARP_ROWS * BOX_ROW_BYTES)
        place = writer_address(box, cute.arch.lane_idx(), BOX_ROW_BYTES)
        for first in range(0, len(words), 4):
            store_groups(place, 0, first // 4, words[first : first + 4])

    def _copy_rows(self, base: cute.Pointer, operands: DqOperands, where: tuple[Int32, Int32]) -> None:
        store_score_rows(Int32(self.smem.sS.toint()), cute.arch.thread_idx()[0], base, operands, where)


class DqSm100PairRows(LatentRowsSm100):
    """One thread's scores, then P, then dS, in a CTA of a pair: 32 keys of a row, 16 in each part of S."""

    smem: DqSm100Smem

    rows = 1

    def of_pairs(self, of_rows: list[Float32]) -> list[Float32]:
        """Return a number of the row of every pair of scores."""
        return [of_rows[0]] * (HALF_KEYS // 2)

    def read_scores(self, tile: Int32) -> None:
        """Wait scores_ready, signal scores_free. Load the scores of a tile, then swap them by halves: one buffer serves both swaps."""
        geometry = self.smem.geometry
        others = []
        for part in range(geometry.score_parts):
            use = tile * geometry.score_parts + part
            self.smem.scores_ready.consumer_wait(use)
            tcgen05.fence_after_wait()
            others.append(self._take_partial_sums(part, use))
        self.smem.scores_free.consumer_release(tile, cta=geometry.mma_cta)
        for part in range(geometry.score_parts):
            if part > 0:
                self.sync_halves()  # the part before has been read; of the tile before, before its dP, which S has waited for
            self._send_partial_sums(0, others[part])
            self.sync_halves()
            self._add_part(part)

    def _add_part(self, part: int) -> None:
        """Complete a part of the scores by what the other thread of the row has sent."""
        run_keys = self.smem.geometry.run_keys
        for vector in range(run_keys // VECTOR):
            received = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)
            source = aligned(self._exchanged(1 - self.half, vector), VECTOR * WORD_BYTES)
            cute.autovec_copy(cute.make_tensor(source, received.layout), received)
            for i in range(0, VECTOR, 2):
                k = part * run_keys + vector * VECTOR + i
                pair = (received[i], received[i + 1])
                self.rS[k], self.rS[k + 1] = cute.arch.add_packed_f32x2((self.rS[k], self.rS[k + 1]), pair)

    def _exchanged(self, sender: Int32, vector: int) -> cute.Pointer:
        return self.smem.sExchange + ((sender * (self.smem.geometry.run_keys // VECTOR) + vector) * TILE_ROWS + self.row) * VECTOR

    @cute.jit
    def mask_seen(self, tile: Int32):
        """Set scores of keys that do not count to -inf."""
        words = self.smem.seen_words(tile)
        seen = self.own_bits([words.load(), (words + 1).load()])
        if seen != ALL_SEEN:
            self.mask_unseen(seen)

    def load_dprobs(self) -> Any:
        """Start to load dP."""
        return tcgen05.load_columns(self.tmem + DPROBS_COLUMN, HALF_KEYS)

    def put_probs(self, operands: DqOperands, where: tuple[Int32, Int32], tile: Int32) -> None:
        """Write P to memory."""
        self._write(operands.args.probs, operands, where, rounded(self.rS, self.dtype, operands.args.inverse_scale))

    def put_dscores(self, operands: DqOperands, where: tuple[Int32, Int32], tile: Int32) -> None:
        """Hand dS to the mma role, and write it to memory. Signal dscores_ready. dS of the tile before was read before dP came."""
        words = rounded(self.rS, self.dtype)
        line, flip = self.smem.sS + self.row * BOX_ROW_BYTES, self.row % CHUNKS_PER_ROW
        for i in range(0, len(words), VECTOR):
            part, chunk = divmod(i // VECTOR, RUN_CHUNKS)
            place = (PAIR * part + self.half) * RUN_CHUNKS + chunk
            store_vector(line + (place ^ flip) * CHUNK, words[i : i + VECTOR])
        cute.arch.fence_proxy("async.shared", space="cta")
        self.smem.dscores_ready.producer_commit(tile, cta=self.smem.geometry.mma_cta)
        self.let_keys_come(tile)
        self._write(operands.args.dscores, operands, where, words)

    @cute.jit
    def let_keys_come(self, tile: Int32):
        """Signal kv_free of the tile before. Its dQ is complete, since dP is; copies of keys would have held up the stores of dS."""
        if tile > 0:
            self.smem.kv_free.consumer_release(tile - 1)

    @cute.jit
    def _write(self, base: cute.Pointer, operands: DqOperands, where: tuple[Int32, Int32], words: list):
        """Write the thread's share of a row of P or dS to memory, if the row exists: a sector of each part."""
        row, run = first_query_row() + self.row, self.smem.geometry.run_keys
        if row < operands.rows():
            target = base + (operands.score_row(*where, row) + self.half * run)
            for part in cutlass.range_constexpr(self.smem.geometry.score_parts):
                first = part * run // 2
                store_packed_row(target + part * PAIR * run, words[first : first + run // 2], at_once=SECTOR_WORDS)


@dataclass(frozen=True)
class DqSm100ScoreRole:
    """Four warps. create_rows: the state of a thread, DqSm100Rows or DqSm100PairRows."""

    dtype: type[cutlass.Numeric]
    create_rows: Callable[..., Any]

    @cute.jit
    def run(self, operands: DqOperands, smem: DqSm100Smem, tmem: Int32):
        """Wait seen_ready, scores_ready, dprobs_ready, and without a pair kv_free. Write P and dS.

        Signal scores_free, dprobs_free, dscores_ready, dq_ready.
        """
        schedule = operands.schedule
        thread, lanes = thread_and_lanes(tmem)
        rows = self.create_rows(self.dtype, smem, lanes, thread, operands.scale_log2)
        token, first = schedule.first_work_tile()
        tile, number = Int32(0), Int32(0)
        statistics, following = (cute.make_rmem_tensor(cute.make_layout(2 * rows.rows), Float32) for _ in range(2))
        self.load_statistics(operands, rows, token, following)
        while token <= schedule.last_request():
            tiles = schedule.tile_range(token, first).tiles
            next_token = schedule.work_tile(token, first).next_req
            statistics.store(following.load())
            self.load_statistics(operands, rows, next_token, following)
            begun = Boolean(False)
            for t in cutlass.range(tiles, unroll=1):
                begun = begun | self.score_tile(operands, smem, rows, statistics, (token, t * TILE_KEYS), tile + t)
            if tiles > 0:
                self.publish(smem, number, begun, thread)
                number = number + 1
            tile = tile + tiles
            token = next_token

    @cute.jit
    def publish(self, smem: DqSm100Smem, number: Int32, begun: Boolean, thread: Int32):
        """Say whether any tile of a token has keys. Signal dq_ready, in one warp. number: of tokens that have tiles."""
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            if thread == 0:
                (smem.sBegun + number % TOKENS).store(cutlass.select_(begun, Int32(1), Int32(0)))
            smem.dq_ready.producer_commit(number)

    @cute.jit
    def load_statistics(self, operands: DqOperands, rows: Any, token: Int32, target: cute.Tensor):
        """Load lse' and delta' of the thread's rows. Rows and tokens that do not exist have those of a row without gradient."""
        for which in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(rows.rows):
                row = first_query_row() + rows.row + r * ROWS_APART
                value = Float32(Float32.inf if which == STATISTIC_LSE else 0)
                if (token <= operands.schedule.last_request()) & (row < operands.rows()):
                    value = operands.statistic_of(which, token, row).load()
                target[which * rows.rows + r] = value

    @cute.jit
    def score_tile(
        self, operands: DqOperands, smem: DqSm100Smem, rows: Any, statistics: cute.Tensor, where: tuple[Int32, Int32], tile: Int32
    ):  # fmt: skip
        """Compute P and dS of a tile. Return whether it has keys.

        statistics: lse' and delta' of the thread's rows. where: token, and position in its list.
        """
        lse, delta = (
            rows.of_pairs([statistics[which * rows.rows + r] for r in range(rows.rows)]) for which in (STATISTIC_LSE, STATISTIC_DELTA)
        )
        smem.seen_ready.consumer_wait(tile)
        filled = smem.has_keys(tile)
        if filled:
            rows.read_scores(tile)
            rows.mask_seen(tile)
            make_probs(rows.rS, rows.scale_log2, lse)
            rows.put_probs(operands, where, tile)
            smem.dprobs_ready.consumer_wait(tile)
            tcgen05.fence_after_wait()
            dprobs = rows.load_dprobs()
            tcgen05.await_loads()
            tcgen05.fence_before_signal()
            smem.dprobs_free.consumer_release(tile, cta=smem.geometry.mma_cta)
            make_dscores(rows.rS, dprobs, delta)
            rows.put_dscores(operands, where, tile)
        else:
            for part in cutlass.range_constexpr(smem.geometry.score_parts):
                smem.scores_ready.consumer_wait(tile * smem.geometry.score_parts + part)
            smem.scores_free.consumer_release(tile, cta=smem.geometry.mma_cta)
            if cutlass.const_expr(not smem.geometry.paired):  # noqa: SIM102  # of the DSL, which knows the one and not the other
                if tile > 0:
                    smem.kv_free.consumer_wait(tile - 1)
            smem.dprobs_ready.consumer_wait(tile)
            smem.dprobs_free.consumer_release(tile, cta=smem.geometry.mma_cta)
            smem.dscores_ready.producer_commit(tile, cta=smem.geometry.mma_cta)
            if cutlass.const_expr(smem.geometry.paired):
                rows.let_keys_come(tile)
        return filled

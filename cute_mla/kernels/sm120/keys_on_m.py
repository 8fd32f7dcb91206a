"""The role that multiplies for up to 64 rows, keys on M: S^T = K Q^T, softmax, O^T += V^T P^T, epilogue.

Eight warps in four pairs, each of 16 rows. A warp has S of 8 rows over all keys of a stage and O of the pair's 16 rows over half of the
columns: 60 registers of Q, 128 of O. Columns of Q behind the first 480 wait in shared memory, where each thread finds its own words: with
more registers of Q none are left to ask for K and V ahead. The softmax of a row stays within a warp. P and the factors of O go to the other
one through shared memory:

    S, P of 8 rows -> barrier of a pair -> O += P V of 16 rows

Two pairs share two schedulers. The second one begins S of a stage when the first one has half of its own: else both would make their
softmax at the same time, and no products. It has passed that barrier when it frees the stage, so one for each stage is enough.

Who passes the barrier of a stage knows that the other warp has read P of the stage before: two buffers of P take turns.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.experimental import primitives

from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import ELEMENT_BYTES
from ..attention.lengths import RowRange
from ..attention.scheduler import KeyTile, LatentOperands, WorkTile
from ..primitives.arithmetic import pack_pair, product
from ..primitives.copies import CHUNK, load_groups, smem_pointer
from ..primitives.rows import load_words, registers, store_vector
from ..primitives.warp_products import SUMS, K, M, N, multiply, row_operand, wide_operand
from .attend import CHUNK_WORDS, FLOAT_BYTES, chunk_at
from .cta import KEYS, LANES, MATH_BARRIER, P_PITCH, REGISTER_COLUMNS, SCHEDULERS, TURN_BARRIER, Sm120Smem
from .roles import HALVES, Kept, Sm120Role, Sm120Rows, by_destination, store_lse

PAIR_WARPS = 2
PAIR_ROWS = PAIR_WARPS * N
WARPS = TILE_ROWS // N
TURNS = 2  # buffers of P
ROW_LANES = (4, 8, 16)  # apart, which have the same rows
B_WORDS = 2  # of a lane in a product
STEPS_IN_REGISTERS = REGISTER_COLUMNS // K
TURN_PAIRS = SCHEDULERS // PAIR_WARPS  # pairs behind which another one has the same schedulers
TURN_THREADS = 2 * PAIR_WARPS * LANES
AHEAD = 2  # fragments of K that are asked for before the products of one
NO_KEYS = -1.0  # the weight of a row that attends to nothing
STORED_COLUMNS = 2 * M  # of O, that pass through shared memory at a time


@dataclass(frozen=True)
class Sm120PairThread:
    """A thread of the role. warp: of eight, uniform."""

    warp: Int32
    lane: Int32

    @property
    def pair(self) -> Int32:
        """Return the warp's pair."""
        return self.warp // PAIR_WARPS

    @property
    def side(self) -> Int32:
        """Return the half of the columns of O that the warp has."""
        return self.warp % PAIR_WARPS

    @property
    def row(self) -> Int32:
        """Return the first of the thread's two rows of S, among those of the CTA."""
        return self.warp * N + self.lane % 4 * HALVES


@dataclass(frozen=True)
class Sm120PairRows(Sm120Rows):
    """rQ: 16-bit pairs of the warp's rows, as B. turn: int32 (1): the buffer of P that comes next."""

    rQ: cute.Tensor
    turn: cute.Tensor


class Sm120KeysOnMRole(Sm120Role):
    """Eight warps. A thread's rows of S are neighbours."""

    kept_floats = 2 * TILE_ROWS
    query_bytes = ELEMENT_BYTES  # of an element of Q in global memory

    def thread(self) -> Sm120PairThread:
        """Return this thread."""
        return Sm120PairThread(cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx())

    def create_rows(self, scale: Float32) -> Sm120PairRows:
        """Return registers for the rows of a thread."""
        rows = Sm120Rows.create(scale, self.results, self.d_v // PAIR_WARPS * PAIR_ROWS // LANES)
        turn = cute.make_rmem_tensor(cute.make_layout(1), Int32)
        turn[0] = Int32(0)
        return Sm120PairRows(**vars(rows), rQ=registers(STEPS_IN_REGISTERS * B_WORDS), turn=turn)

    def begin(self, operands: LatentOperands, smem: Sm120Smem, rows: Sm120PairRows, thread: Sm120PairThread, req: Int32) -> None:
        """Load Q: of a row that does not exist that of the nearest one, whose results are not stored.

        16 bytes of a row a lane, which pass through the rows of P that the warp itself writes, 32 columns at a time.
        """
        stored = operands.row_range(req)
        row = stored.nearest(operands.first_row() + thread.warp * N + thread.lane // 4)
        lane_bytes = CHUNK // ELEMENT_BYTES * self.query_bytes
        first = stored.q_row(row).toint() + thread.lane % 4 * lane_bytes
        parts = [registers(lane_bytes // FLOAT_BYTES) for _ in range(self.d_qk // STORED_COLUMNS)]
        for i, part in enumerate(parts):
            load_words(part, first + i * STORED_COLUMNS * self.query_bytes, Boolean(True))
        for i, asked in enumerate(parts):
            part = self.query_words(asked)
            buffer = self.own_rows(smem, thread, i % TURNS)
            cute.autovec_copy(part, chunk_at(buffer + lane_of_row(thread)))
            cute.arch.sync_warp()
            words = load_groups(buffer + lane_of_matrix(thread), transposed=False)
            if B_WORDS * 2 * i < cute.size(rows.rQ):
                for word in range(CHUNK_WORDS):
                    rows.rQ[CHUNK_WORDS * i + word] = words[word]
            else:
                for word in range(CHUNK_WORDS):
                    part[word] = words[word]
                cute.autovec_copy(part, own_words(smem, thread, 2 * i))

    def query_words(self, words: cute.Tensor) -> cute.Tensor:
        """Return 8 columns of a row of Q as products take them."""
        return words

    @cute.jit
    def attend_to(
        self, operands: LatentOperands, smem: Sm120Smem, rows: Sm120PairRows, thread: Sm120PairThread, stage: Int32, keys: KeyTile
    ):  # fmt: skip
        """Attend to the keys of a stage, if the pair has a row."""
        if operands.first_row() + thread.pair * PAIR_ROWS < operands.rows():
            if thread.pair >= TURN_PAIRS:
                cute.arch.barrier(barrier_id=turn_of(thread, stage), number_of_threads=TURN_THREADS)
            self.attend_with_pair(operands, smem, rows, thread, stage, keys)

    def attend_with_pair(
        self, operands: LatentOperands, smem: Sm120Smem, rows: Sm120PairRows, thread: Sm120PairThread, stage: Int32, keys: KeyTile
    ) -> None:  # fmt: skip
        """Attend to the keys of a stage."""
        place = smem.sK.toint() + stage * (KEYS * self.pitch)
        turn = (thread.pair < TURN_PAIRS) & (operands.first_row() + (thread.pair + TURN_PAIRS) * PAIR_ROWS < operands.rows())
        scores = self.scores(smem, rows, place, thread, lambda: give_turn_if(turn, thread, stage))
        self.mask.apply(operands, smem, thread, scores, stage, keys)
        rows.results.see_stage(self, smem, rows, thread, scores, keys)
        self.follow(smem, rows, thread, scores)
        sync_pair(thread)
        self.rescale(smem, rows, thread)
        self.add_values(smem, rows, place, thread)
        rows.turn[0] = rows.turn[0] ^ 1

    def scores(
        self, smem: Sm120Smem, rows: Sm120PairRows, keys: Int32, thread: Sm120PairThread, give_turn: Callable[[], None]
    ) -> cute.Tensor:
        """Return S^T of the warp's 8 rows: of a thread keys lane / 4 + {0, 8, 16, 24} of its two rows."""
        left = keys + row_operand(thread.lane, self.pitch)
        total = cute.make_rmem_tensor(cute.make_layout(KEYS // M * SUMS), Float32)
        total.fill(0.0)
        places = [(step, tile) for step in range(self.d_qk // K) for tile in range(KEYS // M)]

        def start(place: tuple[int, int]) -> Any:
            step, tile = place
            return load_groups(left + tile * M * self.pitch + step * K * ELEMENT_BYTES, transposed=False)

        ahead = [start(place) for place in places[:AHEAD]]
        for number, (step, tile) in enumerate(places):
            if step < STEPS_IN_REGISTERS:
                b = [rows.rQ[B_WORDS * step + i] for i in range(B_WORDS)]
            elif step % 2 == 0 and tile == 0:
                held = registers(CHUNK_WORDS)
                cute.autovec_copy(own_words(smem, thread, step), held)
            if step >= STEPS_IN_REGISTERS:
                b = [held[step % 2 * B_WORDS + i] for i in range(B_WORDS)]
            ahead += [start(place) for place in places[number + AHEAD : number + AHEAD + 1]]
            cute.arch.sync_warp()  # ptxas would ask for a fragment right before its products
            multiply(total, tile * SUMS, ahead[number], b, self.dtype)
            if number + 1 == len(places) // 2:
                give_turn()
        return total

    def follow(self, smem: Sm120Smem, rows: Sm120PairRows, thread: Sm120PairThread, scores: cute.Tensor) -> None:
        """Write P of the warp's rows, unnormalised, and factors for O."""
        mine = self.by_row([scores[i] for i in range(cute.size(scores))])
        tops = self.tops(None, thread, [scores[i] for i in range(cute.size(scores))])
        steps = [rows.follow(which, mine[which], product(tops[which], rows.scale)) for which in range(HALVES)]
        words = [pack_pair(steps[0].probs[i], steps[1].probs[i], self.dtype) for i in range(KEYS // N)]
        self.store_matrices(self.own_rows(smem, thread, rows.turn[0]) + lane_of_matrix(thread), words)
        self.keep(self.factors(smem, rows), thread, [step.alpha for step in steps])

    @staticmethod
    def own_rows(smem: Sm120Smem, thread: Sm120PairThread, turn: Int32 | int) -> Int32:
        """Return the address of the warp's rows in a buffer of P."""
        return smem.sP.toint() + (turn * TILE_ROWS + thread.warp * N) * P_PITCH

    @staticmethod
    def store_matrices(place: Int32, words: list[Int32]) -> None:
        """Store four matrices of 8 rows, which are neighbours in a row, by columns."""
        primitives.stmatrix(smem_pointer(place).raw_ptr(), words, primitives.MMALayout.COL)

    @staticmethod
    def factors(smem: Sm120Smem, rows: Sm120PairRows) -> cute.Pointer:
        """Return factors of O by row."""
        return smem.sRows + rows.turn[0] * TILE_ROWS

    def pair_factors(self, smem: Sm120Smem, rows: Sm120PairRows, thread: Sm120PairThread) -> list[Float32]:
        """Return the factors of the thread's four rows of O."""
        first = self.factors(smem, rows) + (thread.pair * PAIR_ROWS + thread.lane % 4 * HALVES)
        return [(first + group * N + i).load() for group in range(PAIR_WARPS) for i in range(HALVES)]

    @cute.jit
    def rescale(self, smem: Sm120Smem, rows: Sm120PairRows, thread: Sm120PairThread):
        """Bring O to the references of P."""
        factors = self.pair_factors(smem, rows, thread)
        moved = (factors[0] != 1.0) | (factors[1] != 1.0) | (factors[2] != 1.0) | (factors[3] != 1.0)
        if cute.arch.vote_any_sync(moved):
            for i in cutlass.range_constexpr(cute.size(rows.rO)):
                rows.rO[i] = rows.rO[i] * factors[row_of_sum(i)]

    def add_values(self, smem: Sm120Smem, rows: Sm120PairRows, keys: Int32, thread: Sm120PairThread) -> None:
        """Add P V of the pair's rows and the warp's columns to O."""
        probs = smem.sP.toint() + (rows.turn[0] * TILE_ROWS + thread.pair * PAIR_ROWS) * P_PITCH + wide_operand(thread.lane, P_PITCH)
        columns = self.d_v // PAIR_WARPS
        left = keys + thread.side * (columns * ELEMENT_BYTES) + wide_operand(thread.lane, self.pitch)
        places = [(step, tile) for step in range(KEYS // K) for tile in range(columns // M)]
        following = load_groups(left)
        for (step, tile), after in zip(places, [*places[1:], None], strict=True):
            if tile == 0:
                b = load_groups(probs + step * K * ELEMENT_BYTES, transposed=False)
            a = following
            if after is not None:  # ahead of the products, which would else wait for it
                following = load_groups(left + after[0] * K * self.pitch + after[1] * M * ELEMENT_BYTES)
            for group in range(PAIR_WARPS):
                multiply(rows.rO, SUMS * (PAIR_WARPS * tile + group), a, b[2 * group : 2 * group + 2], self.dtype)

    @staticmethod
    def query_row(operands: LatentOperands, thread: Sm120PairThread, which: int) -> Int32:
        """Return one of the thread's rows, among all rows that CTAs share out."""
        return operands.first_row() + thread.row + which

    @staticmethod
    def first_key(thread: Sm120PairThread) -> Int32:
        """Return the key in a stage of a thread's first score."""
        return thread.lane // 4

    @staticmethod
    def key_behind_first(i: int) -> int:
        """Return by how many keys the key of a thread's score lies behind that of the first one."""
        return i // HALVES * N

    @staticmethod
    def by_row(scores: list[Float32]) -> list[list[Float32]]:
        """Return the thread's scores of a stage, by row."""
        return [scores[0::HALVES], scores[1::HALVES]]

    def tops(self, place: cute.Pointer | None, thread: Sm120PairThread, scores: list[Float32]) -> list[Float32]:
        """Return the maxima of the thread's rows."""
        largest = []
        for a, b, c, d in self.by_row(scores):
            largest.append(over_row(cute.arch.fmax(cute.arch.fmax(a, b), cute.arch.fmax(c, d)), cute.arch.fmax))
        return largest

    def keep_sums(self, place: cute.Pointer, thread: Sm120PairThread, shares: list[Float32]) -> None:
        """Write the sums of the thread's rows. shares: the thread's."""
        self.keep(place, thread, [over_row(share, operator.add) for share in shares])

    @staticmethod
    def sum_of(place: cute.Pointer, thread: Sm120PairThread, which: int) -> Float32:
        """Return the sum of a row."""
        return (place + (thread.row + which)).load()

    kept_number = sum_of

    @staticmethod
    def kept(smem: Sm120Smem) -> Kept:
        """Return the places of what is kept; maxima are not."""
        assert smem.sKept is not None, "an op with results has a place for them"
        return Kept(None, smem.sKept, smem.sKept + TILE_ROWS)

    def keep(self, place: cute.Pointer, thread: Sm120PairThread, values: list[Float32]) -> None:
        """Write a number of each of the warp's rows. place: fp32 [row]."""
        self.store_if(thread.lane < 4, place + thread.row, values)

    @cute.jit
    def store_if(self, wanted: Boolean, place: cute.Pointer, values: list[Float32]):
        """Store a number of each of the thread's rows."""
        if wanted:
            for which in cutlass.range_constexpr(HALVES):
                (place + which).store(values[which])

    def finish(
        self, operands: LatentOperands, smem: Sm120Smem, rows: Sm120PairRows, thread: Sm120PairThread, req: Int32, work_tile: WorkTile
    ) -> None:  # fmt: skip
        """Write out or out_accum, and lse: natural log if the request is not cut, else base 2."""
        stored = operands.row_range(req)
        weights = [self.finish_row(operands, smem, stored, rows, thread, which, work_tile) for which in range(HALVES)]
        self.keep(self.factors(smem, rows), thread, weights)
        sync_pair(thread)
        factors = self.pair_factors(smem, rows, thread)
        for i in range(cute.size(rows.rO)):
            factor = factors[row_of_sum(i)]
            rows.rO[i] = cutlass.select_(factor == NO_KEYS, Float32(0), rows.rO[i] * factor)
        by_destination(
            work_tile,
            lambda: self.store_out(smem, stored, rows, thread),
            lambda: self.store_accum(operands, stored, rows, thread, work_tile),
        )
        rows.turn[0] = rows.turn[0] ^ 1

    @cute.jit
    def finish_row(
        self, operands: LatentOperands, smem: Sm120Smem, stored: RowRange, rows: Sm120PairRows, thread: Sm120PairThread,
        which: cutlass.Constexpr[int], work_tile: WorkTile,
    ) -> Float32:  # fmt: skip
        """Write lse of a row. Return the weight of its O."""
        total, reference = over_row(rows.rSum[which], operator.add), rows.reference[which]
        row = self.query_row(operands, thread, which)
        empty = total == 0.0
        weight = self.row_scale.weight(operands, lambda: work_tile, row, total, reference)
        if stored.holds(row) & (thread.lane < 4):
            store_lse(operands, stored, row, (total, reference), work_tile)
            if cutlass.const_expr(work_tile.always_direct):
                rows.results.store(self, smem, stored, thread, row, which, (total, reference))
        return cutlass.select_(empty, Float32(NO_KEYS), weight)

    @cute.jit
    def store_out(self, smem: Sm120Smem, stored: RowRange, rows: Sm120PairRows, thread: Sm120PairThread):
        """Write the warp's columns of out, by way of the rows of P that the warp itself writes."""
        buffers = [self.own_rows(smem, thread, turn) for turn in range(TURNS)]
        own = [stored.operands.first_row() + thread.pair * PAIR_ROWS + group * N + thread.lane // 4 for group in range(PAIR_WARPS)]
        column = thread.side * (self.d_v // PAIR_WARPS) + thread.lane % 4 * (CHUNK // ELEMENT_BYTES)
        outs = [stored.out_row(stored.nearest(row)) + column for row in own]
        for first in cutlass.range_constexpr(0, self.d_v // PAIR_WARPS, STORED_COLUMNS):
            for group in cutlass.range_constexpr(PAIR_WARPS):
                words = []
                for tile in cutlass.range_constexpr(STORED_COLUMNS // M):
                    at = SUMS * (PAIR_WARPS * (first // M + tile) + group)
                    words += [pack_pair(rows.rO[at + 2 * i], rows.rO[at + 2 * i + 1], self.dtype) for i in range(2)]
                self.store_matrices(buffers[group] + lane_of_matrix(thread), words)
            cute.arch.sync_warp()
            for group in cutlass.range_constexpr(PAIR_WARPS):
                held = registers(CHUNK_WORDS)
                cute.autovec_copy(chunk_at(buffers[group] + lane_of_row(thread)), held)
                if stored.holds(own[group]):
                    store_vector(outs[group] + first, [held[i] for i in range(CHUNK_WORDS)])
            cute.arch.sync_warp()

    @cute.jit
    def store_accum(self, operands: LatentOperands, stored: RowRange, rows: Sm120PairRows, thread: Sm120PairThread, work_tile: WorkTile):
        """Write the warp's columns of out_accum: eight lanes have a whole sector of a row."""
        for which in cutlass.range_constexpr(HALVES * PAIR_WARPS):
            group, i = divmod(which, HALVES)
            row = operands.first_row() + thread.pair * PAIR_ROWS + group * N + thread.lane % 4 * HALVES + i
            if stored.holds(row):
                column = thread.side * (self.d_v // PAIR_WARPS) + thread.lane // 4
                out = operands.out_accum + (operands.accum_row(work_tile, row) * self.d_v + column)
                for tile in cutlass.range_constexpr(self.d_v // PAIR_WARPS // M):
                    at = SUMS * (PAIR_WARPS * tile + group)
                    (out + tile * M).store(rows.rO[at + i])
                    (out + tile * M + N).store(rows.rO[at + HALVES + i])


def turn_of(thread: Sm120PairThread, stage: Int32) -> Int32:
    """Return the barrier by which a pair lets the other one of its schedulers begin a stage."""
    return TURN_BARRIER + stage * TURN_PAIRS + thread.pair % TURN_PAIRS


@cute.jit
def give_turn_if(wanted: Boolean, thread: Sm120PairThread, stage: Int32):
    """Let the other pair of the schedulers begin a stage, if wanted."""
    if wanted:
        cute.arch.barrier_arrive(barrier_id=turn_of(thread, stage), number_of_threads=TURN_THREADS)


def sync_pair(thread: Sm120PairThread) -> None:
    """Wait for both warps of a pair."""
    cute.arch.barrier(barrier_id=MATH_BARRIER + thread.pair, number_of_threads=PAIR_WARPS * LANES)


def own_words(smem: Sm120Smem, thread: Sm120PairThread, step: int) -> cute.Tensor:
    """Return this thread's words of Q of two steps, of those that wait in shared memory. step: an even one."""
    place = (step - STEPS_IN_REGISTERS) // 2 * WARPS * LANES + thread.warp * LANES + thread.lane
    return chunk_at(smem.sQ.toint() + place * CHUNK)


def lane_of_matrix(thread: Sm120PairThread) -> Int32:
    """Return the offset of a lane's row of four matrices that are neighbours in rows of P."""
    return thread.lane % N * P_PITCH + thread.lane // N * CHUNK


def lane_of_row(thread: Sm120PairThread) -> Int32:
    """Return the offset of a lane's 16 bytes of 64, of the row of P that four lanes share."""
    return thread.lane // 4 * P_PITCH + thread.lane % 4 * CHUNK


def row_of_sum(i: int) -> int:
    """Return which of a thread's four rows of O a sum belongs to."""
    return i // SUMS % PAIR_WARPS * HALVES + i % HALVES


def over_row(value: Float32, both: Callable[[Any, Any], Any]) -> Float32:
    """Return what the eight lanes of a row of S have, by an operation of two."""
    for lanes in ROW_LANES:
        value = both(value, cute.arch.shuffle_sync_bfly(value, lanes))
    return value


def products_of_stage(d_qk: int, d_v: int) -> int:
    """Return the products of a stage in a warp's code."""
    return KEYS // M * (d_qk // K) + d_v // PAIR_WARPS // M * PAIR_WARPS * (KEYS // K)

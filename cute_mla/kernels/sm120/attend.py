"""The role that multiplies for up to 16 rows: S, softmax, O, epilogue.

Four warps. Warp w has S of keys 8 w .. 8 w + 7 of a stage over all columns, and O of a fourth of the columns over all keys. So maxima and P
go through shared memory, behind a named barrier each:

    maxima of 8 keys -> barrier -> reference, P of 8 keys -> barrier -> P of all keys, O += P V

Whoever passes the first barrier of a stage has read P of the stage before, and whoever passes the second has read the maxima of this one:
neither needs a second buffer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from ...spec.mla import ELEMENT_BYTES
from ..attention.lengths import RowRange
from ..attention.scheduler import KeyTile, LatentOperands, WorkTile
from ..primitives.arithmetic import pack_pair, product
from ..primitives.copies import CHUNK, load_groups
from ..primitives.rows import aligned, load_words, registers, store_word
from ..primitives.warp_products import SUMS, K, N, column_operands, multiply, row_operand
from .cta import KEYS, LANES, MATH_BARRIER, P_PITCH, ROWS, WARP_KEYS, WARPS, Sm120Smem, Sm120Thread, first_query_row
from .roles import HALVES, Kept, Sm120Role, Sm120Rows, by_destination, store_lse

CHAINS = 4  # sums of S that are added up at the end: products of one chain wait for each other
FLOAT_BYTES = 4
CHUNK_WORDS = CHUNK // 4
QUAD_LANES = (1, 2)  # apart, which have the same rows


def sync() -> None:
    """Wait for all warps of the role."""
    cute.arch.barrier(barrier_id=MATH_BARRIER, number_of_threads=WARPS * LANES)


class Sm120AttendRole(Sm120Role):
    """Four warps, heads on M: 16 rows of a work tile."""

    kept_floats = 3 * WARPS * ROWS
    query_bytes = ELEMENT_BYTES  # of an element of Q in global memory

    def thread(self) -> Sm120Thread:
        """Return this thread."""
        return Sm120Thread.create()

    def create_rows(self, scale: Float32) -> Sm120Rows:
        """Return registers for the rows of a thread."""
        return Sm120Rows.create(scale, self.results, HALVES * self.d_v // WARPS // 4)

    def begin(self, operands: LatentOperands, smem: Sm120Smem, rows: Sm120Rows, thread: Sm120Thread, req: Int32) -> None:
        """Begin a work tile: bring Q, and wait for all warps."""
        # all have read Q of the work tile before, ahead of the barrier for its sums; these are read ahead of the next barrier
        self.load_queries(operands.row_range(req), smem, thread)
        sync()

    def load_queries(self, stored: RowRange, smem: Sm120Smem, thread: Sm120Thread) -> None:
        """Bring this CTA's rows of Q to shared memory, 16 bytes at a time; rows that do not exist as zeros. All are asked for at first."""
        chunks, stored_bytes = self.d_qk * self.query_bytes // CHUNK, CHUNK * ELEMENT_BYTES // self.query_bytes
        places = [(thread.warp + step * WARPS, first + thread.lane) for step in range(ROWS // WARPS) for first in range(0, chunks, LANES)]
        asked = []
        for place, chunk in places:
            row, words = first_query_row() + place, registers(CHUNK_WORDS)
            load_words(words, stored.q_row(stored.nearest(row)).toint() + chunk * CHUNK, stored.holds(row) & (chunk < chunks))
            asked.append(words)
        for (place, chunk), words in zip(places, asked, strict=True):
            self.store_chunk_if(chunk < chunks, smem.sQ.toint() + place * self.pitch + chunk * stored_bytes, words)

    @cute.jit
    def store_chunk_if(self, wanted: Boolean, target: Int32, words: cute.Tensor):
        """Store 16 bytes, if wanted."""
        if wanted:
            cute.autovec_copy(words, chunk_at(target))

    def attend_to(
        self, operands: LatentOperands, smem: Sm120Smem, rows: Sm120Rows, thread: Sm120Thread, stage: Int32, keys: KeyTile
    ) -> None:  # fmt: skip
        """Attend to the keys of a stage."""
        place = smem.sK.toint() + stage * (KEYS * self.pitch)
        scores = self.scores(smem, place, thread)
        self.mask.apply(operands, smem, thread, scores, stage, keys)
        rows.results.see_stage(self, smem, rows, thread, scores, keys)
        self.follow(smem, rows, thread, scores)
        self.add_values(smem, rows, place, thread)

    def scores(self, smem: Sm120Smem, keys: Int32, thread: Sm120Thread) -> cute.Tensor:
        """Return S of the warp's 8 keys: rows, columns as in primitives/warp_products.py."""
        left = smem.sQ.toint() + row_operand(thread.lane, self.pitch)
        right = keys + thread.warp * (WARP_KEYS * self.pitch) + column_operands(thread.lane, self.pitch)
        chains = cute.make_rmem_tensor(cute.make_layout(CHAINS * SUMS), Float32)
        chains.fill(0.0)
        for step in range(self.d_qk // K):
            if step % 2 == 0:
                both = load_groups(right + step * K * ELEMENT_BYTES, transposed=False)
            a = load_groups(left + step * K * ELEMENT_BYTES, transposed=False)
            multiply(chains, step % CHAINS * SUMS, a, both[2 * (step % 2) : 2 * (step % 2) + 2], self.dtype)
        total = cute.make_rmem_tensor(cute.make_layout(SUMS), Float32)
        for i in range(SUMS):
            total[i] = (chains[i] + chains[SUMS + i]) + (chains[2 * SUMS + i] + chains[3 * SUMS + i])
        return total

    @cute.jit
    def follow(self, smem: Sm120Smem, rows: Sm120Rows, thread: Sm120Thread, scores: cute.Tensor):
        """Write P of the warp's keys, unnormalised, and bring the state to its reference."""
        tops = self.tops(smem.sRows, thread, [scores[i] for i in range(SUMS)])
        alphas = []
        for half in cutlass.range_constexpr(HALVES):
            step = rows.follow(half, [scores[2 * half], scores[2 * half + 1]], product(tops[half], rows.scale))
            alphas.append(step.alpha)
            place = smem.sP.toint() + (thread.row + half * N) * P_PITCH + (thread.warp * WARP_KEYS + thread.column) * ELEMENT_BYTES
            cute.make_ptr(Int32, place, cute.AddressSpace.smem, assumed_align=4).store(pack_pair(step.probs[0], step.probs[1], self.dtype))
        if cute.arch.vote_any_sync((alphas[0] != 1.0) | (alphas[1] != 1.0)):
            for i in cutlass.range_constexpr(cute.size(rows.rO)):
                rows.rO[i] = rows.rO[i] * alphas[i // 2 % HALVES]
        sync()

    @staticmethod
    def query_row(operands: LatentOperands, thread: Sm120Thread, half: int) -> Int32:
        """Return one of the thread's rows, among all rows that CTAs share out."""
        return first_query_row() + thread.row + half * N

    @staticmethod
    def first_key(thread: Sm120Thread) -> Int32:
        """Return the key in a stage of a thread's first score."""
        return thread.warp * WARP_KEYS + thread.column

    @staticmethod
    def key_behind_first(i: int) -> int:
        """Return by how many keys the key of a thread's score lies behind that of the first one."""
        return i % 2

    @staticmethod
    def by_row(scores: list[Float32]) -> list[list[Float32]]:
        """Return the thread's scores of a stage, by row."""
        return [scores[:2], scores[2:]]

    def tops(self, place: cute.Pointer, thread: Sm120Thread, scores: list[Float32]) -> list[Float32]:
        """Return the maxima of the thread's rows, of all warps' keys. place: fp32 [warp][row] of shared memory. Waits for all warps."""
        maxima = [over_quad(cute.arch.fmax(a, b), cute.arch.fmax) for a, b in self.by_row(scores)]
        self.keep(place, thread, maxima)
        sync()
        return [self.over_warps(place, thread, half, cute.arch.fmax) for half in range(HALVES)]

    def keep_sums(self, place: cute.Pointer, thread: Sm120Thread, shares: list[Float32]) -> None:
        """Write the warp's part of a sum of each of its rows. shares: the thread's."""
        self.keep(place, thread, [over_quad(share, operator.add) for share in shares])

    def sum_of(self, place: cute.Pointer, thread: Sm120Thread, half: int) -> Float32:
        """Return the sum of a row, of which all warps have written their parts."""
        return self.over_warps(place, thread, half, operator.add)

    @staticmethod
    def kept(smem: Sm120Smem) -> Kept:
        """Return the places of what is kept."""
        assert smem.sKept is not None, "an op with results has a place for them"
        return Kept(*(smem.sKept + i * WARPS * ROWS for i in range(3)))

    def keep(self, place: cute.Pointer, thread: Sm120Thread, values: list[Float32]) -> None:
        """Write a number of each of the warp's rows. place: fp32 [warp][row]."""
        self.store_if(thread.column == 0, place + (thread.warp * ROWS + thread.row), values)

    @staticmethod
    def kept_number(place: cute.Pointer, thread: Sm120Thread, half: int) -> Float32:
        """Return a number of a row that all warps have kept."""
        return (place + (thread.row + half * N)).load()

    @staticmethod
    def over_warps(place: cute.Pointer, thread: Sm120Thread, half: int, both: Callable[[Any, Any], Any]) -> Float32:
        """Return what all warps have written of a row, by an operation of two."""
        top = place + (thread.row + half * N)
        found = [(top + warp * ROWS).load() for warp in range(WARPS)]
        return both(both(found[0], found[1]), both(found[2], found[3]))

    @cute.jit
    def store_if(self, wanted: Boolean, place: cute.Pointer, values: list[Float32]):
        """Store a number of each of the thread's rows."""
        if wanted:
            for half in cutlass.range_constexpr(HALVES):
                (place + half * N).store(values[half])

    def add_values(self, smem: Sm120Smem, rows: Sm120Rows, keys: Int32, thread: Sm120Thread) -> None:
        """Add P V of the warp's columns to O."""
        left = smem.sP.toint() + row_operand(thread.lane, P_PITCH)
        columns = self.d_v // WARPS
        right = keys + thread.warp * (columns * ELEMENT_BYTES) + row_operand(thread.lane, self.pitch)
        for step in range(KEYS // K):
            a = load_groups(left + step * K * ELEMENT_BYTES, transposed=False)
            for pair in range(columns // (2 * N)):
                b = load_groups(right + step * K * self.pitch + pair * (2 * N * ELEMENT_BYTES))
                for side in range(2):
                    multiply(rows.rO, SUMS * (2 * pair + side), a, b[2 * side : 2 * side + 2], self.dtype)

    @cute.jit
    def finish(self, operands: LatentOperands, smem: Sm120Smem, rows: Sm120Rows, thread: Sm120Thread, req: Int32, work_tile: WorkTile):
        """Write out or out_accum, and lse: natural log if the request is not cut, else base 2."""
        self.keep_sums(smem.sRows, thread, [rows.rSum[half] for half in range(HALVES)])
        sync()
        stored = operands.row_range(req)
        for half in cutlass.range_constexpr(HALVES):
            total = self.sum_of(smem.sRows, thread, half)
            row = self.query_row(operands, thread, half)
            if stored.holds(row):
                self.store_row(operands, smem, stored, rows, thread, row, half, total, work_tile)

    @cute.jit
    def store_row(
        self, operands: LatentOperands, smem: Sm120Smem, stored: RowRange, rows: Sm120Rows, thread: Sm120Thread, row: Int32,
        half: cutlass.Constexpr[int], total: Float32, work_tile: WorkTile,
    ):  # fmt: skip
        """Write the warp's columns of a row of O, and in the first warp its lse."""
        reference = rows.reference[half]
        empty = total == 0.0
        weight = cutlass.select_(empty, Float32(0), self.row_scale.weight(operands, lambda: work_tile, row, total, reference))
        column = thread.warp * (self.d_v // WARPS) + thread.column
        values = [
            [cutlass.select_(empty, Float32(0), rows.rO[4 * n + 2 * half + i]) * weight for i in range(2)]
            for n in range(cute.size(rows.rO) // 4)
        ]
        by_destination(
            work_tile,
            lambda: self.store_out(stored, row, column, values),
            lambda: self.store_accum(operands, work_tile, row, column, values),
        )
        if (thread.warp == 0) & (thread.column == 0):
            store_lse(operands, stored, row, (total, reference), work_tile)
            if cutlass.const_expr(work_tile.always_direct):
                rows.results.store(self, smem, stored, thread, row, half, (total, reference))

    def store_out(self, stored: RowRange, row: Int32, column: Int32, values: list[list[Float32]]) -> None:
        """Write the thread's columns of a row of out."""
        out = stored.out_row(row) + column
        for n, pair in enumerate(values):
            store_word(out + n * N, pack_pair(pair[0], pair[1], self.dtype))

    def store_accum(
        self, operands: LatentOperands, work_tile: WorkTile, row: Int32, column: Int32, values: list[list[Float32]]
    ) -> None:  # fmt: skip
        """Write the thread's columns of a row of out_accum."""
        out = operands.out_accum + (operands.accum_row(work_tile, row) * self.d_v + column)
        for n, pair in enumerate(values):
            both = cute.make_rmem_tensor(cute.make_layout(2), Float32)
            both[0], both[1] = pair
            cute.autovec_copy(both, cute.make_tensor(aligned(out + n * N, 2 * FLOAT_BYTES), cute.make_layout(2)))


def over_quad(value: Float32, both: Callable[[Any, Any], Any]) -> Float32:
    """Return what the four lanes of a row have, by an operation of two."""
    for lanes in QUAD_LANES:
        value = both(value, cute.arch.shuffle_sync_bfly(value, lanes))
    return value


def chunk_at(address: Int32) -> cute.Tensor:
    """Return the words of 16 bytes at a shared memory address."""
    return cute.make_tensor(cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=CHUNK), cute.make_layout(CHUNK_WORDS))

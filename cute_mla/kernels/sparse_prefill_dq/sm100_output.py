"""The output role of sparse_prefill_dq on Blackwell: Q of the next token to tensor memory, dQ to memory."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT
from ..attention.scheduler import first_query_row
from ..primitives import tcgen05
from ..primitives.arithmetic import pack_pair
from ..primitives.rows import SECTOR_WORDS, is_whole, store_packed_row
from ..sm100.config import CHUNK_COLUMNS, CTA_COLUMNS, OUTPUT_COLUMN, PAIR, VECTOR, thread_and_lanes
from ..sparse_prefill.sm100_output import TokenQueries
from .abi import DqOperands
from .sm100_config import ROPE_COLUMN, ROPE_COLUMNS, TOKENS, DqSm100Smem

READ_AT_ONCE = 32  # columns of dQ


@dataclass(frozen=True)
class DqSm100OutputRole:
    """Four warps. dtype: of dq."""

    dtype: type[cutlass.Numeric]
    queries: TokenQueries

    @property
    def columns(self) -> tuple[int, ...]:
        """Return the first columns of tensor memory of what is read at once."""
        latent = range(OUTPUT_COLUMN, OUTPUT_COLUMN + CTA_COLUMNS, READ_AT_ONCE)
        return (*latent, ROPE_COLUMN) if self.queries.loader.has_rope else tuple(latent)

    @cute.jit
    def run(self, operands: DqOperands, smem: DqSm100Smem, tmem: Int32):
        """Wait query_free, dq_ready. Signal query_ready, dq_free. Write dq."""
        schedule = operands.schedule
        thread, lanes = thread_and_lanes(tmem)
        token, first = schedule.first_work_tile()
        number = Int32(0)
        self.queries.load(operands, smem, token, self.queries.present(operands, token), thread, lanes)
        while token <= schedule.last_request():
            tiles = schedule.tile_range(token, first).tiles
            following = schedule.work_tile(token, first).next_req
            present = self.queries.present(operands, following)
            rWords = self.queries.fetch(operands, following, present, thread)
            if tiles > 0:
                smem.query_free.consumer_wait(number)
                tcgen05.fence_after_wait()
            self.queries.store(smem, present, rWords, lanes)
            sums = self.read(operands, smem, number, tiles > 0, lanes)
            self.store(operands, token, sums, thread)
            number = number + cutlass.select_(tiles > 0, Int32(1), Int32(0))
            token = following

    @cute.jit
    def read(self, operands: DqOperands, smem: DqSm100Smem, number: Int32, present: Boolean, lanes: Int32):
        """Return the thread's share of a row of dq as pairs of 16-bit elements, zeros without keys. Wait dq_ready, signal dq_free."""
        rWords = cute.make_rmem_tensor(cute.make_layout(len(self.columns) * READ_AT_ONCE // 2), Int32)
        rWords.fill(0)
        scale = (operands.args.sm_scale, operands.args.sm_scale)
        if present:
            smem.dq_ready.consumer_wait(number)
            tcgen05.fence_after_wait()
            if cute.arch.make_warp_uniform((smem.sBegun + number % TOKENS).load()) != 0:
                for part, column in enumerate(self.columns):
                    values = tcgen05.load_columns(lanes + column, READ_AT_ONCE)
                    tcgen05.await_loads()
                    for i in range(0, READ_AT_ONCE, 2):
                        pair = cute.arch.mul_packed_f32x2((values[i], values[i + 1]), scale)
                        rWords[(part * READ_AT_ONCE + i) // 2] = pack_pair(pair[0], pair[1], self.dtype)
            tcgen05.fence_before_signal()
            smem.dq_free.consumer_release(number, cta=smem.geometry.mma_cta)
        return rWords

    @cute.jit
    def store(self, operands: DqOperands, token: Int32, rWords: cute.Tensor, thread: Int32):
        """Store the thread's share of a row of dq, if the row exists, by whole sectors where rows lie so."""
        row = first_query_row() + thread % TILE_ROWS
        words = [rWords[i] for i in range(cute.size(rWords))]
        if row < operands.rows():
            target = operands.dq_row(token, row)
            if is_whole(Int64(target.toint()), 2 * SECTOR_WORDS):
                self._store_words(target, words, thread, SECTOR_WORDS)
            else:
                self._store_words(target, words, thread, VECTOR)

    def _store_words(self, target: cute.Pointer, words: list[Int32], thread: Int32, at_once: int) -> None:
        """Store so many words at once: half of the latent columns, without a pair every other 128 of them, and half of the RoPE columns."""
        geometry, side, run = self.queries.loader.geometry, thread // TILE_ROWS, CHUNK_COLUMNS // 2
        for chunk in range(PAIR):
            first = target + (side * geometry.lane_columns + geometry.output_place(chunk * CHUNK_COLUMNS))
            store_packed_row(first, words[chunk * run : (chunk + 1) * run], at_once=at_once)
        if self.queries.loader.has_rope:
            store_packed_row(target + (side * ROPE_COLUMNS + D_LATENT), words[PAIR * run :], at_once=at_once)

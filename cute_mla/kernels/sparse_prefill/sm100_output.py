"""The output role of sparse prefill on Blackwell: Q of the next token, rescale of O, epilogue.

sm100.py describes tiles, pipelines and the trick.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from ...spec.dense_decode import TILE_ROWS
from ..attention.scheduler import first_query_row
from ..primitives import tcgen05
from ..primitives.arithmetic import pack_pair, smaller
from ..primitives.rows import SECTOR_WORDS, is_whole, store_packed_row
from ..sm100.config import CHUNK_COLUMNS, CTA_COLUMNS, OUTPUT_COLUMN, PAIR, VECTOR, LatentGeometrySm100, thread_and_lanes
from ..sm100.output import scale_output
from ..sm100.score import LatentQueriesSm100
from .operands import SparsePrefillOperands
from .sm100_config import SparsePrefillSmemSm100
from .sm100_score import RowResult, store_lse_indexer

SCALED_AT_ONCE, READ_AT_ONCE = 16, 64  # columns of O


@dataclass(frozen=True)
class TokenQueries:
    """Q, a token ahead: it waits in registers for the last S of the token before."""

    loader: LatentQueriesSm100

    def present(self, operands: SparsePrefillOperands, token: Int32) -> Boolean:
        """Return whether there is such a token, and it has keys."""
        schedule = operands.schedule
        last = schedule.last_request()
        return (token <= last) & (schedule.tile_range(smaller(token, last), Int32(0)).tiles > 0)

    @cute.jit
    def load(
        self, operands: SparsePrefillOperands, smem: SparsePrefillSmemSm100, token: Int32, present: Boolean, thread: Int32, lanes: Int32
    ):
        """Load Q of a token, if it is present. Signal query_ready."""
        if present:
            tcgen05.fence_after_wait()
            self.loader.load(operands, smem, token, thread, lanes)

    @cute.jit
    def fetch(self, operands: SparsePrefillOperands, token: Int32, present: Boolean, thread: Int32):
        """Start to load the thread's row of Q of a token, if it is present. Return its words."""
        rWords = self.loader.registers()
        rWords.fill(0)
        if present:
            self.loader.fetch(operands, token, thread, rWords)
        return rWords

    @cute.jit
    def store(self, smem: SparsePrefillSmemSm100, present: Boolean, rWords: cute.Tensor, lanes: Int32):
        """Store what fetch has loaded, if the token is present. Signal query_ready."""
        if present:
            self.loader.store(smem, rWords, lanes)


@dataclass(frozen=True)
class SparsePrefillOutputRoleSm100:
    """Four warps. dtype: of out."""

    dtype: type[cutlass.Numeric]
    queries: TokenQueries

    @cute.jit
    def run(self, operands: SparsePrefillOperands, smem: SparsePrefillSmemSm100, tmem: Int32):
        """Wait seen_ready, scores_ready, alpha_ready, kv_free, stats_ready. Signal query_ready, output_ready, stats_free.

        Write out, lse, max_logits and lse_indexer.
        """
        schedule = operands.schedule
        thread, lanes = thread_and_lanes(tmem)
        token, _ = schedule.first_work_tile()
        tile, done = Int32(0), Int32(0)
        present = self.queries.present(operands, token)
        self.queries.load(operands, smem, token, present, thread, lanes)
        begun = self.begin(smem, tile, present)
        while token <= schedule.last_request():
            count = schedule.tile_range(token, Int32(0)).tiles
            following = schedule.work_tile(token, Int32(0)).next_req
            present = self.queries.present(operands, following)
            rWords = self.queries.fetch(operands, following, present, thread)
            for t in cutlass.range(1, count - 1, unroll=1):
                begun = self.scale(smem, tile + t, thread, lanes, begun)
            if count > 0:
                # the token's last S
                smem.scores_ready.consumer_wait((tile + count) * smem.geometry.score_parts - 1)
                tcgen05.fence_after_wait()
            self.queries.store(smem, present, rWords, lanes)
            if count > 1:
                self.scale(smem, tile + count - 1, thread, lanes, begun)
            tile = tile + count
            smem.stats_ready.consumer_wait(done)
            result = RowResult.take(smem, thread)
            store_lse_indexer(operands, smem, token, thread)
            smem.stats_free.consumer_release(done)
            weight = result.weight(operands, token, thread)
            result.store(operands, token, thread)
            rWords = self.read_output(smem, tile, count > 0, lanes, weight)
            begun = self.begin(smem, tile, present)
            self.store(operands, smem, token, rWords, thread)
            token, done = following, done + 1

    @cute.jit
    def scale(self, smem: SparsePrefillSmemSm100, tile: Int32, thread: Int32, lanes: Int32, begun: Boolean):
        """Rescale O for a tile, if it has keys and O has been begun, then let its P V begin. Return whether O is begun then."""
        smem.seen_ready.consumer_wait(tile)
        filled = smem.has_keys(tile)
        if filled:
            scale_output(smem, tile, thread, lanes, begun, SCALED_AT_ONCE)
        else:
            smem.alpha_ready.consumer_wait(tile)
            smem.output_ready.producer_commit(tile, cta=smem.geometry.mma_cta)
        return begun | filled

    @cute.jit
    def begin(self, smem: SparsePrefillSmemSm100, tile: Int32, present: Boolean):
        """Let P V of the first tile of a token begin, if the token is present: O of the one before has been read, so it overwrites O.

        Return whether the tile has keys.
        """
        begun = Boolean(False)
        if present:
            smem.seen_ready.consumer_wait(tile)
            begun = smem.has_keys(tile)
            smem.alpha_ready.consumer_wait(tile)
            tcgen05.fence_before_signal()
            smem.output_ready.producer_commit(tile, cta=smem.geometry.mma_cta)
        return begun

    @cute.jit
    def read_output(self, smem: SparsePrefillSmemSm100, tile: Int32, present: Boolean, lanes: Int32, weight: Float32) -> cute.Tensor:
        """Return the thread's row of O times the weight as pairs of 16-bit elements, 0 for weight 0, whatever tensor memory holds.

        tile: number of the tile after the last one of O, if there is any. A CTA that works alone reads the first half of the columns while
        P V of that tile still writes the others.
        """
        rWords = cute.make_rmem_tensor(cute.make_layout(CTA_COLUMNS // 2), Int32)
        written = (smem.kv_free,) if smem.geometry.paired else (smem.left_free, smem.kv_free)
        for part in cutlass.range_constexpr(len(written)):
            if present:
                written[part].consumer_wait(tile - 1)
                tcgen05.fence_after_wait()
            columns = CTA_COLUMNS // len(written)
            for first in cutlass.range_constexpr(part * columns, (part + 1) * columns, READ_AT_ONCE):
                values = tcgen05.load_columns(lanes + (OUTPUT_COLUMN + first), READ_AT_ONCE)
                tcgen05.await_loads()
                for i in cutlass.range_constexpr(0, READ_AT_ONCE, 2):
                    pair = cute.arch.mul_packed_f32x2((values[i], values[i + 1]), (weight, weight))
                    rWords[(first + i) // 2] = pack_pair(pair[0], pair[1], self.dtype)
        if cute.arch.vote_any_sync(weight == 0.0):
            for i in cutlass.range_constexpr(cute.size(rWords)):
                rWords[i] = cutlass.select_(weight == 0.0, Int32(0), rWords[i])
        return rWords

    @cute.jit
    def store(self, operands: SparsePrefillOperands, smem: SparsePrefillSmemSm100, token: Int32, rWords: cute.Tensor, thread: Int32):
        """Store the thread's 256 columns of a row of out."""
        row = first_query_row() + thread % TILE_ROWS
        words = [rWords[i] for i in range(cute.size(rWords))]
        if row < operands.rows():
            out = operands.out_row(token, row)
            if is_whole(Int64(out.toint()), 2 * SECTOR_WORDS):
                self._store_words(smem.geometry, out, words, thread, SECTOR_WORDS)
            else:
                self._store_words(smem.geometry, out, words, thread, VECTOR)

    def _store_words(self, geometry: LatentGeometrySm100, out: cute.Pointer, words: list[Int32], thread: Int32, at_once: int) -> None:
        """Store so many words at once. Without a pair, a lane has every other 128 columns."""
        columns = CTA_COLUMNS if geometry.paired else CHUNK_COLUMNS
        first, apart = out + (thread // TILE_ROWS) * columns, PAIR * columns
        for chunk in range(CTA_COLUMNS // columns):
            run = words[chunk * columns // 2 : (chunk + 1) * columns // 2]
            store_packed_row(first + chunk * apart, run, at_once=at_once)

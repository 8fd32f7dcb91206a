"""What the decode kernels on Blackwell share: everything but how keys and values reach shared memory.

A pair of CTAs holds 128 query rows, 64 each, and walks the pieces of one part of the plan, 64 keys (one tile) at a time.
Each CTA holds all keys of the tile but half of their columns: latent columns 256 c .. + 255 and RoPE columns 32 c .. + 31
of CTA c, which are also the value columns that it multiplies. (Where all columns of a key are values too, there are no
others.)

Tensor memory: O in 256 columns, Q in 144, S in 64. A lane is a query row; the lanes 0..63 and 64..127 are the same rows.
Shared memory: a ring of slots of 64 keys x 256 latent columns and, in a box of its own, the RoPE columns, later P.

The trick: every byte of the cache is fetched once per pair. In a product of 64 rows a CTA, the lower lanes multiply with the
operand of the even CTA and the upper lanes with that of the odd one. With Q in tensor memory the two halves of the lanes can
hold different columns of the same rows, so each CTA contributes its half of the columns of K to every score, and the same
bytes, read transposed, are the half of V that it has to provide. The score role adds the two halves.

Pipelines of the roles here (producer -> consumer; arrivals per phase). Barriers that the mma role waits for count in the even
CTA; what it commits arrives in both:
  kv_ready[5]      of the kernel -> mma
  kv_free[5]       mma -> output, and who fills slots     1: P V of the tile is done, so O is complete up to it
  query_ready      score -> mma            8: Q of a piece is in tensor memory
  scores_ready     mma -> score            1
  scores_free      score -> mma            8: S is in registers
  alpha_ready[2]   score -> output         2: rescale factors; the two warps that have the upper keys send none
  probs_ready[2]   score -> mma            8: P is written, values of keys that do not count are zero
  output_ready[2]  output -> mma           8: O is scaled, or read out
  stats_ready      score -> output         4: 1 / row sum, once per piece
  stats_free       output -> score         4
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint8, cute

from ...manifest import NamedBarrier
from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT
from ...spec.split_plan import TILE_KEYS
from ..attention.lengths import smaller
from ..attention.softmax import LN2
from ..attention.split_kv_scheduler import Extent, Piece, Schedule
from ..attention.tiles import first_query_row
from ..primitives import tcgen05
from ..primitives.fragments import aligned, load_word, store_row
from ..primitives.pipeline import Ring, arrive, arrive_at
from .config import (
    CTA_COLUMNS,
    CTA_ROPE,
    EXCHANGE_WORDS,
    GROUP,
    GROUP_WARPS,
    OUTPUT_COLUMN,
    PAIR,
    QUERY_COLUMN,
    REFERENCE_WORDS,
    SCORE_BARRIER,
    SUM_COLUMN,
    TILE_ALIGNMENT,
    TMEM_COLUMNS,
    VECTOR,
    Geometry,
    Pipes,
    Tiles,
)
from .gemm import PairGemm
from .score_rows import ScoreRows

WORD_ELEMENTS = 2  # of out, in a 32-bit word
COPY_WORDS = 16  # of Q or O a thread moves between its lane of tensor memory and gmem at a time
STORED_AT_ONCE = COPY_WORDS * WORD_ELEMENTS  # columns of O
SCALED_AT_ONCE = 2 * STORED_AT_ONCE
EVEN_CTA = 0


class QueryOperands(Protocol):
    """What the roles here need of a kernel's operands. Accumulators and their rows: only where a piece may be a part of a request."""

    scale_log2: Float32
    empty_lse: Float32
    lse_accum: cute.Pointer
    out_accum: cute.Pointer
    schedule: Schedule

    def rows(self) -> Int32:
        """Query rows that attend to this CTA's keys."""

    def q_row(self, req: Int32, row: Int32) -> cute.Pointer:
        """Element 0 of a query row."""

    def out_row(self, req: Int32, row: Int32) -> cute.Pointer:
        """Element 0 of an output row."""

    def lse_of(self, req: Int32, row: Int32) -> cute.Pointer:
        """The lse of a query row."""

    def accum_row(self, piece: Piece, row: Int32) -> Int64:
        """Row number of a query row in the contiguous split accumulators."""


class PairDecode:
    """The roles score, output and mma. A kernel is a subclass that has `run`, a role that fills slots, and says which keys
    count.

    dtype: 16-bit element type of out. config: the variant; it has access_bytes. has_rope: whether keys have columns that are no values.
    mma_warp: warp of that role. kv_arrivals: arrivals that fill a slot.
    loads_queries_ahead: the output role loads Q of the following piece before it stores the results of one; otherwise the score
    role loads it when its piece begins. keeps_maximum: the greatest logit of every row is a result, too.
    """

    dtype: type[cutlass.Numeric]
    config: Any
    has_rope: bool
    mma_warp: int
    kv_arrivals: int
    loads_queries_ahead = False
    keeps_maximum = False
    pipes_type: type[Pipes] = Pipes
    named_barriers: tuple[NamedBarrier, ...] = (NamedBarrier("lower_rows", SCORE_BARRIER), NamedBarrier("upper_rows", SCORE_BARRIER + 1))

    @property
    def operand_dtype(self) -> type[cutlass.Numeric]:
        """Type of Q, K, V and P."""
        return self.dtype

    @property
    def geometry(self) -> Geometry:
        """What depends on its size."""
        return Geometry.of(self.operand_dtype)

    @property
    def vectors(self) -> bool:
        """Whether query and output rows may be accessed 16 bytes at a time."""
        return bool(self.config.access_bytes == 4 * VECTOR)

    def kv_free_arrivals(self) -> int | Int32:
        """Arrivals that empty a slot, in this CTA: what is committed."""
        return 1

    def mask(self, operands: Any, pipes: Any, rows: ScoreRows, left: Int32, tile: Int32) -> None:
        """Sets scores of keys that do not count to -inf, in a tile `left` keys before the end."""
        raise NotImplementedError

    def clear_values(self, rows: ScoreRows, slot: Int32, left: Int32) -> None:
        """Sees to it that values of keys that do not count are zeros: 0 times NaN is NaN."""
        raise NotImplementedError

    def weigh_row(self, operands: Any, rows: ScoreRows, req: Int32, begin_tile: Int32, total: Float32) -> Float32:
        """What the accumulated output of a row with a positive row sum is multiplied with."""
        raise NotImplementedError

    # ---- beginning and end ------------------------------------------------------------------------------------------

    def carve_smem(self, smem: cutlass.memory.SmemAllocator) -> tuple[Tiles, Pipes]:
        """Places tiles and barriers, in the order of sm100_geometry."""
        geometry = self.geometry
        tiles = Tiles(
            geometry,
            sKv=smem.allocate_array(Uint8, geometry.kv_bytes, byte_alignment=TILE_ALIGNMENT),
            sOnes=smem.allocate_array(Uint8, geometry.ones_bytes) if geometry.ones_bytes else None,
            sExchange=smem.allocate_array(Float32, geometry.score_groups * EXCHANGE_WORDS),
            sRowValue=smem.allocate_array(Float32, geometry.score_groups * GROUP),
            sAlpha=smem.allocate_array(Float32, geometry.parities * TILE_ROWS),
            sInverse=smem.allocate_array(Float32, TILE_ROWS),
            sReference=smem.allocate_array(Float32, geometry.score_groups * REFERENCE_WORDS) if geometry.shared_words else None,
            sShares=smem.allocate_array(Float32, geometry.score_groups * GROUP) if geometry.shared_words else None,
            tmem_cell=None,
        )
        pipes = self.pipes_type(**{name: Ring(smem.allocate_array(Int64, slots), slots) for name, slots in geometry.barriers})
        return replace(tiles, tmem_cell=smem.allocate_array(Int32, 1)), pipes

    def initialise(self, pipes: Pipes) -> None:
        """Sets the arrivals of every barrier: warps of the arriving role, of both CTAs where the mma role waits."""
        pipes.kv_ready.initialise(self.kv_arrivals)
        pipes.kv_free.initialise(self.kv_free_arrivals())
        pipes.query_ready.initialise(PAIR * GROUP_WARPS)
        pipes.scores_ready.initialise(1)
        pipes.scores_free.initialise(PAIR * GROUP_WARPS)
        pipes.alpha_ready.initialise(GROUP_WARPS // 2)
        pipes.probs_ready.initialise(PAIR * GROUP_WARPS)
        pipes.output_ready.initialise(PAIR * GROUP_WARPS)
        pipes.stats_ready.initialise(self.geometry.score_groups * GROUP_WARPS)
        pipes.stats_free.initialise(GROUP_WARPS)
        cute.arch.mbarrier_init_fence()

    def sync_pair(self) -> None:
        """All threads of both CTAs. What they need of each other's memory is ordered by fences and barriers of its own, so the
        arrival need not order it: it would wait for every store to gmem."""
        cute.arch.sync_warp()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()

    @cute.jit
    def begin(self, tiles: Tiles, warp: Int32) -> Int32:
        """After one warp has initialised the barriers: takes tensor memory, in its warp, and waits for both CTAs. Returns its
        address."""
        if warp == self.mma_warp:
            tcgen05.allocate(tiles.tmem_cell, TMEM_COLUMNS)
        cute.arch.sync_threads()  # releases the address of tensor memory, which the relaxed arrival of sync_pair does not
        self.sync_pair()
        tmem = tiles.tmem_cell.load()
        # the plan, the lengths, Q and the cache may come from the kernel before
        cute.arch.griddepcontrol_wait()
        return tmem

    @cute.jit
    def end(self, warp: Int32, tmem: Int32):
        """Nobody leaves before the peer has done its last arrival here, and the tensor cores have read this CTA's memory."""
        tcgen05.fence_before_signal()
        self.sync_pair()
        if warp == self.mma_warp:
            tcgen05.fence_after_wait()
            tcgen05.free(tmem, TMEM_COLUMNS)

    # ---- mma --------------------------------------------------------------------------------------------------------

    @cute.jit
    def multiply(self, schedule: Schedule, pipes: Pipes, gemm: PairGemm):
        """Waits kv_ready, query_ready, scores_free, probs_ready, output_ready. Signals scores_ready, kv_free.

        S of a tile is issued before P V of the tile before it, so that the tensor cores work during every softmax."""
        req, begin_tile = schedule.first_piece()
        tile, queries = Int32(0), Int32(0)
        while req <= schedule.last_request():
            extent = schedule.extent(req, begin_tile)
            if extent.tiles > 0:
                pipes.query_ready.wait_ready(queries)
                queries = queries + 1
                self.multiply_tiles(pipes, gemm, extent.tiles, tile)
            tile = tile + extent.tiles
            piece = schedule.piece(req, begin_tile)
            req, begin_tile = piece.next_req, piece.next_tile
        for i in cutlass.range_constexpr(self.geometry.score_groups):
            pipes.scores_free.wait_free(tile + i)  # the peer's last arrival must not reach a CTA that is gone

    @cute.jit
    def multiply_tiles(self, pipes: Pipes, gemm: PairGemm, tiles: Int32, tile: Int32):
        """The products of a piece that begins with the tile-th tile."""
        ahead = self.geometry.score_groups
        for t in cutlass.range(tiles + ahead, unroll=1):
            if t < tiles:
                self.multiply_scores(pipes, gemm, tile + t)
            if t > ahead - 1:
                self.multiply_output(pipes, gemm, tile + t - ahead, t > ahead)

    def multiply_scores(self, pipes: Pipes, gemm: PairGemm, tile: Int32) -> None:
        """S of one tile."""
        keys = gemm.keys(pipes.kv_ready.slot(tile))
        pipes.kv_ready.wait_ready(tile)
        pipes.scores_free.wait_free(tile)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            gemm.scores(keys, pipes.scores_ready.slot(tile) if self.geometry.score_groups > 1 else 0)
            tcgen05.commit(pipes.scores_ready.barrier(tile))

    def multiply_output(self, pipes: Pipes, gemm: PairGemm, tile: Int32, accumulate: Boolean) -> None:
        """P V of one tile."""
        probs, values = gemm.probs_and_values(pipes.kv_ready.slot(tile))
        pipes.probs_ready.wait_ready(tile)
        pipes.output_ready.wait_ready(tile)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            gemm.output(probs, values, accumulate)
            tcgen05.commit(pipes.kv_free.barrier(tile))

    # ---- score ------------------------------------------------------------------------------------------------------

    @cute.jit
    def score(self, operands: QueryOperands, tiles: Tiles, pipes: Pipes, tmem: Int32):
        """Waits scores_ready, stats_free. Signals query_ready, scores_free, alpha_ready, probs_ready, stats_ready. Writes
        lse."""
        schedule = operands.schedule
        thread, lanes = thread_and_lanes(tmem)
        rows = self.create_rows(operands, tiles, lanes, thread)
        rows.store_ones()
        req, begin_tile = schedule.first_piece()
        tile, pieces = Int32(0), Int32(0)
        while req <= schedule.last_request():
            extent = schedule.extent(req, begin_tile)
            rows.reset()
            if extent.tiles > 0:
                if cutlass.const_expr(not self.loads_queries_ahead):
                    # every score of the piece before has been computed, so its Q is free
                    self.begin_piece(operands, pipes, rows, req, thread, lanes)
                self.score_tiles(operands, pipes, rows, extent, tile)
            tile = tile + extent.tiles
            pipes.stats_free.wait_free(pieces)
            total = self.publish_sums(operands, rows, req, begin_tile)
            arrive(pipes.stats_ready.barrier(pieces))
            pieces = pieces + 1
            piece = schedule.piece(req, begin_tile)
            self.store_lse(operands, rows, req, piece, total)
            if cutlass.const_expr(self.keeps_maximum):
                self.store_maximum(operands, rows, req, total)
            req, begin_tile = piece.next_req, piece.next_tile

    def create_rows(self, operands: QueryOperands, tiles: Tiles, lanes: Int32, thread: Int32) -> ScoreRows:
        """The state of this thread's row."""
        return ScoreRows.create(self.operand_dtype, tiles, lanes, thread, operands.scale_log2)

    def begin_piece(
        self, operands: QueryOperands, pipes: Pipes, rows: ScoreRows, req: Int32, thread: Int32, lanes: Int32
    ) -> None:  # fmt: skip
        """Loads Q of a piece that has keys."""
        self.load_queries(operands, req, thread, lanes)
        arrive_at(pipes.query_ready.barrier(0), EVEN_CTA)

    @cute.jit
    def load_queries(self, operands: QueryOperands, req: Int32, thread: Int32, lanes: Int32):
        """Q of one piece to tensor memory, from any strides: the thread's row, the columns that its lane multiplies.

        Rows past the last one repeat it; their results go nowhere."""
        row = first_query_row() + thread % TILE_ROWS
        row = cutlass.select_(row < operands.rows(), row, operands.rows() - 1)
        half = thread // TILE_ROWS
        source = operands.q_row(req, row)
        elements = self.geometry.word_elements
        for copy in cutlass.range_constexpr(CTA_COLUMNS // (COPY_WORDS * elements)):
            offset = half * CTA_COLUMNS + copy * (COPY_WORDS * elements)
            tcgen05.store_columns(lanes + (QUERY_COLUMN + copy * COPY_WORDS), self.load_words(source + offset, COPY_WORDS))
        if cutlass.const_expr(self.has_rope):
            rope = D_LATENT + half * CTA_ROPE
            tcgen05.store_columns(lanes + self.geometry.query_rope_column, self.load_words(source + rope, CTA_ROPE // elements))
        tcgen05.await_stores()
        tcgen05.fence_before_signal()

    def load_words(self, source: cute.Pointer, count: int) -> list[Int32]:
        """So many contiguous words of elements of Q."""
        words = []
        elements = self.geometry.word_elements
        for vector in range(count // VECTOR):
            first = source + vector * VECTOR * elements
            if self.vectors:
                rWords = cute.make_rmem_tensor(cute.make_layout(VECTOR), Int32)
                cute.autovec_copy(cute.make_tensor(cute.recast_ptr(aligned(first, 16), dtype=Int32), rWords.layout), rWords)
                words += [rWords[i] for i in range(VECTOR)]
            else:
                words += [load_word(first + elements * i, self.geometry.element_bytes) for i in range(VECTOR)]
        return words

    @cute.jit
    def score_tiles(self, operands: QueryOperands, pipes: Pipes, rows: ScoreRows, extent: Extent, tile: Int32):
        """The softmax of a piece, tile by tile."""
        for t in cutlass.range(extent.tiles, unroll=1):
            self.score_tile(operands, pipes, rows, extent.keys - t * TILE_KEYS, tile + t)

    @cute.jit
    def score_tile(self, operands: QueryOperands, pipes: Pipes, rows: ScoreRows, left: Int32, use: Int32):
        """The softmax of one tile."""
        pipes.scores_ready.wait_ready(use)
        tcgen05.fence_after_wait()
        others = rows.take_partial_sums()
        arrive_at(pipes.scores_free.barrier(use), EVEN_CTA)
        rows.add_partial_sums(others)
        self.mask(operands, pipes, rows, left, use)
        alpha = self.advance(pipes, rows, use)
        if rows.half == 0:
            (rows.tiles.sAlpha + ((use % self.geometry.parities) * TILE_ROWS + rows.row)).store(alpha)
            arrive(pipes.alpha_ready.barrier(use))
        rows.exponentiate(alpha)
        slot = pipes.kv_ready.slot(use)
        rows.store_probs(slot)
        self.clear_values(rows, slot, left)
        cute.arch.fence_proxy("async.shared", space="cta")
        arrive_at(pipes.probs_ready.barrier(use), EVEN_CTA)

    def advance(self, pipes: Pipes, rows: ScoreRows, tile: Int32) -> Float32:
        """Moves the reference to a tile if need be. Returns the factor for the O accumulated before."""
        return rows.advance()

    @cute.jit
    def publish_sums(self, operands: QueryOperands, rows: ScoreRows, req: Int32, begin_tile: Int32) -> Float32:
        """Hands what a row of O is multiplied with to the output role and returns the row sum."""
        total = rows.row_sum()
        if rows.publishes:
            empty = total == 0.0
            # where P is summed up by the tensor cores, the output role divides by what they have
            divisor = Float32(1) if self.geometry.sums_probs else total
            inverse = self.weigh_row(operands, rows, req, begin_tile, divisor)
            (rows.tiles.sInverse + rows.row).store(cutlass.select_(empty, Float32(0), inverse))
        return total

    @cute.jit
    def store_lse(self, operands: QueryOperands, rows: ScoreRows, req: Int32, piece: Piece, total: Float32):
        """The natural logarithm if the piece is the whole request, else base 2."""
        empty = total == 0.0
        row = first_query_row() + rows.row
        lse = rows.rMax[0] + cute.math.log2(total, fastmath=True)
        if rows.publishes and row < operands.rows():
            if cutlass.const_expr(piece.always_direct):
                operands.lse_of(req, row).store(cutlass.select_(empty, operands.empty_lse, lse * LN2))
            else:
                if piece.direct:
                    operands.lse_of(req, row).store(cutlass.select_(empty, operands.empty_lse, lse * LN2))
                else:
                    target = operands.lse_accum + operands.accum_row(piece, row)
                    target.store(cutlass.select_(empty, -Float32.inf, lse))

    @cute.jit
    def store_maximum(self, operands: Any, rows: ScoreRows, req: Int32, total: Float32):
        """The greatest logit of every row, natural units."""
        row = first_query_row() + rows.row
        logit = cutlass.select_(total == 0.0, -Float32.inf, rows.rBest[0] * (operands.scale_log2 * LN2))
        if rows.publishes and row < operands.rows():
            operands.max_logit_of(req, row).store(logit)

    # ---- output -----------------------------------------------------------------------------------------------------

    @cute.jit
    def output(self, operands: QueryOperands, tiles: Tiles, pipes: Pipes, tmem: Int32):
        """Waits alpha_ready, kv_free, stats_ready. Signals output_ready, stats_free. Writes out or out_accum."""
        schedule = operands.schedule
        thread, lanes = thread_and_lanes(tmem)
        req, begin_tile = schedule.first_piece()
        tile, pieces = Int32(0), Int32(0)
        if cutlass.const_expr(self.loads_queries_ahead):
            self.load_ahead(operands, pipes, req, begin_tile, thread, lanes)
        while req <= schedule.last_request():
            extent = schedule.extent(req, begin_tile)
            self.scale_tiles(tiles, pipes, extent.tiles, tile, thread, lanes)
            tile = tile + extent.tiles
            piece = schedule.piece(req, begin_tile)
            if cutlass.const_expr(self.loads_queries_ahead):
                # the score role has had every score of this piece
                self.load_ahead(operands, pipes, piece.next_req, piece.next_tile, thread, lanes)
            if extent.tiles > 0:
                pipes.kv_free.wait_ready(tile - 1)
                tcgen05.fence_after_wait()
            pipes.stats_ready.wait_ready(pieces)
            inverse = (tiles.sInverse + thread % TILE_ROWS).load()
            if cutlass.const_expr(self.geometry.sums_probs):
                inverse = divided_by_sum(inverse, lanes)
            arrive(pipes.stats_free.barrier(pieces))
            self.store_rows(operands, req, piece, thread, lanes, inverse)
            pieces = pieces + 1
            req, begin_tile = piece.next_req, piece.next_tile

    @cute.jit
    def load_ahead(
        self, operands: QueryOperands, pipes: Pipes, req: Int32, begin_tile: Int32, thread: Int32, lanes: Int32
    ):  # fmt: skip
        """Q of a piece that is still to come, if there is one and it has keys."""
        schedule = operands.schedule
        last = schedule.last_request()
        if req <= last and schedule.extent(smaller(req, last), begin_tile).tiles > 0:
            tcgen05.fence_after_wait()
            self.load_queries(operands, req, thread, lanes)
            arrive_at(pipes.query_ready.barrier(0), EVEN_CTA)

    @cute.jit
    def scale_tiles(self, tiles: Tiles, pipes: Pipes, count: Int32, tile: Int32, thread: Int32, lanes: Int32):
        """Rescales of a piece that begins with the tile-th tile."""
        for t in cutlass.range(count, unroll=1):
            self.scale_output(tiles, pipes, tile + t, thread, lanes, t > 0)

    @cute.jit
    def scale_output(self, tiles: Tiles, pipes: Pipes, tile: Int32, thread: Int32, lanes: Int32, begun: Boolean):
        """O *= alpha where the maximum has moved, then lets P V of this tile begin. O of the piece's first tile is
        overwritten, so there is nothing to scale, but O of the piece before must have been read."""
        pipes.alpha_ready.wait_ready(tile)
        alpha = (tiles.sAlpha + ((tile % self.geometry.parities) * TILE_ROWS + thread % TILE_ROWS)).load()
        if begun and cute.arch.vote_any_sync(alpha != 1.0):
            pipes.kv_free.wait_ready(tile - 1)
            tcgen05.fence_after_wait()
            for copy in cutlass.range_constexpr(CTA_COLUMNS // SCALED_AT_ONCE):
                place = lanes + (OUTPUT_COLUMN + copy * SCALED_AT_ONCE)
                values = tcgen05.load_columns(place, SCALED_AT_ONCE)
                tcgen05.await_loads()
                tcgen05.store_columns(place, scaled(values, alpha), Float32)
            if cutlass.const_expr(self.geometry.sums_probs):
                total = load_sum(lanes)
                tcgen05.store_columns(lanes + SUM_COLUMN, [total * alpha], Float32)
            tcgen05.await_stores()
        tcgen05.fence_before_signal()
        arrive_at(pipes.output_ready.barrier(tile), EVEN_CTA)

    @cute.jit
    def store_rows(self, operands: QueryOperands, req: Int32, piece: Piece, thread: Int32, lanes: Int32, inverse: Float32):
        """256 contiguous columns of the thread's row, from tensor memory to out or out_accum."""
        row = first_query_row() + thread % TILE_ROWS
        stored = row < operands.rows()
        column = (thread // TILE_ROWS) * CTA_COLUMNS
        out = operands.out_row(req, row) + column
        out_accum = None
        if cutlass.const_expr(not piece.always_direct):
            out_accum = operands.out_accum + (operands.accum_row(piece, row) * D_LATENT + column)
        for copy in cutlass.range_constexpr(CTA_COLUMNS // STORED_AT_ONCE):
            first = copy * STORED_AT_ONCE
            values = tcgen05.load_columns(lanes + (OUTPUT_COLUMN + first), STORED_AT_ONCE)
            tcgen05.await_loads()
            # a row that attends to nothing is 0 whatever tensor memory holds
            normal = [cutlass.select_(inverse == 0.0, Float32(0), values[i] * inverse) for i in range(STORED_AT_ONCE)]
            if stored:
                if cutlass.const_expr(piece.always_direct):
                    store_row(out + first, normal, self.dtype, self.vectors)
                else:
                    if piece.direct:
                        store_row(out + first, normal, self.dtype, self.vectors)
                    else:
                        store_floats(out_accum + first, normal)


def thread_and_lanes(tmem: Int32) -> tuple[Int32, Int32]:
    """(number of this thread among the four warps of its role, tensor memory at the first of its warp's lanes)."""
    thread = cute.arch.thread_idx()[0] % GROUP
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % GROUP_WARPS
    return thread, tmem + (warp << 21)


def load_sum(lanes: Int32) -> Float32:
    """The sum of rounded P of this thread's row."""
    total = tcgen05.load_columns(lanes + SUM_COLUMN, 1)
    tcgen05.await_loads()
    return total[0]


def divided_by_sum(weight: Float32, lanes: Int32) -> Float32:
    """What a row of O is multiplied with, 0 for a row that attends to nothing, whatever tensor memory holds."""
    return cutlass.select_(weight == 0.0, Float32(0), weight / load_sum(lanes))


def scaled(values: Any, factor: Float32) -> list[Float32]:
    """The product of each of the columns read at once with a factor."""
    products: list[Float32] = []
    for i in range(0, SCALED_AT_ONCE, 2):
        products += cute.arch.mul_packed_f32x2((values[i], values[i + 1]), (factor, factor))
    return products


def store_floats(target: cute.Pointer, values: list[Float32]) -> None:
    """Contiguous fp32 values at a multiple of 16 bytes."""
    for first in range(0, len(values), VECTOR):
        rValues = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)
        for i in range(VECTOR):
            rValues[i] = values[first + i]
        cute.autovec_copy(rValues, cute.make_tensor(aligned(target + first, 16), rValues.layout))

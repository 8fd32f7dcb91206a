"""Dense MLA decode on Hopper with e4m3 queries and an e4m3 cache, multiplied as they are.

The formula and the walk of sm90.py, with q = descale_q q8, k = descale_k k8, and P rounded to e4m3:

    s_rj = descale_q descale_k <q8_r, k8_j>     p_rj = e4m3(2^(scale * s_rj - reference_r))
    out_r = descale_k sum_j p_rj k8_j[:512] / sum_j p_rj

Roles (512 threads):
  load       warp 0: TMA of the key tiles, page by page
  transpose  warps 1, 2, 3, by turns: 128 columns of V of a tile, from shared memory to shared memory
  score      warpgroup 1: S = Q K^T, softmax, P to shared memory, lse
  output     warpgroups 2, 3: O[:, 0:256] and O[:, 256:512] += P V in registers, rescale, epilogue

Shared memory: three key tiles, each four boxes of 64 keys x 128 columns and one of 64 RoPE columns and zeros; two tiles of V^T,
four slots of 128 columns and 8 rows of ones x 64 keys each; two tiles of P. All of Q is in the registers of the score warpgroup.

Pipelines (producer -> consumer; arrivals per phase, c = CTAs of the cluster):
  kv_ready[12]     load -> score, transpose   1 and the bytes of one box
  rope_ready[3]    load -> score              1 and the bytes of one box
  keys_free[3]     score, transpose -> load   8 c: four warps have multiplied a tile, each of four boxes is transposed
  values_ready[8]  transpose -> output        1: 128 columns of V^T (and the warp that writes that slot next)
  values_free[8]   output -> transpose        4: the warps of the side that reads them
  probs_ready[2]   score -> output            4: P and alpha are written
  probs_free[2]    output -> score            8

The trick: e4m3 products contract along rows only, so V needs a transpose, which shared memory cannot give. A matrix load of byte
pairs, two byte permutations and a matrix store do it, if the keys of P and V^T may lie in the order that falls out, which is
the one that the scores have in registers, and the columns of O in another, which gives each thread four neighbouring ones.
sm90/matrix_store.py has the orders, README.md the clocks. Eight rows of ones behind the last 128 of a side's V^T make the row sums of P
as it was rounded, with the tensor cores, and O is divided by those: what rounding takes from one key it does not take from the sum.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from ...manifest import NamedBarrier, Role
from ...spec.mla import D_LATENT
from ...spec.split_plan import TILE_KEYS
from ..attention.softmax import TileSoftmax
from ..definition import KernelDefinition
from ..primitives.fragments import ROWS_PER_THREAD, load_word
from ..primitives.pipeline import arrive, arrive_cluster, barrier_at, barrier_table
from ..primitives.tma import load_box, multicast_box, prefetch_map
from ..sm90.config import OUTPUT_BARRIER, OUTPUT_GROUPS, THREADS, WARPGROUP, WARPS_PER_GROUP, TilePlace
from ..sm90.matrix_store import ONES, smem_pointer, transpose_box
from ..sm90.roles import NOTHING, group_of, query_row, set_registers
from .operands import LaneBox, Operands
from .page_walk import load_pieces
from .sm90_fp8_gemm import OutputGemmFp8, ScoreGemmFp8
from .sm90_fp8_tiles import (
    BARRIER_OFFSET,
    BARRIERS,
    CHUNKS,
    LATENT_SLOTS,
    LOAD_REGISTERS,
    ONES_ROWS,
    OUTPUT_REGISTERS,
    Q_STEPS,
    QGMMA_PER_TILE,
    SCORE_REGISTERS,
    SLOT_BYTES,
    SLOT_COLUMNS,
    SMEM_BYTES,
    STAGES,
    VALUE_BYTES,
    VALUE_STAGES,
    Pipes,
    Tiles,
    carve,
)
from .sm90_rows import DenseRowsSm90

FIRST_TRANSPOSER = 1  # warp
TRANSPOSERS = 3  # a chunk each, by turns
ROLES = (
    Role("load", 0, 1),
    Role("transpose", FIRST_TRANSPOSER, TRANSPOSERS),
    Role("score", WARPS_PER_GROUP, WARPS_PER_GROUP),
    Role("output_left", 2 * WARPS_PER_GROUP, WARPS_PER_GROUP),
    Role("output_right", 3 * WARPS_PER_GROUP, WARPS_PER_GROUP),
)


class NativeSm90(DenseRowsSm90):
    """One variant of the kernel."""

    threads = THREADS
    shares_sums = False

    @cute.jit
    def run(self, operands: Operands):
        tiles, pipes = carve(cutlass.memory.SmemAllocator())
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                self.initialise(pipes)
                prefetch_map(operands.kv_map)
        self.sync_start()
        # the plan, the lengths, the scales, Q and the cache may come from the kernel before
        cute.arch.griddepcontrol_wait()

        group = group_of(warp)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        if group == 0:
            set_registers(LOAD_REGISTERS)
            if warp == 0:
                self.load(operands, tiles, pipes)
            else:
                self.transpose(operands, tiles, pipes, warp - FIRST_TRANSPOSER)
        elif group == 1:
            set_registers(SCORE_REGISTERS)
            self.score(operands, tiles, pipes, thread)
        else:
            set_registers(OUTPUT_REGISTERS)
            self.write_ones(tiles, pipes, thread, group - 2)
            self.output(operands, tiles, pipes, thread, group - 2)

    def initialise(self, pipes: Pipes) -> None:
        """Sets the arrivals of every barrier: warps of the arriving role, times the CTAs that share a stage."""
        pipes.kv_ready.initialise(LATENT_SLOTS, 1)
        pipes.rope_ready.initialise(1)
        pipes.keys_free.initialise((WARPS_PER_GROUP + LATENT_SLOTS) * self.config.cluster)
        pipes.values_ready.initialise(LATENT_SLOTS, 1)
        pipes.values_free.initialise(LATENT_SLOTS, WARPS_PER_GROUP)
        pipes.probs_ready.initialise(WARPS_PER_GROUP)
        pipes.probs_free.initialise(OUTPUT_GROUPS * WARPS_PER_GROUP)
        cute.arch.mbarrier_init_fence()

    # ---- load -------------------------------------------------------------------------------------------------------

    @cute.jit
    def load(self, operands: Operands, tiles: Tiles, pipes: Pipes):
        """Waits keys_free. Signals kv_ready, rope_ready."""
        tiles_done = load_pieces(operands, partial(self.load_tile, operands, tiles, pipes))
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.config.cluster > 1):
            for i in cutlass.range(STAGES, unroll=1):
                pipes.keys_free.wait_free(tiles_done + i)

    @cute.jit
    def load_tile(self, operands: Operands, tiles: Tiles, pipes: Pipes, box: LaneBox, tile: Int32):
        """Loads the tile-th tile of this CTA: all of it, with zeros where the request has no page."""
        where = (operands.kv_head(), box.row, box.page)
        offset = box.offset * SLOT_COLUMNS
        pipes.keys_free.wait_free(tile)
        for i in cutlass.range_constexpr(LATENT_SLOTS):
            target = tiles.sKv.iterator + (pipes.kv_ready.place(i, tile) * SLOT_BYTES + offset)
            self.load_slot(operands.kv_map, target, (i * SLOT_COLUMNS, *where), pipes.kv_ready.of(i).barrier(tile), box, i % 2)
        target = tiles.sRope.iterator + (pipes.rope_ready.slot(tile) * SLOT_BYTES + offset)
        self.load_slot(operands.kv_map, target, (D_LATENT, *where), pipes.rope_ready.barrier(tile), box, tile % 2)

    @cute.jit
    def load_slot(self, kv_map: Any, target: cute.Pointer, where: tuple[Any, ...], ready: cute.Pointer, box: LaneBox, rank: int | Int32):
        """A box of columns; of a pair, the CTA of this rank fetches it for both."""
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(ready, SLOT_BYTES)
        cute.arch.sync_warp()
        if box.offset < TILE_KEYS:
            if cutlass.const_expr(self.config.cluster == 1):
                load_box(target, kv_map, where, ready)
            elif cute.arch.block_idx_in_cluster() == rank:
                multicast_box(target, kv_map, where, ready)

    # ---- transpose --------------------------------------------------------------------------------------------------

    @cute.jit
    def transpose(self, operands: Operands, tiles: Tiles, pipes: Pipes, rank: Int32):
        """Waits kv_ready, values_ready, values_free. Signals values_ready, keys_free. One warp; rank: which of the transposing warps."""
        schedule = operands.schedule
        req, begin_tile = schedule.first_piece()
        last = schedule.last_request()
        tile = Int32(0)
        while req <= last:
            extent = schedule.extent(req, begin_tile)
            for t in cutlass.range(extent.tiles, unroll=1):
                # chunks are counted through all tiles; a tile's first one is number 4 tile, which is tile modulo 3
                first = (rank + (TRANSPOSERS - 1) * (tile + t)) % TRANSPOSERS
                for chunk in cutlass.range(first, LATENT_SLOTS, TRANSPOSERS, unroll=1):
                    self.transpose_chunk(tiles, pipes, tile + t, chunk, extent.keys - t * TILE_KEYS)
            tile = tile + extent.tiles
            piece = schedule.piece_of(extent, req, begin_tile)
            req, begin_tile = piece.next_req, piece.next_tile

    @cute.jit
    def transpose_chunk(self, tiles: Tiles, pipes: Pipes, tile: Int32, chunk: Int32, left: Int32):
        """128 columns of V of a tile. Keys past the end become zeros: P is 0 there, but 0 times NaN is NaN."""
        pipes.kv_ready.of(chunk).wait_ready(tile)
        # another warp wrote the slot's last tile: until it has, the slot may look as free as it was for that one
        pipes.values_ready.of(chunk).wait_free(tile)
        pipes.values_free.of(chunk).wait_free(tile)
        source = tiles.sKv.iterator.toint() + pipes.kv_ready.place(chunk, tile) * SLOT_BYTES
        target = tiles.sVt.iterator.toint() + pipes.values_ready.place(chunk, tile) * VALUE_BYTES
        if left < TILE_KEYS:
            transpose_box(source, target, left, True)
        else:
            transpose_box(source, target, left, False)
        cute.arch.fence_proxy("async.shared", space="cta")
        arrive(pipes.values_ready.of(chunk).barrier(tile))
        if cutlass.const_expr(self.config.cluster > 1):
            # a box of the peer's: its load role has found the stage free, so this arrival cannot count for the tile before
            pipes.kv_ready.of(chunk ^ 1).wait_ready(tile)
        arrive_cluster(pipes.keys_free.barrier(tile), self.config.cluster)

    # ---- score ------------------------------------------------------------------------------------------------------

    def score_gemm(self, tiles: Tiles, thread: Int32) -> ScoreGemmFp8:
        """The product that makes S, for one thread."""
        return ScoreGemmFp8.create(tiles, thread)

    def softmax(self, operands: Operands) -> TileSoftmax:
        """The state of a thread's rows, of products with their scales."""
        return TileSoftmax.create(operands.with_descales(self.config.operands).scale_log2, keeps_maximum=True)

    @cute.jit
    def load_queries(self, operands: Operands, gemm: ScoreGemmFp8, req: Int32, thread: Int32):
        """Q of one piece to registers, from any strides. Rows past the last one repeat it; their results go nowhere."""
        words = gemm.query_words()
        for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
            row = query_row(thread, row_half)
            row = cutlass.select_(row < operands.rows(), row, operands.rows() - 1)
            source = operands.q_row(req, row) + 4 * (thread % 4)
            for sixteen in cutlass.range_constexpr(2 * Q_STEPS):
                if cutlass.const_expr(self.pairs):
                    word = cute.recast_ptr(source + 16 * sixteen, dtype=Int32).load()
                else:
                    word = load_word(source + 16 * sixteen, 1)
                words[2 * sixteen + row_half] = word

    @cute.jit
    def multiply_tile(self, pipes: Pipes, gemm: ScoreGemmFp8, place: TilePlace, withheld: Int32):
        """S of one tile. Hands over P of the tile before, if it was withheld."""
        gemm.multiply(pipes, place)
        if withheld != NOTHING:
            arrive(barrier_at(withheld))
        arrive_cluster(pipes.keys_free.at(place.kv), self.config.cluster)

    def probs_barrier(self, pipes: Pipes, place: TilePlace) -> Int32:
        """The address of the barrier that hands over P of a tile."""
        return pipes.probs_ready.barrier(place.number).toint()

    @cute.jit
    def weigh_tile(
        self, operands: Operands, tiles: Tiles, pipes: Pipes, gemm: ScoreGemmFp8, softmax: TileSoftmax, place: TilePlace, left: Int32
    ):
        """P of one tile, with its rescale factors, to shared memory. Not handed over yet."""
        self.mask(operands, tiles, gemm, place, left)
        alpha = softmax.add_tile(gemm.scores)
        slot = pipes.probs_ready.slot(place.number)
        pipes.probs_free.wait_free(place.number)
        gemm.store_probs(slot)
        if gemm.thread % 4 == 0:
            gemm.factors.store(slot, alpha)
        cute.arch.fence_proxy("async.shared", space="cta")

    # ---- output -----------------------------------------------------------------------------------------------------

    def first_output(self, pipes: Pipes, side: Int32) -> TilePlace:
        """The place of the first tile, for a side."""
        return pipes.first_tile()

    def output_gemm(self, tiles: Tiles, thread: Int32) -> OutputGemmFp8:
        """The product that makes O, for one thread."""
        return OutputGemmFp8.of(tiles, thread)

    @cute.jit
    def write_ones(self, tiles: Tiles, pipes: Pipes, thread: Int32, side: Int32):
        """The rows of ones of a side's slots of V^T, once."""
        slots = CHUNKS * VALUE_STAGES
        words = ONES_ROWS * TILE_KEYS // 4
        ones = cute.make_rmem_tensor(cute.make_layout(slots * words // WARPGROUP), Int32)
        ones.fill(ONES)
        threads = WARPGROUP // slots
        slot = pipes.values_ready.place(side * CHUNKS, Int32(0)) + thread // threads
        target = tiles.sVt.iterator.toint() + slot * VALUE_BYTES + (SLOT_BYTES + thread % threads * (4 * cute.size(ones)))
        cute.autovec_copy(ones, cute.make_tensor(cute.recast_ptr(smem_pointer(target), dtype=Int32), ones.layout))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=OUTPUT_BARRIER + side, number_of_threads=WARPGROUP)

    def row_weights(
        self, operands: Operands, tiles: Tiles, pipes: Pipes, gemm: OutputGemmFp8, pieces: Int32, begun: Boolean
    ) -> list[Float32]:
        """descale_k / the sum of P as it was multiplied; 0 for a row that attends to nothing."""
        weights = []
        for row_half in range(ROWS_PER_THREAD):
            total = cutlass.select_(begun, gemm.row_sum(row_half), Float32(0))
            weights.append(cutlass.select_(total == 0.0, Float32(0), operands.row_weight(self.config.operands, total)))
        return weights

    @cute.jit
    def output_tile(
        self, tiles: Tiles, pipes: Pipes, gemm: OutputGemmFp8, place: TilePlace, begun: Boolean, left: Int32, side: Int32
    ) -> Boolean:
        """O += P V of one tile, or O = P V unless O has begun, which it has then."""
        first, tile = side * CHUNKS, place.number
        for chunk in cutlass.range_constexpr(CHUNKS):
            pipes.values_ready.of(first + chunk).wait_ready(tile)
        pipes.probs_ready.wait_ready(tile)
        slot = pipes.probs_ready.slot(tile)
        alpha = gemm.factors.load(slot)
        if cute.arch.vote_any_sync(begun & ((alpha[0] != 1.0) | (alpha[1] != 1.0))):
            gemm.scale(alpha)
        warpgroup.fence()
        for chunk in cutlass.range_constexpr(CHUNKS):
            gemm.multiply(chunk, slot, pipes.values_ready.place(first + chunk, tile), begun)
        for chunk in cutlass.range_constexpr(CHUNKS):
            warpgroup.wait_group(CHUNKS - 1 - chunk)
            arrive(pipes.values_free.of(first + chunk).barrier(tile))
        arrive(pipes.probs_free.barrier(tile))
        return Boolean(True)

    def variant(self) -> KernelDefinition:
        """Ready to compile."""
        return self.source(
            smem_bytes=SMEM_BYTES,
            barriers=barrier_table(BARRIER_OFFSET, BARRIERS),
            named_barriers=(NamedBarrier("output_left", OUTPUT_BARRIER), NamedBarrier("output_right", OUTPUT_BARRIER + 1)),
            roles=ROLES,
            expected={"QGMMA": QGMMA_PER_TILE},
        )

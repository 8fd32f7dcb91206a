"""Dense MLA decode on Hopper.

For every request and every query row r = (query token i, head) of one KV head, over the keys j that the row sees:

    s_rj = <q_r, k_j> over 576 columns     p = softmax(scale * s)     out_r = sum_j p_rj k_j[:512]

A CTA holds 64 query rows and walks the pieces of one part of the plan, 64 keys (one tile) at a time.

Roles (512 threads):
  load     warpgroup 0, one warp: TMA of the key tiles, page by page
  score    warpgroup 1: S = Q K^T, softmax, P to shared memory, lse
  output   warpgroups 2, 3: O[:, 0:256] and O[:, 256:512] += P V in registers, rescale, epilogue

Shared memory: a ring of 10 slots of 64 keys x 128 latent columns (a tile takes four), a ring of 3 slots of 64 keys x 64
RoPE columns, and the last 256 columns of Q. V is the same memory as K, read transposed.

Pipelines (producer -> consumer; arrivals per phase, c = CTAs of the cluster):
  kv_ready[10]    load -> score, output   1 and the bytes of two boxes
  kv_free[10]     output -> load          4 c: the warps of the side that reads the slot
  rope_ready[3]   load -> score           1 and the bytes of one box
  rope_free[3]    output -> load          8 c
  probs_ready[3]  score -> output         4: P and alpha are written
  stats_ready     score -> output         4: 1 / row sum is written, once per piece
  stats_free      output -> score         8

The trick: the RoPE columns of K are dead once S is known, so P (64 x 64, the same bytes) is written over them. With five of
the nine column tiles of Q in the registers of a warpgroup that accumulates nothing else, that leaves shared memory for 2.5
key tiles, and the roles exchange nothing but P: while the tensor cores multiply P V of one tile, the score warpgroup
computes the softmax of the next. README.md has the clocks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from ...manifest import NamedBarrier, Role
from ...spec.arch import Arch
from ...spec.dense_decode import TILE_ROWS, DenseDecodeConfig
from ...spec.mla import D_LATENT
from ...spec.split_plan import TILE_KEYS
from ..parts.barriers import Ring, arrive, arrive_cluster, barrier_table
from ..parts.fragments import ROWS_PER_THREAD, aligned, fragment_row, load_pair, pack_pair, store_pair
from ..parts.softmax import OnlineSoftmax, mask_keys
from ..parts.tma import load_box, multicast_box, prefetch_map
from ..parts.work import Extent, Piece, first_piece, last_request, read_extent, read_piece
from ..source import KernelSource
from .entry import DenseDecode
from .operands import BOX_COLUMNS, ELEMENT_BYTES, LaneBox, Operands, first_query_row
from .page_walk import load_pieces
from .sm90_gemm import OutputGemm, ScoreGemm, clear_rows
from .sm90_geometry import (
    BARRIER_OFFSET,
    BARRIERS,
    KV_SLOTS,
    LOAD_REGISTERS,
    OUTPUT_BARRIER,
    OUTPUT_COLUMNS,
    OUTPUT_GROUPS,
    OUTPUT_REGISTERS,
    Q_TILES,
    Q_TILES_IN_REGISTERS,
    Q_TILES_IN_SMEM,
    ROPE_SLOTS,
    SCORE_BARRIER,
    SCORE_REGISTERS,
    SLOT_COLUMNS,
    SLOTS_PER_TILE,
    SMEM_USED,
    THREADS,
    TILE_ALIGNMENT,
    WARPGROUP,
    WARPS_PER_GROUP,
    WGMMA_PER_TILE,
    Pipes,
    Tiles,
)

LN2 = 0.6931471805599453


class DenseDecodeSm90(DenseDecode):
    """One variant of the kernel."""

    threads = THREADS

    @property
    def pairs(self) -> bool:
        """Whether rows may be accessed two elements at a time."""
        return self.config.access_bytes == 2 * ELEMENT_BYTES

    def tile_layout(self, columns: int, slots: int) -> cute.ComposedLayout:
        """64 rows x columns x slots in boxes of 64 columns, each 64 rows of 128 bytes, 128-byte swizzle."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        return cute.tile_to_shape(atom, (TILE_KEYS, columns, slots), (0, 1, 2))

    @cute.jit
    def run(self, operands: Operands):
        tiles, pipes = self.carve_smem()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                self.initialise(pipes)
                prefetch_map(operands.kv_map)
        self.sync_start()
        # the plan, the lengths, Q and the cache may come from the kernel before
        cute.arch.griddepcontrol_wait()

        group = warp // WARPS_PER_GROUP
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        if group == 0:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp == 0:
                self.load(operands, tiles, pipes)
        elif group == 1:
            cute.arch.setmaxregister_increase(SCORE_REGISTERS)
            self.score(operands, tiles, pipes, thread)
        else:
            cute.arch.setmaxregister_increase(OUTPUT_REGISTERS)
            self.output(operands, tiles, pipes, thread, group - 2)

    def carve_smem(self) -> tuple[Tiles, Pipes]:
        """Places tiles and barriers, in the order of sm90_geometry."""
        smem = cutlass.memory.SmemAllocator()
        kv, rope = self.tile_layout(SLOT_COLUMNS, KV_SLOTS), self.tile_layout(BOX_COLUMNS, ROPE_SLOTS)
        queries = self.tile_layout(BOX_COLUMNS, Q_TILES_IN_SMEM)
        tiles = Tiles(
            sKv=smem.allocate_tensor(self.dtype, kv.outer, TILE_ALIGNMENT, kv.inner),
            sRope=smem.allocate_tensor(self.dtype, rope.outer, TILE_ALIGNMENT, rope.inner),
            sQ=smem.allocate_tensor(self.dtype, queries.outer, TILE_ALIGNMENT, queries.inner),
            sAlpha=smem.allocate_tensor(Float32, cute.make_layout((TILE_ROWS, ROPE_SLOTS)), 16),
            sInverse=smem.allocate_tensor(Float32, cute.make_layout(TILE_ROWS), 16),
        )
        return tiles, Pipes(**{name: Ring(smem.allocate_array(Int64, slots), slots) for name, slots in BARRIERS})

    def initialise(self, pipes: Pipes) -> None:
        """Sets the arrivals of every barrier: warps of the arriving role, times the CTAs that share a slot."""
        cluster = self.config.cluster
        pipes.kv_ready.initialise(1)
        pipes.kv_free.initialise(WARPS_PER_GROUP * cluster)
        pipes.rope_ready.initialise(1)
        pipes.rope_free.initialise(OUTPUT_GROUPS * WARPS_PER_GROUP * cluster)
        pipes.probs_ready.initialise(WARPS_PER_GROUP)
        pipes.stats_ready.initialise(WARPS_PER_GROUP)
        pipes.stats_free.initialise(OUTPUT_GROUPS * WARPS_PER_GROUP)
        cute.arch.mbarrier_init_fence()

    def sync_start(self) -> None:
        """The barriers are there for all threads that share them; their fence has released them, so the arrival need not."""
        if self.config.cluster > 1:
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    # ---- load -------------------------------------------------------------------------------------------------------

    @cute.jit
    def load(self, operands: Operands, tiles: Tiles, pipes: Pipes):
        """Waits kv_free, rope_free. Signals kv_ready, rope_ready."""
        tiles_done = load_pieces(operands, partial(self.load_tile, operands, tiles, pipes))
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.config.cluster > 1):
            self.await_peer(pipes, tiles_done)

    @cute.jit
    def await_peer(self, pipes: Pipes, tiles_done: Int32):
        """Waits until every slot is free: the peer's last arrivals must not reach a CTA that is gone. No cluster barrier,
        which would make every warp wait for its stores."""
        for i in cutlass.range(KV_SLOTS, unroll=1):
            pipes.kv_free.wait_free(tiles_done * SLOTS_PER_TILE + i)
        for i in cutlass.range(ROPE_SLOTS, unroll=1):
            pipes.rope_free.wait_free(tiles_done + i)

    @cute.jit
    def load_tile(self, operands: Operands, tiles: Tiles, pipes: Pipes, box: LaneBox, tile: Int32):
        """Loads the tile-th tile of this CTA."""
        lane = cute.arch.lane_idx()
        where = (operands.kv_head(), box.row, box.page)
        offset = box.offset * BOX_COLUMNS  # a box of fewer keys is a run of rows of the 64-key box
        for i in cutlass.range_constexpr(SLOTS_PER_TILE):
            use = tile * SLOTS_PER_TILE + i
            ready = pipes.kv_ready.barrier(use)
            pipes.kv_free.wait_free(use)
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(ready, 2 * box.tile_bytes)
            cute.arch.sync_warp()
            if box.active:
                target = tiles.sKv.iterator + (pipes.kv_ready.slot(use) * (TILE_KEYS * SLOT_COLUMNS) + offset)
                self.load_slot(operands.kv_map, target, i * SLOT_COLUMNS, where, ready)

        ready = pipes.rope_ready.barrier(tile)
        pipes.rope_free.wait_free(tile)
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(ready, box.tile_bytes)
        cute.arch.sync_warp()
        if box.active:
            target = tiles.sRope.iterator + (pipes.rope_ready.slot(tile) * (TILE_KEYS * BOX_COLUMNS) + offset)
            if cutlass.const_expr(self.config.cluster == 1):
                load_box(target, operands.kv_map, (D_LATENT, *where), ready)
            elif cute.arch.block_idx_in_cluster() == tile % 2:
                multicast_box(target, operands.kv_map, (D_LATENT, *where), ready)

    def load_slot(self, kv_map: Any, target: cute.Pointer, column: int, where: tuple[Int32, ...], ready: cute.Pointer) -> None:
        """Two boxes of columns; of a pair, each CTA fetches one for both."""
        box = TILE_KEYS * BOX_COLUMNS
        if self.config.cluster == 1:
            load_box(target, kv_map, (column, *where), ready)
            load_box(target + box, kv_map, (column + BOX_COLUMNS, *where), ready)
        else:
            rank = cute.arch.block_idx_in_cluster()
            multicast_box(target + rank * box, kv_map, (column + rank * BOX_COLUMNS, *where), ready)

    # ---- score ------------------------------------------------------------------------------------------------------

    @cute.jit
    def score(self, operands: Operands, tiles: Tiles, pipes: Pipes, thread: Int32):
        """Waits kv_ready, rope_ready, stats_free. Signals probs_ready, stats_ready. Writes lse."""
        schedule = operands.schedule
        req, begin_tile = first_piece(schedule)
        tile, pieces = Int32(0), Int32(0)
        gemm = ScoreGemm.create(self.dtype, tiles, thread)
        softmax = OnlineSoftmax.create(operands.scale_log2)
        while req <= last_request(schedule):
            extent = read_extent(schedule, req, begin_tile)
            softmax.reset()
            if extent.tiles > 0:
                self.load_queries(operands, gemm, req, thread)
                self.score_tiles(operands, tiles, pipes, gemm, softmax, extent, tile)
            tile = tile + extent.tiles
            piece = read_piece(schedule, req, begin_tile)
            pipes.stats_free.wait_free(pieces)
            self.finish_rows(operands, tiles, req, piece, softmax, thread)
            arrive(pipes.stats_ready.barrier(pieces))
            pieces = pieces + 1
            req, begin_tile = piece.next_req, piece.next_tile

    @cute.jit
    def load_queries(self, operands: Operands, gemm: ScoreGemm, req: Int32, thread: Int32):
        """Q of one piece, from any strides: five column tiles to registers, four through registers to smem.

        Rows past the last one repeat it; their results go nowhere."""
        rows = []
        for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
            row = query_row(thread, row_half)
            row = cutlass.select_(row < operands.rows(), row, operands.rows() - 1)
            rows.append(operands.q_row(req, row) + 2 * (thread % 4))
        for tile in cutlass.range_constexpr(Q_TILES):
            rQ = gemm.query_tile(tile)
            for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
                for eight in cutlass.range_constexpr(BOX_COLUMNS // 8):
                    source = rows[row_half] + (tile * BOX_COLUMNS + 8 * eight)
                    rQ[2 * eight + row_half] = load_pair(source, self.pairs)
            if cutlass.const_expr(tile >= Q_TILES_IN_REGISTERS):
                gemm.store_query_tile(tile - Q_TILES_IN_REGISTERS)
            if cutlass.const_expr(not self.pairs):
                cute.arch.sync_warp()  # keeps ptxas from starting more loads than the registers hold halves
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=SCORE_BARRIER, number_of_threads=WARPGROUP)

    @cute.jit
    def score_tiles(
        self, operands: Operands, tiles: Tiles, pipes: Pipes, gemm: ScoreGemm, softmax: OnlineSoftmax, extent: Extent, tile: Int32
    ):
        """P of one tile is handed over only when S of the next is complete, so that P V fills the tensor cores during the
        next softmax. When the next keys have not come yet there is nothing to wait for, and P goes at once."""
        thread = gemm.thread
        withheld = Int32(0)
        for t in cutlass.range(extent.tiles, unroll=1):
            use = tile + t
            if withheld != 0:
                here = cute.arch.mbarrier_test_wait(pipes.rope_ready.barrier(use), pipes.rope_ready.parity(use))
                if not cute.arch.vote_all_sync(here):
                    arrive(pipes.probs_ready.barrier(use - 1))
                    withheld = Int32(0)
            gemm.multiply(pipes, use)
            if withheld != 0:
                arrive(pipes.probs_ready.barrier(use - 1))
            # P goes over the RoPE columns that every warp's WGMMA has read by now
            cute.arch.barrier(barrier_id=SCORE_BARRIER, number_of_threads=WARPGROUP)
            left = extent.keys - t * TILE_KEYS
            if operands.least_limit(left) < TILE_KEYS:
                mask_keys(gemm.scores, thread, [operands.key_limit(left, query_row(thread, row_half)) for row_half in (0, 1)])
            alpha = softmax.add_tile(gemm.scores)
            gemm.store_probs(pipes.rope_ready.slot(use))
            if thread % 4 == 0:
                for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
                    tiles.sAlpha[fragment_row(thread, row_half), pipes.rope_ready.slot(use)] = alpha[row_half]
            cute.arch.fence_proxy("async.shared", space="cta")
            withheld = Int32(1)
        if withheld != 0:
            arrive(pipes.probs_ready.barrier(tile + extent.tiles - 1))

    @cute.jit
    def finish_rows(self, operands: Operands, tiles: Tiles, req: Int32, piece: Piece, softmax: OnlineSoftmax, thread: Int32):
        """Publishes 1 / row sum and writes lse: natural log if the piece is the whole request, else base 2."""
        for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
            total = softmax.row_sum(row_half)
            empty = total == 0.0
            row = query_row(thread, row_half)
            lse = softmax.rMax[row_half] + cute.math.log2(total, fastmath=True)
            if thread % 4 == 0:
                inverse = cutlass.select_(empty, Float32(0), 1.0 / total)
                tiles.sInverse[fragment_row(thread, row_half)] = inverse
                if row < operands.rows():
                    if piece.direct:
                        target = operands.lse_of(req, row)
                        target.store(cutlass.select_(empty, operands.empty_lse, lse * LN2))
                    else:
                        target = operands.lse_accum + operands.accum_row(piece, row)
                        target.store(cutlass.select_(empty, -Float32.inf, lse))

    # ---- output -----------------------------------------------------------------------------------------------------

    @cute.jit
    def output(self, operands: Operands, tiles: Tiles, pipes: Pipes, thread: Int32, side: Int32):
        """Waits kv_ready, probs_ready, stats_ready. Signals kv_free, rope_free, stats_free. Writes out or out_accum."""
        schedule = operands.schedule
        req, begin_tile = first_piece(schedule)
        tile, pieces = Int32(0), Int32(0)
        gemm = OutputGemm.create(self.dtype, tiles, thread)
        while req <= last_request(schedule):
            extent = read_extent(schedule, req, begin_tile)
            gemm.clear()
            for t in cutlass.range(extent.tiles, unroll=1):
                self.output_tile(tiles, pipes, gemm, tile + t, extent.keys - t * TILE_KEYS, side)
            tile = tile + extent.tiles
            pipes.stats_ready.wait_ready(pieces)
            inverses = [tiles.sInverse[fragment_row(thread, row_half)] for row_half in (0, 1)]
            arrive(pipes.stats_free.barrier(pieces))
            piece = read_piece(schedule, req, begin_tile)
            if piece.direct:
                self.store_out(operands, gemm, inverses, req, side)
            else:
                self.store_accum(operands, gemm, inverses, piece, side)
            pieces = pieces + 1
            req, begin_tile = piece.next_req, piece.next_tile

    @cute.jit
    def output_tile(self, tiles: Tiles, pipes: Pipes, gemm: OutputGemm, tile: Int32, left: Int32, side: Int32):
        """O += P V of one tile, of which `left` keys remain in the request."""
        first_use = tile * SLOTS_PER_TILE + side * gemm.chunks
        for chunk in cutlass.range_constexpr(gemm.chunks):
            pipes.kv_ready.wait_ready(first_use + chunk)
        pipes.probs_ready.wait_ready(tile)
        slot = pipes.probs_ready.slot(tile)
        alpha = [tiles.sAlpha[fragment_row(gemm.thread, row_half), slot] for row_half in (0, 1)]
        if cute.arch.vote_any_sync((alpha[0] != 1.0) | (alpha[1] != 1.0)):
            gemm.scale(alpha)
        if left < TILE_KEYS:
            # P is 0 there, but 0 times a NaN of an unused row is NaN
            for chunk in cutlass.range_constexpr(gemm.chunks):
                clear_rows(tiles.sKv, pipes.kv_ready.slot(first_use + chunk), left, gemm.thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=OUTPUT_BARRIER + side, number_of_threads=WARPGROUP)
        warpgroup.fence()
        for chunk in cutlass.range_constexpr(gemm.chunks):
            gemm.multiply(chunk, slot, pipes.kv_ready.slot(first_use + chunk))
        for chunk in cutlass.range_constexpr(gemm.chunks):
            warpgroup.wait_group(gemm.chunks - 1 - chunk)
            arrive_cluster(pipes.kv_free.barrier(first_use + chunk), self.config.cluster)
        arrive_cluster(pipes.rope_free.barrier(tile), self.config.cluster)

    @cute.jit
    def store_out(self, operands: Operands, gemm: OutputGemm, inverses: list[Float32], req: Int32, side: Int32):
        """Registers straight to out: the quad writes 16 contiguous bytes of a row."""
        for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
            row = query_row(gemm.thread, row_half)
            if row < operands.rows():
                target = operands.out_row(req, row) + (side * OUTPUT_COLUMNS + 2 * (gemm.thread % 4))
                for eight in cutlass.range_constexpr(OUTPUT_COLUMNS // 8):
                    low, high = gemm.pair(eight, row_half, inverses[row_half])
                    store_pair(target + 8 * eight, pack_pair(low, high, self.dtype), self.pairs)

    @cute.jit
    def store_accum(self, operands: Operands, gemm: OutputGemm, inverses: list[Float32], piece: Piece, side: Int32):
        """fp32 rows of the split accumulators, 32 contiguous bytes per quad."""
        for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
            row = query_row(gemm.thread, row_half)
            if row < operands.rows():
                target = operands.out_accum + operands.accum_row(piece, row) * D_LATENT
                target = aligned(target + (side * OUTPUT_COLUMNS + 2 * (gemm.thread % 4)), 8)
                for eight in cutlass.range_constexpr(OUTPUT_COLUMNS // 8):
                    rPair = cute.make_rmem_tensor(cute.make_layout(2), Float32)
                    rPair[0], rPair[1] = gemm.pair(eight, row_half, inverses[row_half])
                    cute.autovec_copy(rPair, cute.make_tensor(target + 8 * eight, cute.make_layout(2)))


def query_row(thread: Int32, row_half: int) -> Int32:
    """Row of the KV head, among all its row tiles, that one of the thread's fragment rows is."""
    return first_query_row() + fragment_row(thread, row_half)


def build(config: DenseDecodeConfig, arch: Arch) -> KernelSource:
    """The variant, ready to compile."""
    kernel = DenseDecodeSm90(config, arch)
    return kernel.source(
        smem_bytes=SMEM_USED,
        barriers=barrier_table(BARRIER_OFFSET, BARRIERS),
        named_barriers=(
            NamedBarrier("score", SCORE_BARRIER),
            NamedBarrier("output_left", OUTPUT_BARRIER),
            NamedBarrier("output_right", OUTPUT_BARRIER + 1),
        ),
        roles=(
            Role("load", 0, WARPS_PER_GROUP),
            Role("score", WARPS_PER_GROUP, WARPS_PER_GROUP),
            Role("output_left", 2 * WARPS_PER_GROUP, WARPS_PER_GROUP),
            Role("output_right", 3 * WARPS_PER_GROUP, WARPS_PER_GROUP),
        ),
        expected={"HGMMA": WGMMA_PER_TILE},
    )

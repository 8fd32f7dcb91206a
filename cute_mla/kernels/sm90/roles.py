"""The roles of the SM90 kernels over a latent that do not depend on where the keys come from: score and output.

A kernel is a subclass that brings the keys to the slots (its first warpgroup), and says which of them a row does not see.
dense_decode/sm90.py describes the tiles, the pipelines and the trick.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32, cute
from cutlass.cute.nvgpu import warpgroup

from ...manifest import NamedBarrier, Role
from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT
from ...spec.split_plan import TILE_KEYS
from ..attention.softmax import LN2, OnlineSoftmax
from ..attention.split_kv_scheduler import Extent, Piece
from ..attention.tiles import BOX_COLUMNS, ELEMENT_BYTES, first_query_row
from ..primitives.fragments import ROWS_PER_THREAD, aligned, fragment_row, load_pair, pack_pair, store_pair
from ..primitives.pipeline import Place, Ring, arrive, arrive_cluster, barrier_at
from .config import (
    LAUNCH_REGISTERS,
    OUTPUT_BARRIER,
    OUTPUT_COLUMNS,
    OUTPUT_GROUPS,
    SCORE_BARRIER,
    SLOT_COLUMNS,
    SLOTS_PER_TILE,
    TILE_ALIGNMENT,
    VALID_BYTES,
    WARPGROUP,
    WARPS_PER_GROUP,
    Geometry,
    Pipes,
    TilePlace,
    Tiles,
)
from .gemm import OUTPUT_CHUNKS, OutputGemm, ScoreGemm

NOTHING = 0  # no barrier lies there


class RolesSm90:
    """Score and output. `operands` is any kernel's: rows(), q_row, out_row, lse_of, accum_row, schedule and the scales."""

    geometry: Geometry
    config: Any  # cluster, access_bytes
    dtype: type[cutlass.Numeric]
    keeps_maximum = False  # whether the greatest logit of every row is a result, too
    shares_sums = True  # whether the score role tells what makes the output of a row; else the output role knows
    skips_tiles = False  # whether it is known ahead which keys are there, so that a tile that has none is passed by

    def mask(self, operands: Any, tiles: Any, gemm: Any, place: TilePlace, left: Int32) -> None:
        """Sets the scores of keys that a row does not see to -inf. `left` keys of the request remain from the tile on."""
        raise NotImplementedError

    def await_validity(self, pipes: Any, place: TilePlace) -> None:
        """Blocks until it is known which keys of a tile are there, where tiles are skipped."""
        raise NotImplementedError

    def clear_unused(self, tiles: Tiles, gemm: OutputGemm, slots: list[Place], left: Int32, side: Int32) -> None:
        """Zeroes the rows of V that no row sees, in a side's slots of a tile, where the keys come with whatever lies there."""

    def weigh_row(self, operands: Any, piece: Piece, row: Int32, total: Float32, reference: Float32) -> Float32:
        """What a row of O is multiplied with, from its row sum and the reference in log2 units that the sum is relative to."""
        return 1.0 / total

    @property
    def pairs(self) -> bool:
        """Whether rows may be accessed two elements at a time."""
        return self.config.access_bytes == 2 * ELEMENT_BYTES

    def tile_layout(self, columns: int, slots: int) -> cute.ComposedLayout:
        """64 rows x columns x slots in boxes of 64 columns, each 64 rows of 128 bytes, 128-byte swizzle."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        return cute.tile_to_shape(atom, (TILE_KEYS, columns, slots), (0, 1, 2))

    def carve_smem(self, smem: Any) -> tuple[Tiles, Pipes]:
        """Places tiles and barriers, in the order of sm90_geometry."""
        geometry = self.geometry
        kv = self.tile_layout(SLOT_COLUMNS, geometry.kv_slots)
        rope = self.tile_layout(BOX_COLUMNS, geometry.rope_slots)
        queries = self.tile_layout(BOX_COLUMNS, geometry.q_tiles_in_smem)
        tiles = Tiles(
            sKv=smem.allocate_tensor(self.dtype, kv.outer, TILE_ALIGNMENT, kv.inner),
            sRope=smem.allocate_tensor(self.dtype, rope.outer, TILE_ALIGNMENT, rope.inner),
            sQ=smem.allocate_tensor(self.dtype, queries.outer, TILE_ALIGNMENT, queries.inner),
            sAlpha=smem.allocate_tensor(Float32, cute.make_layout((TILE_ROWS, geometry.rope_slots)), 16),
            sInverse=smem.allocate_tensor(Float32, cute.make_layout(TILE_ROWS), 16),
            sValid=smem.allocate_array(Uint8, geometry.valid_slots * VALID_BYTES, byte_alignment=8) if geometry.valid_slots else None,
        )
        rings = {name: Ring(smem.allocate_array(Int64, slots), slots) for name, slots in geometry.barriers}
        rings.setdefault("rope_free", Ring(rings["kv_free"].base, 0))
        return tiles, Pipes(**rings)

    def initialise(self, pipes: Any) -> None:
        """Sets the arrivals of every barrier: warps of the arriving role, times the CTAs that share a slot."""
        cluster = self.config.cluster
        pipes.kv_ready.initialise(self.geometry.ready_arrivals)
        pipes.kv_free.initialise(WARPS_PER_GROUP * cluster)
        pipes.rope_ready.initialise(self.geometry.ready_arrivals)
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

    @cute.jit
    def await_peer(self, pipes: Pipes, tiles_done: Int32):
        """Waits until every slot is free: the peer's last arrivals must not reach a CTA that is gone. No cluster barrier,
        which would make every warp wait for its stores. One warp is enough: the CTA stays as long as any."""
        kv = pipes.kv_free.place(tiles_done * SLOTS_PER_TILE)
        for _ in cutlass.range(self.geometry.kv_slots, unroll=1):
            pipes.kv_free.await_free_at(kv)
            kv = pipes.kv_free.after(kv)
        if cutlass.const_expr(self.geometry.frees_rope):
            rope = pipes.rope_free.place(tiles_done)
            for _ in cutlass.range(self.geometry.rope_slots, unroll=1):
                pipes.rope_free.await_free_at(rope)
                rope = pipes.rope_free.after(rope)

    # ---- score ------------------------------------------------------------------------------------------------------

    def score_gemm(self, tiles: Any, thread: Int32) -> Any:
        """The product that makes S, for one thread."""
        return ScoreGemm.create(self.geometry, self.dtype, tiles, thread)

    def softmax(self, operands: Any) -> OnlineSoftmax:
        """The state of a thread's rows."""
        return OnlineSoftmax.create(operands.scale_log2, self.keeps_maximum)

    @cute.jit
    def score(self, operands: Any, tiles: Tiles, pipes: Pipes, thread: Int32):
        """Waits kv_ready, rope_ready, stats_free. Signals probs_ready, stats_ready. Writes lse."""
        schedule = operands.schedule
        req, begin_tile = schedule.first_piece()
        last = schedule.last_request()
        tile, pieces = Int32(0), Int32(0)
        gemm = self.score_gemm(tiles, thread)
        softmax = self.softmax(operands)
        while req <= last:
            extent = schedule.extent(req, begin_tile)
            softmax.reset()
            if extent.tiles > 0:
                self.load_queries(operands, gemm, req, thread)
                self.score_tiles(operands, tiles, pipes, gemm, softmax, extent, tile)
            tile = tile + extent.tiles
            piece = schedule.piece_of(extent, req, begin_tile)
            if cutlass.const_expr(self.shares_sums):
                pipes.stats_free.wait_free(pieces)
            self.finish_rows(operands, tiles, req, piece, softmax, thread)
            if cutlass.const_expr(self.shares_sums):
                arrive(pipes.stats_ready.barrier(pieces))
            pieces = pieces + 1
            req, begin_tile = piece.next_req, piece.next_tile

    @cute.jit
    def load_queries(self, operands: Any, gemm: ScoreGemm, req: Int32, thread: Int32):
        """Q of one piece, from any strides: the first column tiles to registers, the others through registers to smem.

        Rows past the last one repeat it; their results go nowhere."""
        rows = []
        for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
            row = query_row(thread, row_half)
            row = cutlass.select_(row < operands.rows(), row, operands.rows() - 1)
            rows.append(operands.q_row(req, row) + 2 * (thread % 4))
        for tile in cutlass.range_constexpr(self.geometry.q_tiles):
            rQ = gemm.query_tile(tile)
            for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
                for eight in cutlass.range_constexpr(BOX_COLUMNS // 8):
                    source = rows[row_half] + (tile * BOX_COLUMNS + 8 * eight)
                    rQ[2 * eight + row_half] = load_pair(source, self.pairs)
            if cutlass.const_expr(tile >= self.geometry.q_tiles_in_registers):
                gemm.store_query_tile(tile - self.geometry.q_tiles_in_registers)
            if cutlass.const_expr(not self.pairs):
                cute.arch.sync_warp()  # keeps ptxas from starting more loads than the registers hold halves
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=SCORE_BARRIER, number_of_threads=WARPGROUP)

    @cute.jit
    def score_tiles(self, operands: Any, tiles: Any, pipes: Any, gemm: Any, softmax: OnlineSoftmax, extent: Extent, tile: Int32):
        """The tiles of a piece, the first of which is the tile-th of this CTA. Places are divided out: no registers are left to
        carry them.

        P of one tile is handed over only when S of the next is complete, so that P V fills the tensor cores during the next
        softmax. When the next keys have not come yet there is nothing to wait for, and P goes at once. withheld: the address of the
        barrier that hands over a P that is written, or NOTHING."""
        withheld = Int32(NOTHING)
        for t in cutlass.range(extent.tiles, unroll=1):
            place = pipes.tile(tile + t)
            if withheld != NOTHING:
                here = cute.arch.mbarrier_test_wait(pipes.rope_ready.at(place.rope), place.rope.parity)
                if not cute.arch.vote_all_sync(here):
                    arrive(barrier_at(withheld))
                    withheld = Int32(NOTHING)
            if cutlass.const_expr(self.skips_tiles):
                self.await_validity(pipes, place)
                if self.has_keys(tiles, place.rope.slot):
                    self.multiply_tile(pipes, gemm, place, withheld)
                    self.weigh_tile(operands, tiles, pipes, gemm, softmax, place, extent.keys - t * TILE_KEYS)
                    withheld = self.probs_barrier(pipes, place)
                else:
                    self.pass_tile(pipes, place, withheld)
                    withheld = Int32(NOTHING)
            else:
                self.multiply_tile(pipes, gemm, place, withheld)
                self.weigh_tile(operands, tiles, pipes, gemm, softmax, place, extent.keys - t * TILE_KEYS)
                withheld = self.probs_barrier(pipes, place)
        if withheld != NOTHING:
            arrive(barrier_at(withheld))

    def probs_barrier(self, pipes: Any, place: TilePlace) -> Int32:
        """The address of the barrier that hands over P of a tile."""
        return pipes.probs_ready.at(place.rope).toint()

    @cute.jit
    def multiply_tile(self, pipes: Any, gemm: Any, place: TilePlace, withheld: Int32):
        """S of one tile. Hands over P of the tile before, if it was withheld."""
        gemm.multiply(pipes, place)
        if withheld != NOTHING:
            arrive(barrier_at(withheld))
        # P goes over the RoPE columns that every warp's WGMMA has read by now
        cute.arch.barrier(barrier_id=SCORE_BARRIER, number_of_threads=WARPGROUP)

    @cute.jit
    def weigh_tile(self, operands: Any, tiles: Any, pipes: Any, gemm: Any, softmax: OnlineSoftmax, place: TilePlace, left: Int32):
        """P of one tile, with its rescale factors, to shared memory. Not handed over yet."""
        self.mask(operands, tiles, gemm, place, left)
        alpha = softmax.add_tile(gemm.scores)
        gemm.store_probs(place.rope.slot)
        if gemm.thread % 4 == 0:
            gemm.factors.store(place.rope.slot, alpha)
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def pass_tile(self, pipes: Pipes, place: TilePlace, withheld: Int32):
        """A tile without keys: nothing but handshakes. Its slots are handed over before its RoPE columns, so that those tell
        of all, and no barrier is two phases ahead of what this role has seen."""
        if withheld != NOTHING:
            arrive(barrier_at(withheld))
        pipes.rope_ready.wait_ready_at(place.rope)
        arrive(pipes.probs_ready.at(place.rope))

    def has_keys(self, tiles: Tiles, slot: Int32) -> Boolean:
        """Whether any key is there of the tile in a slot of the ring of bits, which goes round with the RoPE columns. The same for
        all lanes."""
        low, high = self.valid_words(tiles, slot)
        return cute.arch.make_warp_uniform(low | high) != 0

    def valid_words(self, tiles: Tiles, slot: Int32) -> tuple[Int32, Int32]:
        """Which of the keys 0..31 and 32..63 are there."""
        words = cute.recast_ptr(tiles.sValid, dtype=Int32) + slot * (VALID_BYTES // 4)
        return words.load(), (words + 1).load()

    @cute.jit
    def finish_rows(self, operands: Any, tiles: Tiles, req: Int32, piece: Piece, softmax: OnlineSoftmax, thread: Int32):
        """Publishes 1 / row sum and writes lse: natural log if the piece is the whole request, else base 2."""
        for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
            total = softmax.row_sum(row_half)
            empty = total == 0.0
            row = query_row(thread, row_half)
            lse = softmax.rMax[row_half] + cute.math.log2(total, fastmath=True)
            if thread % 4 == 0:
                if cutlass.const_expr(self.shares_sums):
                    weight = self.weigh_row(operands, piece, row, total, softmax.rMax[row_half])
                    inverse = cutlass.select_(empty, Float32(0), weight)
                    tiles.sInverse[fragment_row(thread, row_half)] = inverse
                if row < operands.rows():
                    if cutlass.const_expr(piece.always_direct):
                        operands.lse_of(req, row).store(cutlass.select_(empty, operands.empty_lse, lse * LN2))
                    else:
                        if piece.direct:
                            target = operands.lse_of(req, row)
                            target.store(cutlass.select_(empty, operands.empty_lse, lse * LN2))
                        else:
                            target = operands.lse_accum + operands.accum_row(piece, row)
                            target.store(cutlass.select_(empty, -Float32.inf, lse))
                    if cutlass.const_expr(self.keeps_maximum):
                        operands.max_logit_of(req, row).store(softmax.maximum(row_half) * LN2)

    # ---- output -----------------------------------------------------------------------------------------------------

    def output_gemm(self, tiles: Any, thread: Int32) -> Any:
        """The product that makes O, for one thread."""
        return OutputGemm.create(self.geometry, self.dtype, tiles, thread)

    @cute.jit
    def output(self, operands: Any, tiles: Tiles, pipes: Pipes, thread: Int32, side: Int32):
        """Waits probs_ready, stats_ready. Signals kv_free, rope_free, stats_free. Writes out or out_accum."""
        schedule = operands.schedule
        req, begin_tile = schedule.first_piece()
        last = schedule.last_request()
        place, pieces = self.first_output(pipes, side), Int32(0)
        gemm = self.output_gemm(tiles, thread)
        while req <= last:
            extent = schedule.extent(req, begin_tile)
            begun = Boolean(False)
            for t in cutlass.range(extent.tiles, unroll=1):
                begun = self.output_tile(tiles, pipes, gemm, place, begun, extent.keys - t * TILE_KEYS, side)
                place = pipes.next_tile(place)
            weights = self.row_weights(operands, tiles, pipes, gemm, pieces, begun)
            gemm.clear_weightless(weights)
            piece = schedule.piece_of(extent, req, begin_tile)
            if cutlass.const_expr(piece.always_direct):
                self.store_out(operands, gemm, weights, req, side)
            else:
                if piece.direct:
                    self.store_out(operands, gemm, weights, req, side)
                else:
                    self.store_accum(operands, gemm, weights, piece, side)
            pieces = pieces + 1
            req, begin_tile = piece.next_req, piece.next_tile

    def row_weights(self, operands: Any, tiles: Any, pipes: Any, gemm: Any, pieces: Int32, begun: Boolean) -> list[Float32]:
        """What makes the output of either of the thread's rows; 0 for a row that attends to nothing. begun: whether O holds
        anything."""
        pipes.stats_ready.wait_ready(pieces)
        weights = [tiles.sInverse[fragment_row(gemm.thread, row_half)] for row_half in (0, 1)]
        arrive(pipes.stats_free.barrier(pieces))
        return weights

    @cute.jit
    def output_tile(self, tiles: Any, pipes: Any, gemm: Any, place: TilePlace, begun: Boolean, left: Int32, side: Int32) -> Boolean:
        """O += P V of one tile, of which `left` keys remain in the request; O = P V unless O has begun. Returns whether it
        has now."""
        # the score role has waited for the keys before it made P
        pipes.probs_ready.wait_ready_at(place.rope)
        if cutlass.const_expr(self.skips_tiles):
            if self.has_keys(tiles, place.rope.slot):
                self.add_values(tiles, pipes, gemm, place, begun, left, side)
                begun = Boolean(True)
            else:
                for slot in self.output_slots(pipes, place):
                    arrive_cluster(pipes.kv_free.at(slot), self.config.cluster)
        else:
            self.add_values(tiles, pipes, gemm, place, begun, left, side)
            begun = Boolean(True)
        if cutlass.const_expr(self.geometry.frees_rope):
            arrive_cluster(pipes.rope_free.at(place.rope), self.config.cluster)
        return begun

    def first_output(self, pipes: Any, side: Int32) -> TilePlace:
        """The place of the first tile, for a side."""
        to_other, _ = self.geometry.slot_strides
        return pipes.first_tile(side * to_other)

    def output_slots(self, pipes: Pipes, place: TilePlace) -> list[Place]:
        """Where the chunks of a side lie, of a tile in its place."""
        _, to_next = self.geometry.slot_strides
        ring = pipes.kv_ready
        return [place.kv, ring.further(place.kv, 0) if to_next == 1 else ring.ahead(place.kv, to_next)]

    @cute.jit
    def add_values(self, tiles: Tiles, pipes: Pipes, gemm: OutputGemm, place: TilePlace, begun: Boolean, left: Int32, side: Int32):
        """O += P V, or O = P V, of a tile whose keys and probabilities have come. Signals kv_free."""
        slots = self.output_slots(pipes, place)
        alpha = gemm.factors.load(place.rope.slot)
        if cute.arch.vote_any_sync(begun & ((alpha[0] != 1.0) | (alpha[1] != 1.0))):
            gemm.scale(alpha)
        self.clear_unused(tiles, gemm, slots, left, side)
        warpgroup.fence()
        for chunk in cutlass.range_constexpr(OUTPUT_CHUNKS):
            gemm.multiply(chunk, place.rope.slot, slots[chunk].slot, begun)
        for chunk in cutlass.range_constexpr(OUTPUT_CHUNKS):
            warpgroup.wait_group(OUTPUT_CHUNKS - 1 - chunk)
            arrive_cluster(pipes.kv_free.at(slots[chunk]), self.config.cluster)

    @cute.jit
    def store_out(self, operands: Any, gemm: OutputGemm, weights: list[Float32], req: Int32, side: Int32):
        """Registers straight to out: the quad writes 16 contiguous bytes of a row."""
        for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
            row = query_row(gemm.thread, row_half)
            if row < operands.rows():
                target = operands.out_row(req, row) + (side * OUTPUT_COLUMNS + gemm.lane_column())
                for pair in cutlass.range_constexpr(OUTPUT_COLUMNS // 8):
                    low, high = gemm.pair(pair, row_half, weights[row_half])
                    store_pair(target + gemm.pair_column(pair), pack_pair(low, high, self.dtype), self.pairs)

    @cute.jit
    def store_accum(self, operands: Any, gemm: OutputGemm, weights: list[Float32], piece: Piece, side: Int32):
        """fp32 rows of the split accumulators, 32 contiguous bytes per quad."""
        for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
            row = query_row(gemm.thread, row_half)
            if row < operands.rows():
                target = operands.out_accum + operands.accum_row(piece, row) * D_LATENT
                target = aligned(target + (side * OUTPUT_COLUMNS + gemm.lane_column()), 8)
                for pair in cutlass.range_constexpr(OUTPUT_COLUMNS // 8):
                    rPair = cute.make_rmem_tensor(cute.make_layout(2), Float32)
                    rPair[0], rPair[1] = gemm.pair(pair, row_half, weights[row_half])
                    cute.autovec_copy(rPair, cute.make_tensor(target + gemm.pair_column(pair), cute.make_layout(2)))


def query_row(thread: Int32, row_half: int) -> Int32:
    """Row, among all row tiles, that one of the thread's fragment rows is."""
    return first_query_row() + fragment_row(thread, row_half)


def group_of(warp: Int32) -> Int32:
    """The warpgroup of a warp."""
    return Int32(Uint32(warp) // WARPS_PER_GROUP)


def set_registers(count: int) -> None:
    """Of each lane of this warpgroup. A whole warpgroup."""
    if count < LAUNCH_REGISTERS:
        cute.arch.setmaxregister_decrease(count)
    else:
        cute.arch.setmaxregister_increase(count)


def named_barriers() -> tuple[NamedBarrier, ...]:
    """Those of score and output."""
    return (
        NamedBarrier("score", SCORE_BARRIER),
        NamedBarrier("output_left", OUTPUT_BARRIER),
        NamedBarrier("output_right", OUTPUT_BARRIER + 1),
    )


def role_table(first: str) -> tuple[Role, ...]:
    """The four warpgroups; `first` brings the keys."""
    names = (first, "score", "output_left", "output_right")
    return tuple(Role(name, group * WARPS_PER_GROUP, WARPS_PER_GROUP) for group, name in enumerate(names))

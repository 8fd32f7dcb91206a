"""Dense prefill on Blackwell.

For every sequence, query head and query row i of s_q, over the keys j of s_k that the row sees:

    s_ij = <q_i, k_j> over 192 or 128 columns     p = softmax(scale * s)     out_i = sum_j p_ij v_j (128 columns)

A CTA takes one work item after another: 256 query rows of a head, as two Q tiles of 128, against the keys of their KV head,
128 (a key tile) at a time, from the last to the first, so that masks are needed in front only.

Roles (512 threads):
  softmax  warps 0..3, 4..7: one group for each Q tile, a thread a row: softmax, P to tensor memory, lse
  output   warps 8..11: rescale of O, epilogue of both Q tiles
  mma      warp 12: S = Q K^T and O += P V of both
  load     warp 13: TMA of K and V, and of Q
  query    warps 14, 15: Q element by element, in variants without TMA for it

Tensor memory: S of the Q tiles in 2 x 128 columns, O in 2 x 128. P, 16-bit, overwrites the first half of its S.
Shared memory: Q (2 tiles), and a ring of 16 KB slots for keys (64 columns of 128) and values (64 of them, all columns).

Pipelines (producer -> consumer; arrivals per phase). Those of [2] are one for each Q tile:
  kv_ready[n]       load -> mma, softmax          1 and the bytes of two boxes; n = 8 (d_qk 192) or 10
  kv_free[n]        mma -> load                   1: both Q tiles have been multiplied with it
  query_ready[2]    load or query -> mma          1 and the bytes of Q, or 2; once per item
  query_free[2]     mma -> load or query          1: the item's last S is complete
  scores_ready[2]   mma -> softmax                1: S is complete, and so is O up to the key tile before
  alpha_ready[2]    softmax -> output             4: rescale factors; not of an item's first key tile
  probs_ready[2]    softmax, output -> mma        8: P of 96 keys is written, O is scaled or has been read out
  rest_ready[2]     softmax -> mma                4: P of the others is written
  output_ready[2]   mma -> output                 1: O is complete; once per item
  sums_ready[2]     softmax -> output             4: 1 / row sum; once per item
  sums_free[2]      output -> softmax             4

The trick: the two Q tiles take turns. While the softmax of one runs, the tensor cores multiply for the other, in the order
P V of tile 0, next S of tile 0, P V of tile 1, next S of tile 1. P V starts when three quarters of P are there, and part of
the exponentials are polynomials on the FMA pipe. README.md has the clocks.
"""

from __future__ import annotations

from dataclasses import replace

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint8, cute

from ...manifest import Role
from ...spec.arch import Arch
from ...spec.dense_prefill import BOX_COLUMNS, BOX_ROWS, DensePrefillConfig
from ...spec.mla import ELEMENT_BYTES
from ..parts import tcgen05
from ..parts.barriers import Ring, arrive, barrier_table
from ..parts.lengths import larger
from ..parts.tma import load_box, prefetch_map
from ..source import KernelSource
from .entry import DensePrefill
from .operands import Item, Operands
from .sm100_geometry import (
    BOX_BYTES,
    BOXES_PER_SLOT,
    FIRST_KEYS,
    GROUP_WARPS,
    HALF_KEYS,
    LOAD_WARP,
    MMA_WARP,
    OTHER_REGISTERS,
    OUTPUT_REGISTERS,
    OUTPUT_WARP,
    QUERY_TILES,
    QUERY_WARP,
    QUERY_WARPS,
    SLOT_BYTES,
    SOFTMAX_REGISTERS,
    THREADS,
    TILE_ALIGNMENT,
    TILE_KEYS,
    TILE_ROWS,
    TMEM_COLUMNS,
    TMEM_LANE,
    VALUE_SLOTS,
    Geometry,
    Part,
    Pipes,
    Tiles,
    key_tiles,
)
from .sm100_mma import TileGemm
from .sm100_output import OutputRows
from .sm100_rows import clear_rows, load_query_tile
from .sm100_softmax import RowSoftmax


class DensePrefillSm100(DensePrefill):
    """One variant of the kernel."""

    threads = THREADS
    rows_each = QUERY_TILES * TILE_ROWS

    def __init__(self, config: DensePrefillConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        self.geometry = Geometry(config.d_qk)

    @property
    def wide(self) -> bool:
        """Whether Q comes by TMA and rows of out are written 16 bytes at a time."""
        return bool(self.config.access_bytes > ELEMENT_BYTES)

    @cute.jit
    def run(self, operands: Operands):
        tiles, pipes = self.carve_smem(cutlass.memory.SmemAllocator())
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD_WARP:
            with cute.arch.elect_one():
                self.initialise(pipes)
                for tensor_map in (operands.k_map, operands.v_map, *([operands.q_map] if self.wide else [])):
                    prefetch_map(tensor_map)
        if warp == MMA_WARP:
            tcgen05.allocate(tiles.tmem_cell, TMEM_COLUMNS, tcgen05.OWN_GROUP)
        cute.arch.sync_threads()
        tmem = tiles.tmem_cell.load()
        # the lengths and all tensors may come from the kernel before
        cute.arch.griddepcontrol_wait()

        if warp < OUTPUT_WARP:
            cute.arch.setmaxregister_increase(SOFTMAX_REGISTERS)
            self.softmax(operands, tiles, pipes, tmem, warp // GROUP_WARPS)
        elif warp < MMA_WARP:
            cute.arch.setmaxregister_decrease(OUTPUT_REGISTERS)
            self.output(operands, tiles, pipes, tmem)
        else:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if warp == MMA_WARP:
                self.multiply(operands, pipes, TileGemm(self.dtype, self.geometry, tiles, tmem))
            elif warp == LOAD_WARP:
                self.load(operands, tiles, pipes)
            elif cutlass.const_expr(not self.wide):
                self.load_queries(operands, tiles, pipes)

        tcgen05.fence_before_signal()
        cute.arch.sync_threads()
        if warp == MMA_WARP:
            tcgen05.fence_after_wait()
            tcgen05.free(tmem, TMEM_COLUMNS, tcgen05.OWN_GROUP)

    def carve_smem(self, smem: cutlass.memory.SmemAllocator) -> tuple[Tiles, Pipes]:
        """Places tiles and barriers, in the order of the geometry."""
        sizes = (QUERY_TILES * self.geometry.query_bytes, self.geometry.slots * SLOT_BYTES)
        sQ, sKv = (smem.allocate_array(Uint8, size, byte_alignment=TILE_ALIGNMENT) for size in sizes)
        sAlpha, sInverse = (smem.allocate_array(Float32, QUERY_TILES * TILE_ROWS) for _ in range(2))
        tiles = Tiles(sQ, sKv, sAlpha, sInverse, tmem_cell=None)
        pipes = Pipes(**{name: Ring(smem.allocate_array(Int64, slots), slots) for name, slots in self.geometry.barriers})
        return replace(tiles, tmem_cell=smem.allocate_array(Int32, 1)), pipes

    def initialise(self, pipes: Pipes) -> None:
        """Sets the arrivals of every barrier: warps of the arriving roles, or one commit."""
        for ring in (pipes.kv_ready, pipes.kv_free, pipes.query_free, pipes.scores_ready, pipes.output_ready):
            ring.initialise(1)
        pipes.query_ready.initialise(1 if self.wide else QUERY_WARPS)
        for ring in (pipes.alpha_ready, pipes.rest_ready, pipes.sums_ready, pipes.sums_free):
            ring.initialise(GROUP_WARPS)
        pipes.probs_ready.initialise(2 * GROUP_WARPS)
        cute.arch.mbarrier_init_fence()

    # ---- load -------------------------------------------------------------------------------------------------------

    @cute.jit
    def load(self, operands: Operands, tiles: Tiles, pipes: Pipes):
        """Waits kv_free, query_free. Signals kv_ready, query_ready."""
        items = operands.items
        turn, uses, loads = Int32(0), Int32(0), [Int32(0), Int32(0)]
        index = items.of_round(turn)
        while index < items.count():
            item = items.read(index)
            if item.keys > 0:
                last = item.first_key + (key_tiles(item.keys) - 1) * TILE_KEYS
                self.load_keys(operands, tiles, pipes, item, last, uses)
                if cutlass.const_expr(self.wide):
                    loads = self.load_query_tiles(operands, tiles, pipes, item, loads)
                self.load_values(operands, tiles, pipes, item, last, uses)
                uses = uses + self.geometry.tile_slots
                for t in cutlass.range(1, key_tiles(item.keys), unroll=1):
                    self.load_keys(operands, tiles, pipes, item, last - t * TILE_KEYS, uses)
                    self.load_values(operands, tiles, pipes, item, last - t * TILE_KEYS, uses)
                    uses = uses + self.geometry.tile_slots
            turn = turn + 1
            index = items.of_round(turn)
        cute.arch.griddepcontrol_launch_dependents()
        # no signal may reach a CTA that is gone
        for i in cutlass.range(self.geometry.slots, unroll=1):
            pipes.kv_free.wait_free(uses + i)

    @cute.jit
    def load_keys(self, operands: Operands, tiles: Tiles, pipes: Pipes, item: Item, row: Int32, use: Int32):
        """Keys from a row on, 64 columns a slot."""
        for i in cutlass.range_constexpr(self.geometry.key_slots):
            ready, target = self.next_slot(tiles, pipes, use + i)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ready, SLOT_BYTES)
                for box in cutlass.range_constexpr(BOXES_PER_SLOT):
                    where = (i * BOX_COLUMNS, item.kv_head, row + box * BOX_ROWS)
                    load_box(target + box * BOX_BYTES, operands.k_map, where, ready)

    @cute.jit
    def load_values(self, operands: Operands, tiles: Tiles, pipes: Pipes, item: Item, row: Int32, use: Int32):
        """Values from a row on, 64 rows a slot."""
        for i in cutlass.range_constexpr(VALUE_SLOTS):
            ready, target = self.next_slot(tiles, pipes, use + self.geometry.key_slots + i)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ready, SLOT_BYTES)
                for box in cutlass.range_constexpr(BOXES_PER_SLOT):
                    where = (box * BOX_COLUMNS, item.kv_head, row + i * HALF_KEYS)
                    load_box(target + box * BOX_BYTES, operands.v_map, where, ready)

    def next_slot(self, tiles: Tiles, pipes: Pipes, use: Int32) -> tuple[cute.Pointer, cute.Pointer]:
        """(barrier, first byte) of a slot, when it is free."""
        pipes.kv_free.wait_free(use)
        return pipes.kv_ready.barrier(use), tiles.sKv + pipes.kv_ready.slot(use) * SLOT_BYTES

    @cute.jit
    def load_query_tiles(self, operands: Operands, tiles: Tiles, pipes: Pipes, item: Item, loads: list[Int32]):
        """Q of an item, of the tiles that have keys. Rows past the sequence's end are another's, or zeros: their results go
        nowhere. Returns the loads of each tile so far."""
        done = list(loads)
        for tile in cutlass.range_constexpr(QUERY_TILES):
            if Part.of(item, tile).tiles > 0:
                ready = pipes.of_tile(tile).query_ready.barrier(done[tile])
                pipes.of_tile(tile).query_free.wait_free(done[tile])
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(ready, self.geometry.query_bytes)
                    for i in cutlass.range_constexpr(self.geometry.key_slots * BOXES_PER_SLOT):
                        columns, rows = divmod(i, BOXES_PER_SLOT)
                        where = (columns * BOX_COLUMNS, item.head, item.first_row + (tile * TILE_ROWS + rows * BOX_ROWS))
                        target = tiles.sQ + (tile * self.geometry.query_bytes + i * BOX_BYTES)
                        load_box(target, operands.q_map, where, ready)
                done[tile] = done[tile] + 1
        return done

    @cute.jit
    def load_queries(self, operands: Operands, tiles: Tiles, pipes: Pipes):
        """Waits query_free. Signals query_ready."""
        items = operands.items
        turn, loads = Int32(0), [Int32(0), Int32(0)]
        index = items.of_round(turn)
        thread = cute.arch.thread_idx()[0] - QUERY_WARP * 32
        while index < items.count():
            item = items.read(index)
            for tile in cutlass.range_constexpr(QUERY_TILES):
                part = Part.of(item, tile)
                if part.tiles > 0:
                    pipes.of_tile(tile).query_free.wait_free(loads[tile])
                    target = tiles.sQ + tile * self.geometry.query_bytes
                    load_query_tile(operands, item, tile * TILE_ROWS, target, self.geometry.key_slots, thread)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    arrive(pipes.of_tile(tile).query_ready.barrier(loads[tile]))
                    loads[tile] = loads[tile] + 1
            turn = turn + 1
            index = items.of_round(turn)

    # ---- mma --------------------------------------------------------------------------------------------------------

    @cute.jit
    def multiply(self, operands: Operands, pipes: Pipes, gemm: TileGemm):
        """Waits kv_ready, query_ready, probs_ready, rest_ready. Signals scores_ready, output_ready, query_free, kv_free.

        Goes from item to item without a break: P V of a Q tile's last key tile comes after S of the other Q tile, and before its
        own first S of the next item. After the last item comes one without keys."""
        items = operands.items
        turn, uses, more = Int32(0), Int32(0), Boolean(True)
        # of each Q tile: items with keys, key tiles multiplied to S, and which one of its item the last of them is, if it waits for P V
        queries, count, waiting = [Int32(0), Int32(0)], [Int32(0), Int32(0)], [Int32(-1), Int32(-1)]
        while more:
            more = items.of_round(turn) < items.count()
            item = items.take(turn)
            tiles = key_tiles(item.keys)
            parts = [Part.of(item, tile) for tile in range(QUERY_TILES)]
            for t in cutlass.range(cutlass.select_(more, tiles, Int32(1)), unroll=1):
                for tile in cutlass.range_constexpr(QUERY_TILES):
                    if waiting[tile] >= 0:
                        self.multiply_output(pipes, gemm, tile, count[tile] - 1, uses - VALUE_SLOTS, waiting[tile] > 0)
                        if t == 0:
                            self.commit(pipes.of_tile(tile).output_ready.barrier(queries[tile] - 1))
                    if cutlass.const_expr(tile == QUERY_TILES - 1) and uses > 0:
                        self.free_slots(pipes, uses - VALUE_SLOTS, VALUE_SLOTS)
                    own = t - parts[tile].skipped
                    waiting[tile] = Int32(-1)
                    if own >= 0 and own < parts[tile].tiles:
                        if own == 0:
                            pipes.of_tile(tile).query_ready.wait_ready(queries[tile])
                            queries[tile] = queries[tile] + 1
                        self.multiply_scores(pipes, gemm, tile, count[tile], uses)
                        if t == tiles - 1:
                            self.commit(pipes.of_tile(tile).query_free.barrier(queries[tile] - 1))
                        count[tile] = count[tile] + 1
                        waiting[tile] = own
                if tiles > 0:
                    self.free_slots(pipes, uses, self.geometry.key_slots)
                    uses = uses + self.geometry.tile_slots
            turn = turn + 1

    def multiply_scores(self, pipes: Pipes, gemm: TileGemm, tile: int, count: Int32, keys: Int32) -> None:
        """S of a Q tile's count-th key tile, whose keys are in the slots of use `keys` and on."""
        operands = gemm.keys([pipes.kv_ready.slot(keys + i) for i in range(self.geometry.key_slots)])
        # S may be overwritten: the product with P that lies over it is in front of this one in the tensor core's queue
        for i in range(self.geometry.key_slots):
            pipes.kv_ready.wait_ready(keys + i)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            gemm.scores(tile, operands)
            tcgen05.commit_alone(pipes.of_tile(tile).scores_ready.barrier(count))

    def multiply_output(self, pipes: Pipes, gemm: TileGemm, tile: int, count: Int32, values: Int32, accumulate: Boolean) -> None:
        """P V of a Q tile's count-th key tile, whose values are in the slots of use `values` and on."""
        own = pipes.of_tile(tile)
        operands = gemm.values([pipes.kv_ready.slot(values + i) for i in range(VALUE_SLOTS)])
        for i in range(VALUE_SLOTS):
            pipes.kv_ready.wait_ready(values + i)
        for ready, first, end in ((own.probs_ready, 0, FIRST_KEYS), (own.rest_ready, FIRST_KEYS, TILE_KEYS)):
            ready.wait_ready(count)
            tcgen05.fence_after_wait()
            with cute.arch.elect_one():
                gemm.output(tile, operands, first, end, accumulate)

    def free_slots(self, pipes: Pipes, use: Int32, count: int) -> None:
        """Slots may be loaded again when what has been issued is done."""
        with cute.arch.elect_one():
            for i in range(count):
                tcgen05.commit_alone(pipes.kv_free.barrier(use + i))

    def commit(self, barrier: cute.Pointer) -> None:
        """An arrival when what has been issued is done."""
        with cute.arch.elect_one():
            tcgen05.commit_alone(barrier)

    # ---- softmax ----------------------------------------------------------------------------------------------------

    @cute.jit
    def softmax(self, operands: Operands, tiles: Tiles, pipes: Pipes, tmem: Int32, tile: Int32):
        """Waits scores_ready, kv_ready, sums_free. Signals alpha_ready, probs_ready, rest_ready, sums_ready. Writes lse."""
        items = operands.items
        own = pipes.of_tile(tile)
        rows = RowSoftmax.create(self.dtype, tiles, first_lane(tmem), tile, operands.scale_log2)
        turn, uses, done, alphas, sums = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        index = items.of_round(turn)
        while index < items.count():
            item = items.read(index)
            part = Part.of(item, tile)
            if part.rows > 0:
                rows.reset()
                for t in cutlass.range(part.tiles, unroll=1):
                    own.scores_ready.wait_ready(done + t)
                    tcgen05.fence_after_wait()
                    if t == 0 and self.clears_values(item, part, tile):
                        self.clear_values(tiles, pipes, uses + self.geometry.key_slots, item.keys, rows.row)
                    self.softmax_tile(own, rows, part, t, done + t, alphas + t - 1)
                done = done + part.tiles
                alphas = alphas + larger(part.tiles - 1, Int32(0))
                own.sums_free.wait_free(sums)
                total = rows.publish_sum()
                arrive(own.sums_ready.barrier(sums))
                sums = sums + 1
                if rows.row < part.rows:
                    lse = cutlass.select_(total == 0.0, operands.empty_lse, rows.lse(total))
                    operands.lse_of(item, tile * TILE_ROWS + rows.row).store(lse)
            uses = uses + key_tiles(item.keys) * self.geometry.tile_slots
            turn = turn + 1
            index = items.of_round(turn)

    @cute.jit
    def softmax_tile(self, own: Pipes, rows: RowSoftmax, part: Part, t: Int32, use: Int32, alpha_use: Int32):
        """Turns the scores of a part's t-th key tile, which are complete, into probabilities.

        The last scores are loaded again when the first part of P is handed over: ptxas would otherwise compute all of P before it
        stores any."""
        first_key = (part.tiles - 1 - t) * TILE_KEYS
        limit = part.key_limit(rows.row) - first_key
        masked = part.key_limit(Int32(0)) < first_key + TILE_KEYS
        rows.finish_load(rows.start_load(0))
        if masked:
            rows.mask(limit, 0)
        alpha = rows.advance()
        if t > 0:
            rows.publish_factor(alpha)
            arrive(own.alpha_ready.barrier(alpha_use))
        rows.exponentiate(0, FIRST_KEYS)
        again = rows.start_load(FIRST_KEYS)
        rows.store(0, FIRST_KEYS)
        tcgen05.fence_before_signal()
        arrive(own.probs_ready.barrier(use))
        rows.finish_load(again)
        if masked:
            rows.mask(limit, FIRST_KEYS)
        rows.exponentiate(FIRST_KEYS, TILE_KEYS)
        rows.store(FIRST_KEYS, TILE_KEYS)
        tcgen05.fence_before_signal()
        arrive(own.rest_ready.barrier(use))

    def clears_values(self, item: Item, part: Part, tile: Int32) -> Boolean:
        """Whether there are values of no key in the item's last key tile, and this Q tile is the first to be multiplied with
        them."""
        first = (tile == 0) | (Part.of(item, 0).skipped > 0)
        return (item.keys % TILE_KEYS != 0) & (part.skipped == 0) & first

    @cute.jit
    def clear_values(self, tiles: Tiles, pipes: Pipes, use: Int32, keys: Int32, thread: Int32):
        """P is 0 past the end, but 0 times a NaN of an unused row is NaN. The arrival with P hands over the zeros.

        S of the key tile is complete, so the slots are at this use or the one before: no other parity can be mistaken for it."""
        for half in cutlass.range_constexpr(VALUE_SLOTS):
            pipes.kv_ready.wait_ready(use + half)
            slot = tiles.sKv + pipes.kv_ready.slot(use + half) * SLOT_BYTES
            clear_rows(slot, keys % TILE_KEYS - half * HALF_KEYS, thread)
        cute.arch.fence_proxy("async.shared", space="cta")

    # ---- output -----------------------------------------------------------------------------------------------------

    @cute.jit
    def output(self, operands: Operands, tiles: Tiles, pipes: Pipes, tmem: Int32):
        """Waits alpha_ready, output_ready, sums_ready. Signals probs_ready, sums_free. Writes out."""
        items = operands.items
        rows = [OutputRows.create(self.dtype, self.wide, tiles, first_lane(tmem), tile) for tile in range(QUERY_TILES)]
        own = [pipes.of_tile(tile) for tile in range(QUERY_TILES)]
        turn, done, alphas = Int32(0), [Int32(0), Int32(0)], [Int32(0), Int32(0)]
        outputs, sums = [Int32(0), Int32(0)], [Int32(0), Int32(0)]
        index = items.of_round(turn)
        for tile in cutlass.range_constexpr(QUERY_TILES):
            arrive(own[tile].probs_ready.barrier(0))  # O is free for the first item
        while index < items.count():
            item = items.read(index)
            parts = [Part.of(item, tile) for tile in range(QUERY_TILES)]
            for t in cutlass.range(1, key_tiles(item.keys), unroll=1):
                for tile in cutlass.range_constexpr(QUERY_TILES):
                    step = t - parts[tile].skipped
                    if step > 0:
                        self.rescale(own[tile], rows[tile], done[tile] + step, alphas[tile] + step - 1)
            for tile in cutlass.range_constexpr(QUERY_TILES):
                part = parts[tile]
                if part.rows > 0:
                    if part.tiles > 0:
                        own[tile].output_ready.wait_ready(outputs[tile])
                        tcgen05.fence_after_wait()
                        outputs[tile] = outputs[tile] + 1
                    own[tile].sums_ready.wait_ready(sums[tile])
                    inverse = rows[tile].inverse()
                    arrive(own[tile].sums_free.barrier(sums[tile]))
                    sums[tile] = sums[tile] + 1
                    target = operands.out_row(item, tile * TILE_ROWS + rows[tile].row)
                    rows[tile].store(target, part.rows, inverse, part.tiles > 0)
                    if part.tiles > 0:
                        done[tile] = done[tile] + part.tiles
                        alphas[tile] = alphas[tile] + part.tiles - 1
                        tcgen05.fence_before_signal()
                        arrive(own[tile].probs_ready.barrier(done[tile]))  # O is free for the next item
            turn = turn + 1
            index = items.of_round(turn)

    @cute.jit
    def rescale(self, own: Pipes, rows: OutputRows, use: Int32, alpha_use: Int32):
        """O *= alpha where the maximum has moved, then lets P V of a Q tile's next key tile begin.

        The factor is there when S of that key tile is, and S comes after P V of the key tile before."""
        own.alpha_ready.wait_ready(alpha_use)
        alpha = rows.factor()
        if cute.arch.vote_any_sync(alpha != 1.0):
            tcgen05.fence_after_wait()
            rows.scale(alpha)
            tcgen05.fence_before_signal()
        arrive(own.probs_ready.barrier(use))


def first_lane(tmem: Int32) -> Int32:
    """Tensor memory at the first of this warp's lanes."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % GROUP_WARPS
    return tmem + warp * (32 * TMEM_LANE)


def build(config: DensePrefillConfig, arch: Arch) -> KernelSource:
    """The variant, ready to compile."""
    kernel = DensePrefillSm100(config, arch)
    geometry = kernel.geometry
    softmax = tuple(Role(f"softmax{tile}", tile * GROUP_WARPS, GROUP_WARPS) for tile in range(QUERY_TILES))
    query = () if kernel.wide else (Role("query", QUERY_WARP, QUERY_WARPS),)
    return kernel.source(
        smem_bytes=geometry.smem_bytes,
        barriers=barrier_table(geometry.barrier_offset, geometry.barriers),
        named_barriers=(),
        roles=(*softmax, Role("output", OUTPUT_WARP, GROUP_WARPS), Role("mma", MMA_WARP, 1), Role("load", LOAD_WARP, 1), *query),
        expected={"UTCHMMA": geometry.products},
        tmem_columns=TMEM_COLUMNS,
    )

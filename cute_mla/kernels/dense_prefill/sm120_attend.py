"""The roles of the SM120 dense prefill kernel that load K, behind Q, and that attend. sm120.py describes pipelines and the trick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from ..attention.softmax import OnlineSoftmax
from ..primitives.arithmetic import pack_pair, pin_register
from ..primitives.copies import CHUNK, load_groups
from ..primitives.rows import registers
from ..primitives.warp_products import BOX_ROW_BYTES, CHUNKS, SUMS, K, M, N, chunk_address, multiply
from ..primitives.wgmma import ROWS_PER_THREAD, fragment_row, half
from ..sm120.attend import chunk_at
from .fragments import FragmentRows
from .operands import DensePrefillItem, DensePrefillOperands, DensePrefillRows, EveryKey, ItemQueue
from .sm90_attend import give_turn, take_turn
from .sm90_gemm import row_words
from .sm90_load import load_tile
from .sm120_config import LANES, STEP_BYTES, TURN_WARPS, DensePrefillSm120Geometry, DensePrefillSm120Smem

A_WORDS = 4  # of a lane, of an operand of 16 rows
STEP_CHUNKS = 2  # of 16 bytes: 16 columns
WRITTEN_COLUMNS = 64  # of a row of out, rounded at once


@dataclass(frozen=True)
class DensePrefillSm120KeyRole:
    """One warp: TMA of Q of an item, then of its tiles of K, the last tile first."""

    geometry: DensePrefillSm120Geometry

    @cute.jit
    def run(self, args: Any, queue: ItemQueue, smem: DensePrefillSm120Smem):
        """Wait item_ready, key_free. Signal item_free, key_ready. Rows of Q past the sequence's end are the next one's, or zeros."""
        keys = self.geometry.tile_keys
        use, turn = Int32(0), Int32(1)
        more, item = queue.take(Int32(0))
        while more:
            if item.has_queries():
                for piece in cutlass.range_constexpr(self.geometry.query_uses):
                    self.load(smem, use + piece, args.q_map, (item.head, item.first_row + piece * keys))
                use = use + self.geometry.query_uses
            walk = item.walk(self.geometry.key_tiles(item.keys))
            for i in cutlass.range(walk.count, unroll=1):
                walk.advance()
                self.load(smem, use + i, args.k_map, (item.kv_head, item.first_key + walk.tile(i) * keys))
            use = use + walk.count
            more, item = queue.take(turn)
            turn = turn + 1

    def load(self, smem: DensePrefillSm120Smem, use: Int32, tensor_map: Any, where: tuple[Int32, Int32]) -> None:
        """Start the copy of a stage, from (head, first row) on, when it is free."""
        smem.key_free.producer_acquire(use)
        stage, ready = smem.key_ready.stage(use), smem.key_ready.barrier(use)
        load_tile(smem.sK, stage, tensor_map, where, ready, self.geometry.key_bytes, self.geometry.box_keys)


@dataclass(frozen=True)
class WarpOutput:
    """O of a warp's 16 rows. sum: fp32, registers of a lane as primitives/warp_products.py has them."""

    dtype: type[cutlass.Numeric]
    sum: cute.Tensor

    def scale(self, factors: list[Float32]) -> None:
        """Multiply the thread's two rows."""
        for i in range(cute.size(self.sum)):
            self.sum[i] = self.sum[i] * factors[half(i)]

    def row_words(self, row_half: int, factor: Float32, first: int, columns: int) -> list[Int32]:
        """Return columns of one of the thread's rows times a factor, rounded."""
        return row_words(self.sum, self.dtype, row_half, factor, first, columns)


@dataclass(frozen=True)
class DensePrefillSm120Products:
    """The two products of one thread, and their operands.

    thread: of all that attend. warp: of eight, uniform. tall, wide: bytes from a stage to what the lane loads of 16 rows of 16 columns, for
    Q and V and for K: other columns are flipped bits away, since a stage begins at a multiple of 128 bytes. queries: A of S, d_qk / 16
    times four words; the last kept_steps are in shared memory.
    """

    geometry: DensePrefillSm120Geometry
    thread: Int32
    warp: Int32
    tall: Int32
    wide: Int32
    queries: list[cute.Tensor]
    scores: cute.Tensor  # S = Q K^T, of a tile
    output: WarpOutput  # O += P V

    @staticmethod
    def create(
        geometry: DensePrefillSm120Geometry, dtype: type[cutlass.Numeric], thread: Int32, smem: DensePrefillSm120Smem
    ) -> DensePrefillSm120Products:
        """Return the registers of one thread."""
        scores, output = (
            cute.make_rmem_tensor(cute.make_layout(columns // N * SUMS), Float32) for columns in (geometry.tile_keys, geometry.config.d_v)
        )
        queries = [registers(A_WORDS) for _ in range(geometry.config.d_qk // K - geometry.kept_steps)]
        queries += [chunk_at(smem.sQ.toint() + step * STEP_BYTES + thread * CHUNK) for step in range(geometry.kept_steps)]
        lane = cute.arch.lane_idx()
        tall = chunk_address(Int32(0), lane % M, lane // M)
        wide = chunk_address(Int32(0), lane % N + lane // M * N, lane // N % 2)
        tall, wide = pin_register(tall), pin_register(wide)
        warp = cute.arch.make_warp_uniform(thread // LANES)
        return DensePrefillSm120Products(geometry, thread, warp, tall, wide, queries, scores, WarpOutput(dtype, output))

    @property
    def first_row(self) -> Int32:
        """Return the first row of the item's block that the warp has."""
        return self.warp * M

    @property
    def group(self) -> Int32:
        """Return which of two warps of its scheduler the warp is, of those that take turns."""
        return self.warp // TURN_WARPS

    def row(self, row_half: int) -> Int32:
        """Return the row of the item's block that one of the thread's fragment rows is."""
        return fragment_row(self.thread, row_half)

    def sees(self, item: DensePrefillItem, tile: Int32) -> Boolean:
        """Return whether the sequence has any of the warp's rows, and a causal mask shows one of them a key of a tile."""
        last = item.diagonal + (self.first_row + (M - 1))
        return (self.first_row < item.rows) & (tile * self.geometry.tile_keys <= last)

    def load(self, place: Int32, row: int, column: int, transposed: bool = False) -> list[Int32]:
        """Load 16 rows of 16 columns of a stage. place: of the lane's row and 16 bytes for row 0 and column 0, as an address."""
        box, chunk = divmod(column * STEP_CHUNKS // K, CHUNKS)
        return load_groups((place ^ (chunk * CHUNK)) + (box * self.geometry.box_bytes + row * BOX_ROW_BYTES), transposed)

    def load_queries(self, tile: Int32) -> None:
        """Load the warp's rows. tile: the stage that has them."""
        place = tile + self.first_row % self.geometry.tile_keys * BOX_ROW_BYTES + self.tall
        for step in range(self.geometry.config.d_qk // K):
            words = registers(A_WORDS)
            for i, word in enumerate(self.load(place, 0, step * K)):
                words[i] = word
            cute.autovec_copy(words, self.queries[step])

    def multiply_keys(self, tile: Int32) -> None:
        """Compute S. tile: the stage of K. The turn is given in the middle: the other warp's first products come when these end."""
        self.scores.fill(0.0)
        steps = self.geometry.config.d_qk // K
        for step in range(steps):
            if step == steps // 2:
                give_turn(self.group)
            words = registers(A_WORDS)
            cute.autovec_copy(self.queries[step], words)
            a = [words[i] for i in range(A_WORDS)]
            for key in range(0, self.geometry.tile_keys, 2 * N):
                both = self.load(tile + self.wide, key, step * K)
                for side in range(2):
                    multiply(self.scores, SUMS * (key // N + side), a, both[2 * side : 2 * side + 2], self.output.dtype)

    def follow(self, softmax: OnlineSoftmax) -> tuple[list[Float32], list[Float32]]:
        """Bring the references of the thread's rows to what S asks for. Return factors of O, and what to add to scaled scores."""
        both = [softmax.follow_row(self.scores, self.of_row(row_half), row_half) for row_half in range(ROWS_PER_THREAD)]
        return [factor for factor, _ in both], [shift for _, shift in both]

    def of_row(self, row_half: int, first: int = 0, count: int | None = None) -> list[int]:
        """Return the registers of S, or `count` of them from `first` on, that one of the thread's rows has."""
        end = cute.size(self.scores) if count is None else first + count
        return [i for i in range(first, end) if half(i) == row_half]

    def add_values(self, tile: Int32, softmax: OnlineSoftmax, shifts: list[Float32]) -> None:
        """Turn S into P, unnormalised, and add P V to O. tile: the stage of V. Of 16 keys at a time, so that products begin early."""
        for step in range(self.geometry.tile_keys // K):
            first = 2 * SUMS * step
            for row_half in range(ROWS_PER_THREAD):
                softmax.add_scores(self.scores, self.of_row(row_half, first, 2 * SUMS), row_half, shifts[row_half])
            a = [pack_pair(self.scores[i], self.scores[i + 1], self.output.dtype) for i in range(first, first + 2 * SUMS, 2)]
            for column in range(0, self.geometry.config.d_v, 2 * N):
                both = self.load(tile + self.tall, step * K, column, transposed=True)
                for side in range(2):
                    multiply(self.output.sum, SUMS * (column // N + side), a, both[2 * side : 2 * side + 2], self.output.dtype)


@dataclass(frozen=True)
class DensePrefillSm120AttendRole:
    """Eight warps, each with 16 rows of an item. key_mask: of the call."""

    dtype: type[cutlass.Numeric]
    geometry: DensePrefillSm120Geometry
    key_mask: EveryKey

    @cute.jit
    def run(self, operands: DensePrefillOperands, queue: ItemQueue, smem: DensePrefillSm120Smem, thread: Int32):
        """Wait item_ready, key_ready, value_ready, turn. Signal item_free, key_free, value_free, turn. Write out and lse."""
        products = DensePrefillSm120Products.create(self.geometry, self.dtype, thread, smem)
        softmax = OnlineSoftmax.create(operands.args.scale_log2)
        fragments = FragmentRows(self.geometry.tile_keys, self.geometry.config.d_v, WRITTEN_COLUMNS)
        if products.group != 0:
            give_turn(products.group)
        use, value_use, turn = Int32(0), Int32(0), Int32(1)
        more, item = queue.take(Int32(0))
        while more:
            if Boolean(item.leading == 1):
                softmax.reset()
                products.output.sum.fill(0.0)
            if item.has_queries():
                self.take_queries(smem, products, use)
                use = use + self.geometry.query_uses
            walk = item.walk(self.geometry.key_tiles(item.keys))
            rows = self.key_mask.rows_of(item, products, walk)
            for i in cutlass.range(walk.count, unroll=1):
                walk.advance()
                rows.load()
                if products.sees(item, walk.tile(i)):
                    self.add_tile(smem, products, softmax, fragments, (use + i, value_use + i), (item, rows, walk.tile(i)))
                else:
                    self.pass_tile(smem, products.group, use + i, value_use + i)
            use, value_use = use + walk.count, value_use + walk.count
            if Boolean(item.complete):
                fragments.finish(operands, DensePrefillRows.of(item), products, softmax)
            more, item = queue.take(turn)
            turn = turn + 1
        if products.group == 0:
            take_turn(products.group)  # the one that the other group has given last

    @cute.jit
    def take_queries(self, smem: DensePrefillSm120Smem, products: DensePrefillSm120Products, use: Int32):
        """Load Q of an item from the stages that it has, as many as there are at a time, and release them."""
        uses, stages = self.geometry.query_uses, self.geometry.stages
        for first in cutlass.range_constexpr(0, uses, stages):
            pieces = range(first, min(first + stages, uses))
            for piece in pieces:
                smem.key_ready.consumer_wait(use + piece)
            own = products.first_row // self.geometry.tile_keys
            tile = smem.sK.iterator.toint() + smem.key_ready.stage(use + own) * self.geometry.key_bytes
            if cutlass.const_expr(uses <= stages) or own // stages == first // stages:
                products.load_queries(tile)
            for piece in pieces:
                smem.key_free.consumer_release(use + piece)

    @cute.jit
    def add_tile(
        self,
        smem: DensePrefillSm120Smem,
        products: DensePrefillSm120Products,
        softmax: OnlineSoftmax,
        fragments: FragmentRows,
        uses: tuple[Int32, Int32],
        masked: tuple[DensePrefillItem, EveryKey, Int32],
    ):
        """Attend to a tile. uses: of K and V. masked: the item, the mask of the thread's rows, and the tile."""
        use, value_use = uses
        item, rows, tile = masked
        smem.key_ready.consumer_wait(use)
        take_turn(products.group)
        products.multiply_keys(smem.sK.iterator.toint() + smem.key_ready.stage(use) * self.geometry.key_bytes)
        smem.key_free.consumer_release(use)
        rows.hide(products.scores)
        fragments.mask(item, products, products.scores, tile)
        factors, shifts = products.follow(softmax)
        if cute.arch.vote_any_sync((factors[0] != 1.0) | (factors[1] != 1.0)):
            products.output.scale(factors)
        smem.value_ready.consumer_wait(value_use)
        products.add_values(smem.sV.iterator.toint() + smem.value_ready.stage(value_use) * self.geometry.value_bytes, softmax, shifts)
        smem.value_free.consumer_release(value_use)

    def pass_tile(self, smem: DensePrefillSm120Smem, group: Int32, use: Int32, value_use: Int32) -> None:
        """Release a tile of which the warp sees nothing.

        K is waited for: a release needs that of the use before to be complete. Of V the turn says so: all have multiplied the tile before.
        """
        smem.key_ready.consumer_wait(use)
        take_turn(group)
        give_turn(group)
        smem.key_free.consumer_release(use)
        smem.value_free.consumer_release(value_use)

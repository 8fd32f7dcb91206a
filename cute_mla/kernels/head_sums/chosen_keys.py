"""Scores of the keys that a query token has chosen, by products of a warp: what head_sums and indexer_backward share.

A CTA of 128 threads has a token. Q stays in shared memory; keys come by cp.async, tile by tile of 64, in boxes of 64 columns. Scores
are S^T: a warp has 16 keys of a tile and all heads, or 32 keys and half of the heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, cute

from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import TokenSchedule
from ..primitives.copies import CHUNK, smem_pointer, start_copy
from ..primitives.smem import SWIZZLE_PERIOD, Array, Field
from ..primitives.warp_products import (
    BOX_COLUMNS,
    BOX_ROW_BYTES,
    CHUNKS,
    SUMS,
    K,
    M,
    N,
    chunk_address,
    load_tall,
    load_wide,
    multiply,
)
from ..sparse_prefill.operands import Latent, SparsePrefillIndices, SparsePrefillOperands

THREADS = 128
PASS_ROWS = THREADS // CHUNKS  # of a box, that the CTA copies at a time
PASSES = TILE_KEYS // PASS_ROWS
TILE_BOX_BYTES = TILE_KEYS * BOX_ROW_BYTES
WARPS = THREADS // 32
ROW_HALVES = 2  # rows l / 4 and l / 4 + 8 of a product are those of lane l


@dataclass(frozen=True)
class ChosenShape:
    """Sizes of a variant.

    steps: in which the boxes of a tile come. tiles: that the ring holds; with a step a tile it holds two. groups: of heads, a warp has one.
    """

    columns: int
    heads: int
    steps: int
    tiles: int
    groups: int

    @property
    def boxes(self) -> int:
        """Return the boxes of a row."""
        return self.columns // BOX_COLUMNS

    @property
    def step_boxes(self) -> int:
        """Return the boxes of a step."""
        return self.boxes // self.steps

    @property
    def ahead(self) -> int:
        """Return the steps that are in flight while one is computed."""
        return self.steps * self.tiles - 1

    @property
    def queries_bytes(self) -> int:
        """Return the bytes of one box of Q."""
        return self.heads * BOX_ROW_BYTES

    @property
    def group_heads(self) -> int:
        """Return the heads of a warp."""
        return self.heads // self.groups

    @property
    def warp_keys(self) -> int:
        """Return the keys of a tile that a warp has."""
        return TILE_KEYS * self.groups // WARPS

    @property
    def own_keys(self) -> int:
        """Return the keys of a tile of which a lane has scores."""
        return self.warp_keys // M * ROW_HALVES

    @property
    def sums(self) -> int:
        """Return a lane's scores of a tile."""
        return self.warp_keys // M * (self.group_heads // N) * SUMS

    def place(self, key: int, column: int, i: int) -> int:
        """Return where the scores of one of the lane's keys are: head i, 0 or 1, of a product."""
        return (key // ROW_HALVES * (self.group_heads // N) + column) * SUMS + key % ROW_HALVES * 2 + i

    def first_key(self) -> Int32:
        """Return the warp's first key of a tile."""
        return cute.arch.warp_idx() // self.groups * self.warp_keys

    def group(self) -> Int32:
        """Return the warp's group of heads."""
        return cute.arch.warp_idx() % self.groups

    def own_key(self, key: int) -> Int32:
        """Return the place in a tile of one of the lane's keys."""
        return self.first_key() + (key // ROW_HALVES * M + key % ROW_HALVES * (M // ROW_HALVES)) + cute.arch.lane_idx() // 4

    def own_head(self, column: int) -> Int32:
        """Return the head of the first of two neighbouring scores of a lane. column: number of the product."""
        return self.group() * self.group_heads + (column * N + cute.arch.lane_idx() % 4 * 2)

    def fields(self) -> tuple[Field, ...]:
        """Return the shared memory that every kernel needs."""
        ring = self.tiles * self.boxes * TILE_BOX_BYTES
        return (
            Array("queries", Uint8, self.boxes * self.queries_bytes, SWIZZLE_PERIOD),
            Array("ring", Uint8, ring, SWIZZLE_PERIOD),
            Array("terms", Float32, self.heads, CHUNK),
        )


def chosen_operands(args: Any) -> SparsePrefillOperands:
    """Return the arguments of a kernel by meaning."""
    latent = Latent(args.kv, args.kv_offsets, args.kv_stride_batch, args.kv_stride_row, args.s_kv)
    return SparsePrefillOperands(args, latent, TokenSchedule(args.topk_length, args.topk, args.tokens))


@dataclass(frozen=True)
class KeyRing:
    """The keys of a token on their way to shared memory, as one thread sees them: 16 bytes of four keys of each box.

    rows: addresses of its keys in the tile that is copied, 0 for absent ones. ahead: entries of the list for the tile behind that.
    """

    shape: ChosenShape
    indices: SparsePrefillIndices
    ring: Int32
    rows: cute.Tensor
    ahead: cute.Tensor

    @staticmethod
    def create(shape: ChosenShape, indices: SparsePrefillIndices, ring: cute.Pointer) -> KeyRing:
        """Return the ring of a token, before its first copy."""
        rows = cute.make_rmem_tensor(cute.make_layout(PASSES), Int64)
        return KeyRing(shape, indices, ring.toint(), rows, cute.make_rmem_tensor(cute.make_layout(PASSES), Int32))

    def begin(self) -> None:
        """Start the copies of the first steps."""
        self._look_ahead(Int32(0))
        for step in range(self.shape.ahead):
            self._start(Int32(step // self.shape.steps), step % self.shape.steps)

    def take(self, tile: Int32, step: int) -> None:
        """Wait until a step of a tile is there for all threads, and start the copy that takes the place of the step before."""
        cute.arch.cp_async_wait_group(self.shape.ahead - 1)
        cute.arch.sync_threads()  # all copies of the step are there, and all threads have done with the step before
        self._start(tile + (self.shape.tiles - (step == 0)), (step - 1) % self.shape.steps)

    def end(self) -> None:
        """Wait for the copies that nobody takes."""
        cute.arch.cp_async_wait_group(0)

    def box(self, tile: Int32, box: int) -> Int32:
        """Return the address of a box of a tile."""
        return self.ring + ((tile % self.shape.tiles) * self.shape.boxes + box) * TILE_BOX_BYTES

    def _look_ahead(self, tile: Int32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        for p in range(PASSES):
            self.ahead[p] = self.indices.entry(tile * TILE_KEYS + p * PASS_ROWS + thread // CHUNKS)

    def _start(self, tile: Int32, step: int) -> None:
        """Start the copies of a step, as a group. Those of absent keys are zeros."""
        thread, _, _ = cute.arch.thread_idx()
        if step == 0:
            for p in range(PASSES):
                self.rows[p] = self.indices.row_address(self.indices.checked(self.ahead[p]))
            self._look_ahead(tile + 1)
        for box in range(step * self.shape.step_boxes, (step + 1) * self.shape.step_boxes):
            for p in range(PASSES):
                target = chunk_address(self.box(tile, box), p * PASS_ROWS + thread // CHUNKS, thread % CHUNKS)
                source = self.rows[p] + (box * BOX_ROW_BYTES + thread % CHUNKS * CHUNK)
                start_copy(smem_pointer(target), source, self.rows[p] != 0, CHUNK)
        cute.arch.cp_async_commit_group()


@cute.jit
def load_queries(operands: SparsePrefillOperands, shape: cutlass.Constexpr, queries: cute.Pointer, token: Int32):
    """Start the copy of a token's queries; rows of heads that do not exist are zeros. It belongs to the next group of copies."""
    thread, _, _ = cute.arch.thread_idx()
    first, apart = operands.q_rows(token)
    for box in cutlass.range(shape.boxes, unroll=1):
        for p in cutlass.range_constexpr(shape.heads // PASS_ROWS):
            head = p * PASS_ROWS + thread // CHUNKS
            target = chunk_address(queries.toint() + box * shape.queries_bytes, head, thread % CHUNKS)
            source = first + Int64(head) * apart + (box * BOX_ROW_BYTES + thread % CHUNKS * CHUNK)
            start_copy(smem_pointer(target), source, head < operands.rows(), CHUNK)


def add_scores(shape: ChosenShape, scores: cute.Tensor, keys: Int32, queries: Int32) -> None:
    """Add the products of a box of keys and that of the queries to the warp's scores. Arguments: addresses of the boxes."""
    first_key, first_head = shape.first_key(), shape.group() * shape.group_heads
    for step in range(BOX_COLUMNS // K):
        rows = [load_tall(keys, first_key + above, Int32(2 * step)) for above in range(0, shape.warp_keys, M)]
        for pair in range(shape.group_heads // M):
            b = load_wide(queries, first_head + pair * M, Int32(2 * step))
            for half in range(2):
                for number, a in enumerate(rows):
                    multiply(scores, shape.place(ROW_HALVES * number, 2 * pair + half, 0), a, b[2 * half : 2 * half + 2])


def relu(score: Float32) -> Float32:
    """Return a score, 0 for a negative one and NaN for NaN."""
    return cutlass.select_(score <= 0, Float32(0), score)


ELEMENTS = {"q": BFloat16, "kv": Uint8, "terms": Float32}

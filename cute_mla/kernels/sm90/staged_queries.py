"""Q by cp.async on SM90: a warp with time to spare brings it, so that a work tile's Q comes while the one before is finished.

Q comes in two phases, through the same boxes of shared memory. The first one brings the column tiles that the score role keeps in
registers: it takes them out of the boxes. The second one brings those that stay. A lane copies 16 bytes, or 4 where an address or a
stride is no multiple of 16.

  queries_free     score -> loader    4: the boxes have been read, by a phase's loads or by the last products of a work tile
  queries_landed   loader -> score    32: the lanes' copies, as they complete
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.experimental import primitives

from ...spec.dense_decode import TILE_ROWS
from ..attention.scheduler import BOX_COLUMNS, first_query_row
from ..primitives.arithmetic import smaller
from ..primitives.copies import load_groups
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import Barriers, Field, fields_of
from .config import BOX_BYTES, STAGE_COLUMNS, STEPS_PER_BOX, Geometry, Tiles
from .gather_split import CHUNK, ROW_BYTES
from .row_copy import LANES_PER_KEY, SWIZZLE_KEYS, arrive_landed
from .score import LatentScores
from .warpgroups import WARPS_PER_GROUP

LANES = 32
PHASES = 2
WORD = 4  # bytes of the least copy
ROWS_AT_ONCE = LANES // LANES_PER_KEY


class QueryRows(Protocol):
    """Operands whose query rows have one distance."""

    def rows(self) -> Int32:
        """Return the number of query rows."""

    def q_rows(self, req: Int32) -> tuple[Int64, Int64]:
        """Return (address of the first query row, bytes from row to row)."""


@dataclass(frozen=True)
class QueryBarriers:
    """The barriers of Q. Use 2 n is the first phase of the n-th work tile that has keys, use 2 n + 1 the second one."""

    queries_free: StageBarriers
    queries_landed: StageBarriers

    @staticmethod
    def fields() -> tuple[Field, ...]:
        """Return the fields of shared memory."""
        return Barriers("queries_free", 1), Barriers("queries_landed", 1)

    @staticmethod
    def create(memory: dict) -> QueryBarriers:
        """Return the barriers of the allocated fields."""
        return QueryBarriers(**fields_of(QueryBarriers, memory))

    def initialise(self) -> None:
        """Set the arrivals. One thread, before any use."""
        self.queries_free.initialise(WARPS_PER_GROUP)
        self.queries_landed.initialise(LANES)


def phases_of(geometry: Geometry) -> tuple[list[int], list[int]]:
    """Return the column tiles of Q of both phases: tile i of a phase comes to box i."""
    tiles, kept = list(range(geometry.q_tiles)), geometry.q_tiles_in_registers
    return tiles[:kept], tiles[kept:]


class QueryLoader:
    """One warp: copies of Q to the boxes."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    @cute.jit
    def load(self, operands: QueryRows, tiles: Tiles, barriers: QueryBarriers, req: Int32, number: Int32):
        """Bring Q of the number-th work tile that has keys. Wait queries_free. Signal queries_landed.

        Rows past the last one repeat it; their results go nowhere.
        """
        base, pitch = operands.q_rows(req)
        boxes = tiles.sQ.iterator.toint()
        phases = phases_of(self.geometry)
        for i in cutlass.range_constexpr(PHASES):
            use = number * PHASES + i
            barriers.queries_free.producer_acquire(use)
            if (base | pitch) % CHUNK == 0:
                self.copy_chunks(operands, base, pitch, boxes, phases[i])
            else:
                self.copy_words(operands, base, pitch, boxes, phases[i])
            arrive_landed(barriers.queries_landed.barrier(use))

    @cute.jit
    def copy_chunks(self, operands: QueryRows, base: Int64, pitch: Int64, boxes: Int32, phase: cutlass.Constexpr[list[int]]):
        """Start the copies of some column tiles, 16 bytes a lane: 128 bytes of each of four rows."""
        lane = cute.arch.lane_idx()
        chunk, own = lane % LANES_PER_KEY, lane // LANES_PER_KEY
        for first in cutlass.range(0, TILE_ROWS, SWIZZLE_KEYS, unroll=1):
            for above in cutlass.range_constexpr(0, SWIZZLE_KEYS, ROWS_AT_ONCE):
                source = row_address(operands, base, pitch, first + (above + own)) + chunk * CHUNK
                target = boxes + (first + (above + own)) * ROW_BYTES + (chunk ^ (above + own)) * CHUNK
                for box in cutlass.range_constexpr(len(phase)):
                    copy(target + box * BOX_BYTES, source + phase[box] * ROW_BYTES, CHUNK)

    @cute.jit
    def copy_words(self, operands: QueryRows, base: Int64, pitch: Int64, boxes: Int32, phase: cutlass.Constexpr[list[int]]):
        """Start the copies of some column tiles, 4 bytes a lane: 128 bytes of a row."""
        lane = cute.arch.lane_idx()
        for row in cutlass.range(TILE_ROWS, unroll=1):
            source = row_address(operands, base, pitch, row) + lane * WORD
            place = (lane * WORD) ^ (row % SWIZZLE_KEYS * CHUNK)
            for box in cutlass.range_constexpr(len(phase)):
                copy(boxes + (row * ROW_BYTES + place) + box * BOX_BYTES, source + phase[box] * ROW_BYTES, WORD)


def row_address(operands: QueryRows, base: Int64, pitch: Int64, row: Int32) -> Int64:
    """Return the address of one of this CTA's query rows."""
    return base + Int64(smaller(first_query_row() + row, operands.rows() - 1)) * pitch


def copy(target: Int32, source: Int64, nbytes: int) -> None:
    """Start the copy of 16 or 4 bytes from gmem to a shared memory address."""
    modifier = primitives.LoadCacheModifier.CG if nbytes == CHUNK else primitives.LoadCacheModifier.CA
    primitives.cp_async_shared_global(
        cute.make_ptr(Int32, target, cute.AddressSpace.smem, assumed_align=nbytes).raw_ptr(),
        cute.make_ptr(Int32, source, cute.AddressSpace.gmem, assumed_align=nbytes).raw_ptr(),
        nbytes,
        modifier,
    )


@dataclass(frozen=True)
class StagedScores(LatentScores):
    """S of 16-bit operands, with Q from a loader.

    counters: int32 (2): the phases of Q that this thread has waited for, and whether it still has to wait for a work tile's second one.
    """

    barriers: QueryBarriers
    counters: cute.Tensor

    @staticmethod
    def from_loader(geometry: Geometry, dtype: type[cutlass.Numeric], barriers: QueryBarriers, tiles: Tiles, thread: Int32) -> StagedScores:
        """Partition the tiles for one thread of the score warpgroup. barriers: of Q."""
        assert geometry.q_boxes >= max(map(len, phases_of(geometry))), "a phase has more column tiles than boxes"
        assert geometry.rope_after * STAGE_COLUMNS <= geometry.q_tiles_in_registers * BOX_COLUMNS, "Q in boxes is used before a wait"
        scores = LatentScores.create(geometry, dtype, tiles, thread)
        counters = cute.make_rmem_tensor(cute.make_layout(2), Int32)
        counters[0], counters[1] = Int32(0), Int32(0)
        return StagedScores(**vars(scores), barriers=barriers, counters=counters)

    @cute.jit
    def load_queries(self, operands: Any, req: Int32):
        """Take the column tiles of a work tile's Q that are kept in registers, unless it has been done. As take_queries."""
        if self.counters[1] == 0:
            self.take_queries()

    def take_queries(self) -> None:
        """Take the column tiles of the next work tile's Q that are kept in registers. Wait queries_landed. Signal queries_free."""
        self._await_phase()
        for box, tile in enumerate(phases_of(self.geometry)[0]):
            rQ = self.query_tile(tile)
            for step in range(STEPS_PER_BOX):
                words = load_groups((self.staged + box * BOX_BYTES) ^ (2 * CHUNK * step), transposed=False)
                for i, word in enumerate(words):
                    rQ[len(words) * step + i] = word
        self._release_boxes()
        self.counters[1] = Int32(1)

    @cute.jit
    def await_smem_queries(self):
        """Wait for the other column tiles, before their first use in a work tile. Wait queries_landed."""
        if self.counters[1] != 0:
            self._await_second_phase()
            cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def release_queries(self, last: Boolean):
        """Hand on the boxes of Q after the last S of a work tile. Wait queries_landed, if no tile had keys. Signal queries_free."""
        if last:
            if self.counters[1] != 0:
                self._await_second_phase()
            self._release_boxes()

    def _await_second_phase(self) -> None:
        self._await_phase()
        self.counters[1] = Int32(0)

    def _await_phase(self) -> None:
        self.barriers.queries_landed.consumer_wait(self.counters[0])
        self.counters[0] = self.counters[0] + 1

    def _release_boxes(self) -> None:
        self.barriers.queries_free.consumer_release(Int32(0))

"""The scout of an SM100 dense decode CTA: one warp finds work tiles ahead of the other roles, and asks L2 for their page tables.

A role that reads plan, lengths and splits itself waits for a chain of loads at every work tile, behind the keys on their way from HBM and
the stores of O. The scout publishes a work tile as a record in shared memory, up to RECORDS of them before they are done:

  work_ready[4]  scout -> all roles   1: the record of a work tile is written; the last one says that there is no more work
  work_free[4]   all roles -> scout   one of each warp of the other roles
  pages_asked    load -> output       the load warps, once: Q of the first work tile is loaded behind the pages of its keys
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from ..attention.lengths import Lengths
from ..attention.scheduler import SplitKvSchedule, TileRange, WorkTile
from ..primitives.rows import aligned, store_vector
from ..primitives.smem import Array, Barriers, Field
from .config import VECTOR, LatentSmemSm100

RECORDS = 4
RECORD_WORDS = 2 * VECTOR  # request, first tile, tiles, keys; direct, row of the accumulators, request of the next record, length
NO_REQUEST = (1 << 31) - 1  # of a record that is no work tile


def work_fields() -> tuple[Field, ...]:
    """Return the fields of shared memory through which the scout publishes work tiles."""
    return (
        Array("sWork", Int32, RECORDS * RECORD_WORDS, 4 * VECTOR),
        *(Barriers(name, RECORDS) for name in ("work_ready", "work_free")),
        Barriers("pages_asked", 1),
    )


@dataclass(frozen=True)
class PublishedSchedule:
    """The work tiles that the scout has published, with the interface of SplitKvSchedule.

    The number of a work tile takes the place of its first tile.
    """

    source: SplitKvSchedule
    smem: LatentSmemSm100

    @property
    def lengths(self) -> Lengths:
        """Return the lengths of the requests."""
        return self.source.lengths

    def first_work_tile(self) -> tuple[Int32, Int32]:
        """Wait for the first record. Return (its request, 0)."""
        self.smem.work_ready.consumer_wait(Int32(0))
        return self._words(Int32(0), 0)[0], Int32(0)

    def last_request(self) -> Int32:
        """Return a number that all requests of records reach but for NO_REQUEST."""
        return Int32(NO_REQUEST - 1)

    def tile_range(self, req: Int32, number: Int32) -> TileRange:
        """Wait for a record, which may be the one behind the last work tile. Return the main loop's view of it."""
        self.smem.work_ready.consumer_wait(number)
        words = self._words(number, 0)
        return TileRange(req, words[1], words[2], words[3], more=False)

    def work_tile(self, req: Int32, number: Int32) -> WorkTile:
        """Return the epilogue's view of a record that has been waited for."""
        direct, accum_row, next_req, length = self._words(number, VECTOR)
        return WorkTile(length, direct != 0, accum_row, next_req, number + 1)

    def release(self, number: Int32) -> None:
        """Signal work_free: this warp does not read the record again."""
        self.smem.work_free.consumer_release(number)

    def _words(self, number: Int32, first: int) -> list[Int32]:
        rWords = cute.make_rmem_tensor(cute.make_layout(VECTOR), Int32)
        source = self.smem.sWork + (self.smem.work_ready.stage(number) * RECORD_WORDS + first)
        cute.autovec_copy(cute.make_tensor(aligned(source, 4 * VECTOR), rWords.layout), rWords)
        return [rWords[i] for i in range(VECTOR)]

    @cute.jit
    def publish(self, number: Int32, words: list[Int32]):
        """Wait work_free. Write a record. Signal work_ready."""
        self.smem.work_free.producer_acquire(number)
        if cute.arch.lane_idx() == 0:
            record = self.smem.sWork + self.smem.work_ready.stage(number) * RECORD_WORDS
            for first in cutlass.range_constexpr(0, RECORD_WORDS, VECTOR):
                store_vector(record + first, words[first : first + VECTOR])
        self.smem.work_ready.producer_commit(number)


class ScoutRoleSm100:
    """One warp."""

    @cute.jit
    def run(self, operands: Any):
        """Wait work_free. Signal work_ready. Publish the work tiles of this CTA's partition."""
        published, schedule = operands.schedule, operands.schedule.source
        req, begin_tile = schedule.first_work_tile()
        last = schedule.last_request()
        number = Int32(0)
        while req <= last:
            tile_range = schedule.tile_range(req, begin_tile)
            operands.prefetch_table(req, begin_tile)
            work_tile = schedule.work_tile_of(tile_range, req, begin_tile)
            next_req = cutlass.select_(work_tile.next_req <= last, work_tile.next_req, Int32(NO_REQUEST))
            direct = cutlass.select_(work_tile.direct, Int32(1), Int32(0))
            published.publish(
                number,
                [req, tile_range.begin, tile_range.tiles, tile_range.keys, direct, work_tile.accum_row, next_req, work_tile.length],
            )
            number = number + 1
            req, begin_tile = work_tile.next_req, work_tile.next_tile
        published.publish(number, [Int32(NO_REQUEST)] + [Int32(0)] * (RECORD_WORDS - 1))


def readers(warps: int, multiplies: Callable[[], Boolean]) -> Any:
    """Return the function that counts the warps which release a record: one more in a CTA that multiplies. warps: beside mma."""

    def count() -> Int32:
        return Int32(warps) + cutlass.select_(multiplies(), Int32(1), Int32(0))

    return count

"""Rows of 16-bit columns on their way to the slots by cp.async on SM90: no byte passes a register, and many are in flight.

Eight lanes have a key, 16 bytes each, and write the eight places of its swizzled row in a box: a warp's copy is 128 bytes of
each of four keys. A thread has four keys of every tile, two of either half (sm90_shares.py). A key that is not there is zeros
in shared memory, and nothing is read for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.experimental import primitives

from .sm90_geometry import BOX_BYTES
from .sm90_shares import CHUNK, HALF_BYTES, KEYS_PER_WARP, ROW_BYTES, Half

LANES_PER_KEY = ROW_BYTES // CHUNK
KEYS_AT_ONCE = 32 // LANES_PER_KEY  # of a warp
SWIZZLE_KEYS = 8  # whose rows differ in where their chunks lie
assert KEYS_PER_WARP == SWIZZLE_KEYS == 2 * KEYS_AT_ONCE, "two passes, and the swizzle of a warp's key is its number"


@dataclass(frozen=True)
class CopyLane:
    """Where this thread reads and writes, in bytes. All constant.

    source: within 128 bytes of a row. targets: of each pass, within half a box. halves: those of the tile, the CTA's own first.
    """

    source: Int32
    targets: tuple[Int32, Int32]
    halves: tuple[Half, Half]

    @staticmethod
    def of(thread: Int32, halves: tuple[Half, Half]) -> CopyLane:
        """Of a thread of the warpgroup."""
        chunk, key = thread % LANES_PER_KEY, thread % 32 // LANES_PER_KEY
        row = (thread // 32 * KEYS_PER_WARP + key) * ROW_BYTES
        first = row + (chunk ^ key) * CHUNK
        second = row + KEYS_AT_ONCE * ROW_BYTES + (chunk ^ (key + KEYS_AT_ONCE)) * CHUNK
        return CopyLane(chunk * CHUNK, (first, second), halves)


def source_lanes(thread: Int32) -> tuple[Int32, Int32]:
    """Of each pass, the lane whose number is that of the thread's key in its half of the tile."""
    first = thread // 32 * KEYS_PER_WARP + thread % 32 // LANES_PER_KEY
    return first, first + KEYS_AT_ONCE


@dataclass(frozen=True)
class CopiedKeys:
    """A thread's keys of a tile, those of both passes over the CTA's own half, then those over the other one: addresses of their
    rows, 0 for a key that is not there."""

    own_first: Int64
    own_second: Int64
    other_first: Int64
    other_second: Int64

    def copy(self, lane: CopyLane, target: Int32, source: int, boxes: int, halves: int) -> None:
        """Starts the copies of 64 columns a box, of the keys in so many halves.

        target: shared memory address of the first box. source: byte of a row at which its columns begin."""
        rows = ((self.own_first, self.own_second), (self.other_first, self.other_second))
        for box in range(boxes):
            for i in range(halves):
                for p, row in enumerate(rows[i]):
                    place = target + (lane.halves[i] * HALF_BYTES + lane.targets[p] + box * BOX_BYTES)
                    copy_chunk(place, row + (lane.source + (source + box * ROW_BYTES)), row != 0)


def copy_chunk(target: Int32, source: Int64, wanted: cutlass.Boolean) -> None:
    """Starts the copy of 16 bytes from gmem to a shared memory address, or of zeros."""
    primitives.cp_async_shared_global(
        cute.make_ptr(Int32, target, cute.AddressSpace.smem, assumed_align=CHUNK).raw_ptr(),
        cute.make_ptr(Int32, source, cute.AddressSpace.gmem, assumed_align=CHUNK).raw_ptr(),
        CHUNK,
        primitives.LoadCacheModifier.CG,
        cp_size=cutlass.select_(wanted, Int32(CHUNK), Int32(0)),
    )

"""Rows of 16-bit columns on their way to the stages by cp.async on SM90: no byte passes a register, and many are in flight.

The warpgroup that gathers shares its work out:

    scout     one warp   which rows: indices, checks, which keys are there
    copy      two warps  cp.async of rows to the stages
    courier   one warp   waits for copies that have landed, fences them for the tensor cores, hands them over

The courier has no loads of its own, so that its fence cannot wait for any that are in flight, and nothing holds back a stage that
has landed. Eight lanes have a key, 16 bytes each, and write the eight places of its swizzled row in a box: a warp's copy is 128
bytes of each of four keys. A key that is not there is zeros in shared memory, and nothing is read for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, Int64, Uint32, cute
from cutlass.experimental import primitives

from ...manifest import Role
from ...spec.split_plan import TILE_KEYS
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import Array, Barriers, Field
from .config import BOX_BYTES, Geometry, Pipes
from .gather_split import CHUNK, HALF_BYTES, HALF_KEYS, HALVES, ROW_BYTES, Half

COPY_WARPS = 2
COURIER_WARP = COPY_WARPS
SCOUT_WARP = COURIER_WARP + 1
LANES_PER_KEY = ROW_BYTES // CHUNK
KEYS_AT_ONCE = 32 // LANES_PER_KEY  # of a warp
SWIZZLE_KEYS = 8  # whose rows differ in where their chunks lie
WARP_KEYS = HALF_KEYS // COPY_WARPS  # neighbours, in half a tile
PASSES = WARP_KEYS // KEYS_AT_ONCE
PLACES = SWIZZLE_KEYS // KEYS_AT_ONCE  # of a thread's chunk in a row
assert WARP_KEYS % SWIZZLE_KEYS == 0, "the swizzle of a key is its number in the warp"

GATHER_ROLES = (Role("copy", 0, COPY_WARPS), Role("courier", COURIER_WARP, 1), Role("scout", SCOUT_WARP, 1))


@dataclass(frozen=True)
class CopyPipes(Pipes):
    """The shared roles' barriers, the barriers within the gathering warpgroup, and what the scout publishes.

    kv_landed, rope_landed: copy -> courier, an arrival per copying thread. valid_ready: scout -> copy, courier, score, 1; for
    every tile its validity bits, and:
    sRows: int32 (stages, 64): numbers of rows, negative for absent keys. sBases: int64 (stages): address of row 0.
    """

    kv_landed: StageBarriers
    rope_landed: StageBarriers
    valid_ready: StageBarriers
    sRows: cute.Pointer
    sBases: cute.Pointer

    @staticmethod
    def fields(geometry: Geometry) -> tuple[Field, ...]:
        """Return the fields of shared memory behind those of the shared roles."""
        return (
            Barriers("kv_landed", geometry.kv_stages),
            Barriers("rope_landed", geometry.rope_stages),
            Barriers("valid_ready", geometry.valid_stages),
            Array("sBases", Int64, geometry.valid_stages),
            Array("sRows", Int32, geometry.valid_stages * TILE_KEYS),
        )

    def initialise_copies(self) -> None:
        """Set the arrivals of the added barriers."""
        self.kv_landed.initialise(COPY_WARPS * 32)
        self.rope_landed.initialise(COPY_WARPS * 32)
        self.valid_ready.initialise(1)


@dataclass(frozen=True)
class CopyLane:
    """Offsets at which this thread reads and writes, in bytes. All constant.

    first_key: of its keys in half a tile. source: within 128 bytes of a row. targets: of the first passes, within half a box;
    the targets repeat with the swizzle. halves: those of the tile, the CTA's own first.
    """

    first_key: Int32
    source: Int32
    targets: tuple[Int32, ...]
    halves: tuple[Half, Half]

    @staticmethod
    def create(thread: Int32, halves: tuple[Half, Half]) -> CopyLane:
        """Return the of a thread of the copying warps."""
        chunk, key = thread % LANES_PER_KEY, thread % 32 // LANES_PER_KEY
        first = thread // 32 * WARP_KEYS + key
        targets = []
        for p in range(PLACES):
            targets.append((first + p * KEYS_AT_ONCE) * ROW_BYTES + (chunk ^ (key + p * KEYS_AT_ONCE)) * CHUNK)
        return CopyLane(first, chunk * CHUNK, tuple(targets), halves)

    def target(self, half: int, p: int) -> Int32:
        """Return the place in a box of this thread's chunk, for the key of a pass over one of the halves."""
        return self.halves[half] * HALF_BYTES + self.targets[p % PLACES] + p // PLACES * SWIZZLE_KEYS * ROW_BYTES


@dataclass(frozen=True)
class TileRows:
    """Rows of a tile that the scout warp has published: where their numbers lie, and what they are counted from."""

    numbers: cute.Pointer
    base: Int64
    row_stride: Int64

    @staticmethod
    def create(pipes: CopyPipes, tile: Int32, row_stride: Int64) -> TileRows:
        """Return the of a tile that has been told of."""
        stage = pipes.valid_ready.stage(tile)
        return TileRows(pipes.sRows + stage * TILE_KEYS, (pipes.sBases + stage).load(), row_stride)

    def row(self, key: Int32) -> tuple[Int64, Boolean]:
        """Return (the address of a key's row, whether the key is present); if not, the address is none."""
        number = (self.numbers + key).load()
        return self.base + Int64(Uint32(number)) * self.row_stride, number >= 0

    def copy(self, lane: CopyLane, target: Int32, source: int, boxes: int, halves: int = HALVES) -> None:
        """Start the copies of 64 columns a box, of the keys in so many halves.

        Addresses are computed anew every time: they would take 16 registers.

        target: shared memory address of the first box. source: byte of a row at which its columns begin.
        """
        for half in range(halves):
            first = lane.first_key + lane.halves[half] * HALF_KEYS
            rows = [self.row(first + p * KEYS_AT_ONCE) for p in range(PASSES)]
            for box in range(boxes):
                for p, (row, present) in enumerate(rows):
                    place = target + (lane.target(half, p) + box * BOX_BYTES)
                    copy_chunk(place, row + (lane.source + (source + box * ROW_BYTES)), present)


def copy_chunk(target: Int32, source: Int64, wanted: Boolean) -> None:
    """Start the copy of 16 bytes from gmem to a shared memory address, or of zeros."""
    primitives.cp_async_shared_global(
        cute.make_ptr(Int32, target, cute.AddressSpace.smem, assumed_align=CHUNK).raw_ptr(),
        cute.make_ptr(Int32, source, cute.AddressSpace.gmem, assumed_align=CHUNK).raw_ptr(),
        CHUNK,
        primitives.LoadCacheModifier.CG,
        cp_size=cutlass.select_(wanted, Int32(CHUNK), Int32(0)),
    )


def arrive_landed(barrier: cute.Pointer) -> None:
    """Arrive for this thread as soon as all its copies up to here have landed."""
    primitives.cp_async_mbarrier_arrive(barrier.raw_ptr(), noinc=True)

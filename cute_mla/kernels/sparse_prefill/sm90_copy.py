"""The roles copy and deliver of sparse prefill on Hopper: 16-bit rows to the stages by cp.async.

No byte passes a register, and many are in flight.
The warpgroup in front of the score role shares its work out:

    indices   one warp   which rows: indices, checks, which keys are there (sm90_indices.py)
    copy      two warps  cp.async of rows to the stages
    deliver   one warp   waits for copies that have landed, fences them for the tensor cores, hands them over

The role `deliver` has no loads of its own, so that its fence cannot wait for any that are in flight, and nothing holds back a stage that
has landed. Eight lanes have a key, 16 bytes each, and write the eight places of its swizzled row in a box: a warp's copy is 128
bytes of each of four keys. A key that is not there is zeros in shared memory, and nothing is read for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute

from ...manifest import Role
from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT, ELEMENT_BYTES
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import TokenSchedule
from ..primitives.copies import arrive_landed
from ..primitives.peer import peer_shift
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import Array, Barriers, Field
from ..sm90.cta import BOX_BYTES, ROPE, STAGE_BOXES, WARPS_PER_GROUP, LatentSm90Smem
from ..sm90.rows import (
    CHUNK,
    HALF_BYTES,
    HALF_KEYS,
    HALVES,
    ROW_BYTES,
    Half,
    copy_chunk,
    halves_of_cta,
    hand_over,
)
from .operands import SparsePrefillOperands

COPY_WARPS = 2
DELIVER_WARP = COPY_WARPS
INDEX_WARP = DELIVER_WARP + 1
LANES_PER_KEY = ROW_BYTES // CHUNK
KEYS_AT_ONCE = 32 // LANES_PER_KEY  # of a warp
SWIZZLE_KEYS = 8  # whose rows differ in where their chunks lie
WARP_KEYS = HALF_KEYS // COPY_WARPS  # neighbours, in half a tile
PASSES = WARP_KEYS // KEYS_AT_ONCE
PLACES = SWIZZLE_KEYS // KEYS_AT_ONCE  # of a thread's chunk in a row
assert WARP_KEYS % SWIZZLE_KEYS == 0, "the swizzle of a key is its number in the warp"

PRODUCER_ROLES = (Role("copy", 0, COPY_WARPS), Role("deliver", DELIVER_WARP, 1), Role("indices", INDEX_WARP, 1))
SHARED_STAGES = 2  # of a tile, between the CTAs of a pair: the first ones
ROW_STATES = 2  # of the rows of sIndexer: the row sum, the reference in log2 units


@dataclass(frozen=True)
class SparsePrefillSm90Smem(LatentSm90Smem):
    """Shared memory of all roles. sm90.py says who arrives where.

    valid_ready tells of validity bits, sRows and sBases, which take the place of those of the tile whose RoPE stage the tile gets. Use 2 n
    of queries_free and queries_landed is the first phase of Q of the n-th token that has keys, use 2 n + 1 the second one.
    """

    kv_landed: StageBarriers
    rope_landed: StageBarriers
    valid_ready: StageBarriers
    sRows: cute.Pointer  # int32 (RoPE stages, 64): numbers of rows, negative for absent keys
    sBases: cute.Pointer  # int64 (RoPE stages): address of row 0
    queries_free: StageBarriers
    queries_landed: StageBarriers
    sIndexer: cute.Pointer  # fp32 (2, 64 rows): row sum and reference at the bound of lse_indexer

    @staticmethod
    def added(rings: tuple[int, int]) -> tuple[Field, ...]:
        """Return the fields behind those of the shared roles."""
        kv_stages, rope_stages = rings
        return (
            Barriers("kv_landed", kv_stages),
            Barriers("rope_landed", rope_stages),
            Barriers("valid_ready", rope_stages),
            Array("sBases", Int64, rope_stages),
            Array("sRows", Int32, rope_stages * TILE_KEYS),
            Barriers("queries_free", 1),
            Barriers("queries_landed", 1),
            Array("sIndexer", Float32, ROW_STATES * TILE_ROWS),
        )

    def initialise(self, cluster: int, producers: int = 1) -> None:
        """Set the arrivals of every barrier."""
        self.kv_landed.initialise(COPY_WARPS * 32)
        self.rope_landed.initialise(COPY_WARPS * 32)
        self.valid_ready.initialise(1)
        self.queries_free.initialise(WARPS_PER_GROUP)
        self.queries_landed.initialise(32)
        super().initialise(cluster, producers)

    def await_validity(self, tile: Int32) -> Boolean:
        """Wait valid_ready of a tile. Return whether it has any key."""
        self.valid_ready.consumer_wait(tile)
        return self.has_keys(self.valid_ready.stage(tile))


@dataclass(frozen=True)
class SparsePrefillCopyLane:
    """Offsets at which this thread reads and writes, in bytes. All constant.

    first_key: of its keys in half a tile. source: within 128 bytes of a row. targets: of the first passes, within half a box;
    the targets repeat with the swizzle. halves: those of the tile, the CTA's own first.
    """

    first_key: Int32
    source: Int32
    targets: tuple[Int32, ...]
    halves: tuple[Half, Half]

    @staticmethod
    def create(thread: Int32, halves: tuple[Half, Half]) -> SparsePrefillCopyLane:
        """Return the offsets of a thread of the copying warps."""
        chunk, key = thread % LANES_PER_KEY, thread % 32 // LANES_PER_KEY
        first = thread // 32 * WARP_KEYS + key
        targets = []
        for p in range(PLACES):
            targets.append((first + p * KEYS_AT_ONCE) * ROW_BYTES + (chunk ^ (key + p * KEYS_AT_ONCE)) * CHUNK)
        return SparsePrefillCopyLane(first, chunk * CHUNK, tuple(targets), halves)

    def target(self, half: int, p: int) -> Int32:
        """Return the place in a box of this thread's chunk, for the key of a pass over one of the halves."""
        return self.halves[half] * HALF_BYTES + self.targets[p % PLACES] + p // PLACES * SWIZZLE_KEYS * ROW_BYTES


@dataclass(frozen=True)
class SparsePrefillTileRows:
    """Rows of a tile that the role `indices` has published: where their numbers lie, and what they are counted from."""

    numbers: cute.Pointer
    base: Int64
    row_stride: Int64

    @staticmethod
    def create(smem: SparsePrefillSm90Smem, tile: Int32, row_stride: Int64) -> SparsePrefillTileRows:
        """Return the rows of a tile whose valid_ready has been waited for."""
        stage = smem.valid_ready.stage(tile)
        return SparsePrefillTileRows(smem.sRows + stage * TILE_KEYS, (smem.sBases + stage).load(), row_stride)

    def row(self, key: Int32) -> tuple[Int64, Boolean]:
        """Return (the address of a key's row, whether the key is present); if not, the address is none."""
        number = (self.numbers + key).load()
        return self.base + Int64(Uint32(number)) * self.row_stride, number >= 0

    def copy(self, lane: SparsePrefillCopyLane, target: Int32, source: int, boxes: int, halves: int = HALVES) -> None:
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


class SparsePrefillSm90CopyRole:
    """Two warps: cp.async of rows to the stages. cluster: CTAs that share the tiles."""

    def __init__(self, cluster: int) -> None:
        self.cluster = cluster

    @cute.jit
    def run(self, operands: SparsePrefillOperands, smem: SparsePrefillSm90Smem, thread: Int32):
        """Wait valid_ready, kv_free, rope_free. Signal kv_landed, rope_landed."""
        lane = SparsePrefillCopyLane.create(thread, halves_of_cta(self.cluster))
        for_each_tile(operands.schedule, partial(self.copy_tile, operands, smem, lane))
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def copy_tile(self, operands: SparsePrefillOperands, smem: SparsePrefillSm90Smem, lane: SparsePrefillCopyLane, tile: Int32):
        """Wait valid_ready, kv_free, rope_free. Signal kv_landed, rope_landed."""
        present = smem.await_validity(tile)
        rows = SparsePrefillTileRows.create(smem, tile, operands.latent.row_stride)
        for part in smem.stages.parts:
            if cutlass.const_expr(part != ROPE):
                use = tile * smem.stages.count + part
                smem.kv_free.producer_acquire(use)
                if present:
                    # of a stage that a pair shares, the other half comes from the peer
                    source = smem.stages.columns[part] * ELEMENT_BYTES
                    rows.copy(lane, smem.kv_stage(use), source, STAGE_BOXES, HALVES // self.cluster if part < SHARED_STAGES else HALVES)
                arrive_landed(smem.kv_landed.barrier(use))
            elif present:
                self.copy_rope(smem, lane, rows, tile)
        if not present:
            # last: of such a tile the score role waits for rope_ready only, which must tell that all its stages have been waited for
            smem.rope_free.producer_acquire(tile)
            arrive_landed(smem.rope_landed.barrier(tile))

    @cute.jit
    def copy_rope(self, smem: SparsePrefillSm90Smem, lane: SparsePrefillCopyLane, rows: SparsePrefillTileRows, tile: Int32):
        """Copy the RoPE columns of all keys of a tile, where they have any. Wait rope_free. Signal rope_landed."""
        smem.rope_free.producer_acquire(tile)
        if cutlass.const_expr(smem.stages.has_rope):
            rows.copy(lane, smem.rope_stage(tile), D_LATENT * ELEMENT_BYTES, 1)
        arrive_landed(smem.rope_landed.barrier(tile))


class SparsePrefillSm90DeliverRole:
    """One warp: hands over stages that have landed, of a pair to the peer as well. cluster: CTAs that share the tiles."""

    def __init__(self, cluster: int) -> None:
        self.cluster = cluster

    @cute.jit
    def run(self, operands: SparsePrefillOperands, smem: SparsePrefillSm90Smem):
        """Wait valid_ready, kv_landed, rope_landed. Signal kv_ready, rope_ready."""
        tiles_done = for_each_tile(operands.schedule, partial(self.deliver_tile, smem))
        if cutlass.const_expr(self.cluster > 1):
            smem.await_peer(tiles_done)

    @cute.jit
    def deliver_tile(self, smem: SparsePrefillSm90Smem, tile: Int32):
        """Wait valid_ready, kv_landed, rope_landed. Signal kv_ready, rope_ready."""
        present = smem.await_validity(tile)
        for part in smem.stages.parts:
            if cutlass.const_expr(part != ROPE):
                use = tile * smem.stages.count + part
                smem.kv_landed.consumer_wait(use)
                cute.arch.fence_proxy("async.shared", space="cta")
                if cutlass.const_expr(self.cluster == 1 or part >= SHARED_STAGES):
                    smem.kv_ready.producer_commit(use)
                elif present:
                    own = smem.kv_stage(use) + halves_of_cta(self.cluster)[0] * HALF_BYTES
                    hand_over(smem.kv_ready.barrier(use), own, STAGE_BOXES, peer_shift(smem.kv_ready.base))
                else:
                    smem.kv_ready.producer_commit(use)
            elif present:
                self.deliver_rope(smem, tile)
        if not present:
            # behind the stages, which rope_ready must tell of, too
            smem.rope_landed.consumer_wait(tile)
            smem.rope_ready.producer_commit(tile)

    @cute.jit
    def deliver_rope(self, smem: SparsePrefillSm90Smem, tile: Int32):
        """Wait rope_landed. Signal rope_ready."""
        smem.rope_landed.consumer_wait(tile)
        cute.arch.fence_proxy("async.shared", space="cta")
        smem.rope_ready.producer_commit(tile)


@cute.jit
def for_each_tile(schedule: TokenSchedule, body: cutlass.Constexpr[Callable[[Int32], None]]) -> Int32:
    """Call body(number of the tile) for every tile of every token of this CTA. Return how many there were."""
    token, first = schedule.first_work_tile()
    tile = Int32(0)
    while token <= schedule.last_request():
        tiles = schedule.tile_range(token, first).tiles
        for t in cutlass.range(tiles, unroll=1):
            body(tile + t)
        tile = tile + tiles
        token = schedule.work_tile(token, first).next_req
    return tile

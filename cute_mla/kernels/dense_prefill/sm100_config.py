"""The page of constants of the SM100 kernel: tile geometry, shared and tensor memory, barriers, roles."""

from __future__ import annotations

from dataclasses import dataclass, fields

import cutlass
from cutlass import Int32, cute

from ...spec.arch import SM100
from ...spec.dense_prefill import BOX_COLUMNS, BOX_ROWS, D_V
from ...spec.dense_prefill import TILE_ROWS as ITEM_ROWS
from ..attention.lengths import larger, smaller
from ..primitives.pipeline import Ring
from ..sm100.boxes import ROW_BYTES
from .operands import Item

QUERY_TILES = 2  # of an item
TILE_ROWS = ITEM_ROWS[SM100.name] // QUERY_TILES  # query rows of one product, one a lane of tensor memory
TILE_KEYS = 128
HALF_KEYS = TILE_KEYS // 2

BOX_BYTES = BOX_ROWS * ROW_BYTES
# a slot of the ring: 64 columns of the keys of a tile, or the values of half of them. 64 columns of Q are as large
SLOT_BYTES = TILE_KEYS * ROW_BYTES
BOXES_PER_SLOT = SLOT_BYTES // BOX_BYTES
VALUE_SLOTS = TILE_KEYS // HALF_KEYS  # of a key tile
assert D_V == BOXES_PER_SLOT * BOX_COLUMNS

K_STEP = 16  # contraction depth of one MMA
STEPS_PER_BOX = BOX_COLUMNS // K_STEP
STEPS_PER_SLOT = HALF_KEYS // K_STEP
FIRST_KEYS = 96  # of a tile, whose P is handed over while that of the others is computed

# tensor memory, in 32-bit columns of 128 lanes, of Q tile i: S of 128 keys from TILE_KEYS i on, and over its first half P, two
# elements a column; O from OUTPUT_COLUMN + D_V i on
OUTPUT_COLUMN = QUERY_TILES * TILE_KEYS
TMEM_COLUMNS = OUTPUT_COLUMN + QUERY_TILES * D_V

GROUP_WARPS = 4
GROUP = 32 * GROUP_WARPS
OUTPUT_WARP = QUERY_TILES * GROUP_WARPS  # the first that is not in a softmax group
MMA_WARP = OUTPUT_WARP + GROUP_WARPS
LOAD_WARP = MMA_WARP + 1
QUERY_WARP = MMA_WARP + 2  # and the one after it, in variants that read Q element by element
QUERY_WARPS = 2
THREADS = 512

# per lane of a warp, by setmaxnreg: 2 x 184 + 96 + 48 = 512, all that four lanes at launch have
SOFTMAX_REGISTERS = 184
OUTPUT_REGISTERS = 96
OTHER_REGISTERS = 48

ITEM_SLOTS = 4  # rounds whose items the load role may post ahead
ITEM_WORDS = 8

TILE_ALIGNMENT = 1024  # the period of the 128-byte swizzle
TMEM_LANE = 1 << 16


@dataclass(frozen=True)
class Geometry:
    """What follows from the number of columns of q and k."""

    d_qk: int

    @property
    def key_slots(self) -> int:
        """Slots of the keys of a tile; 64 columns each."""
        return self.d_qk // BOX_COLUMNS

    @property
    def tile_slots(self) -> int:
        """Slots of a key tile."""
        return self.key_slots + VALUE_SLOTS

    @property
    def query_bytes(self) -> int:
        """Bytes of a Q tile."""
        return self.key_slots * SLOT_BYTES

    @property
    def slots(self) -> int:
        """Slots of the ring: what Q and the small things leave room for."""
        left = SM100.smem_per_block - QUERY_TILES * self.query_bytes - SMALL_BYTES
        return left // SLOT_BYTES

    @property
    def barriers(self) -> tuple[tuple[str, int], ...]:
        """(name, slots): one array of mbarriers, in this order, behind the tiles. Two slots: one for each Q tile."""
        of_tiles = (
            "query_ready", "query_free", "scores_ready", "alpha_ready", "probs_ready", "rest_ready", "output_ready", "sums_ready",
            "sums_free",
        )  # fmt: skip
        rings = (("item_ready", ITEM_SLOTS), ("item_free", ITEM_SLOTS), ("kv_ready", self.slots), ("kv_free", self.slots))
        return (*rings, *((name, QUERY_TILES) for name in of_tiles))

    @property
    def barrier_offset(self) -> int:
        """First byte of the barriers."""
        return QUERY_TILES * self.query_bytes + self.slots * SLOT_BYTES + 4 * (2 * QUERY_TILES * TILE_ROWS + ITEM_SLOTS * ITEM_WORDS)

    @property
    def smem_bytes(self) -> int:
        """Shared memory, with the cell that holds the address of tensor memory."""
        return self.barrier_offset + 8 * sum(slots for _, slots in self.barriers) + 4

    @property
    def products(self) -> int:
        """Matrix products of one key tile with both Q tiles."""
        return QUERY_TILES * (self.key_slots * STEPS_PER_BOX + TILE_KEYS // K_STEP)


@dataclass(frozen=True)
class Use:
    """A use of the ring: its slot, and the parity that completes with it. To be carried along: dividing the number of a use by the
    slots, again for each of them, takes the mma role half as many instructions as all that it does."""

    slot: Int32
    parity: Int32

    def following(self, count: int, slots: int) -> list[Use]:
        """This use and those after it, of a ring of so many slots."""
        uses = []
        for i in range(count):
            slot = self.slot + i
            wraps = slot >= slots
            parity = cutlass.select_(wraps, self.parity ^ 1, self.parity)
            uses.append(Use(cutlass.select_(wraps, slot - slots, slot), parity))
        return uses


SMALL_BYTES = 2560  # factors and sums, items, barriers, a cell: no more than that


@dataclass(frozen=True)
class Tiles:
    """Shared memory."""

    sQ: cute.Pointer  # bytes of 2 Q tiles of 128 rows, in boxes of 128 rows x 128 swizzled bytes
    sKv: cute.Pointer  # bytes of the ring: 128 keys x 128 bytes, or two boxes of 64 keys x 128 bytes of values
    sAlpha: cute.Pointer  # fp32 (2 Q tiles, 128 rows): rescale factors
    sInverse: cute.Pointer  # fp32 (2 Q tiles, 128 rows): 1 / row sum, 0 for a row that attends to nothing
    sItems: cute.Pointer  # int32 (4 rounds, 8): items
    tmem_cell: cute.Pointer  # int32: address of the tensor memory


@dataclass(frozen=True)
class Pipes:
    """The barriers of the table above."""

    item_ready: Ring
    item_free: Ring
    kv_ready: Ring
    kv_free: Ring
    query_ready: Ring
    query_free: Ring
    scores_ready: Ring
    alpha_ready: Ring
    probs_ready: Ring
    rest_ready: Ring
    output_ready: Ring
    sums_ready: Ring
    sums_free: Ring

    def of_tile(self, tile: int | Int32) -> Pipes:
        """Those of one Q tile, as rings of their own, and what both share."""
        rings = {field.name: getattr(self, field.name) for field in fields(self)}
        return Pipes(**{name: Ring(ring.base + tile, 1) if ring.slots == QUERY_TILES else ring for name, ring in rings.items()})


@dataclass(frozen=True)
class Part:
    """What one Q tile of an item has to do.

    rows: of the sequence, 0 or less if the tile has none. tiles: key tiles that any of its rows sees, the first ones of the
    sequence. skipped: of the key tiles of the item, which are walked from the last to the first, those that it sits out.
    limit: a row i of the tile sees the keys 0 .. limit + i of the sequence, among the first `keys`.
    """

    rows: Int32
    tiles: Int32
    skipped: Int32
    limit: Int32
    keys: Int32

    @staticmethod
    def of(item: Item, tile: int | Int32) -> Part:
        """The part of a Q tile."""
        first = tile * TILE_ROWS
        rows = item.rows - first
        limit = item.diagonal + first
        keys = smaller(item.keys, limit + TILE_ROWS)
        tiles = key_tiles(cutlass.select_(rows > 0, larger(keys, Int32(0)), Int32(0)))
        return Part(rows, tiles, key_tiles(item.keys) - tiles, limit, item.keys)

    def key_limit(self, row: Int32) -> Int32:
        """Keys that a row of the tile sees; none if negative."""
        return smaller(self.keys, self.limit + row + 1)


def key_tiles(keys: Int32) -> Int32:
    """Tiles of so many keys."""
    return (keys + (TILE_KEYS - 1)) >> 7


def first_lane(tmem: Int32) -> Int32:
    """Tensor memory at the first of this warp's lanes."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % GROUP_WARPS
    return tmem + warp * (32 * TMEM_LANE)

"""Constants of the SM100 dense prefill kernel: tile geometry, shared and tensor memory, barriers, roles."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Protocol

import cutlass
from cutlass import Float32, Int32, Uint8, cute

from ...spec.arch import SM100
from ...spec.dense_prefill import BOX_COLUMNS, BOX_ROWS, DensePrefillConfig
from ...spec.dense_prefill import TILE_ROWS as ITEM_ROWS
from ..attention.cta import TMEM_COLUMNS, both_ways
from ..primitives.arithmetic import larger, smaller
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import ROW_BYTES, SWIZZLE_PERIOD, Array, Barriers, SmemLayout
from .operands import ITEM_WORDS, DensePrefillItem

QUERY_TILES = 2  # of an item
TILE_ROWS = ITEM_ROWS[SM100.name] // QUERY_TILES  # query rows of one product, one a lane of tensor memory
TILE_KEYS = 128
HALF_KEYS = TILE_KEYS // 2

BOX_BYTES = BOX_ROWS * ROW_BYTES
# a stage: 64 columns of the keys of a tile, or the values of half of them. 64 columns of Q are as large
STAGE_BYTES = TILE_KEYS * ROW_BYTES
BOXES_PER_STAGE = STAGE_BYTES // BOX_BYTES
VALUE_STAGES = TILE_KEYS // HALF_KEYS  # of a key tile
D_V = BOXES_PER_STAGE * BOX_COLUMNS

K_STEP = 16  # contraction depth of one MMA
STEPS_PER_BOX = BOX_COLUMNS // K_STEP
STEPS_PER_STAGE = HALF_KEYS // K_STEP
FIRST_KEYS = 96  # of a tile, whose P is handed over while that of the others is computed

# tensor memory, in 32-bit columns of 128 lanes, of Q tile i: S of 128 keys from TILE_KEYS i on, and over its first half P, two
# elements a column; O from OUTPUT_COLUMN + D_V i on
OUTPUT_COLUMN = QUERY_TILES * TILE_KEYS
assert OUTPUT_COLUMN + QUERY_TILES * D_V == TMEM_COLUMNS

GROUP_WARPS = 4
GROUP = 32 * GROUP_WARPS
OUTPUT_WARP = QUERY_TILES * GROUP_WARPS  # the first that is not in a softmax group
MMA_WARP = OUTPUT_WARP + GROUP_WARPS
LOAD_WARP = MMA_WARP + 1
ITEM_WARP = MMA_WARP + 2  # where items come in parts
THREADS = 512

# per lane of a warp, by setmaxnreg: 2 x 184 + 96 + 48 = 512, all that four lanes at launch have
SOFTMAX_REGISTERS = 184
OUTPUT_REGISTERS = 96
OTHER_REGISTERS = 48
MASK_REGISTERS = (192, 88, 40)  # the same where items come in parts, and the softmax role holds words of a mask

ITEM_STAGES = 4  # rounds whose items the load role may post ahead

TMEM_LANE = 1 << 16


@dataclass(frozen=True)
class DensePrefillSm100Geometry:
    """Numbers that follow from the columns of q and k. item_words: of an item in the queue."""

    d_qk: int
    item_words: int = ITEM_WORDS

    @property
    def registers(self) -> tuple[int, int, int]:
        """Return the registers of a lane of the softmax roles, the output role and the others."""
        return MASK_REGISTERS if self.item_words > ITEM_WORDS else (SOFTMAX_REGISTERS, OUTPUT_REGISTERS, OTHER_REGISTERS)

    @property
    def key_stages(self) -> int:
        """Return the stages of the keys of a tile; 64 columns each."""
        return self.d_qk // BOX_COLUMNS

    @property
    def tile_stages(self) -> int:
        """Return the stages of a key tile."""
        return self.key_stages + VALUE_STAGES

    @property
    def query_bytes(self) -> int:
        """Return the bytes of a Q tile."""
        return self.key_stages * STAGE_BYTES

    @property
    def stages(self) -> int:
        """Return the stages of the pipeline for keys and values: what Q and the small things leave room for."""
        return (SM100.smem_per_block - QUERY_TILES * self.query_bytes - SMALL_BYTES) // STAGE_BYTES

    def smem(self) -> SmemLayout:
        """Return the layout of shared memory. Barriers of two stages: one for each Q tile."""
        of_tiles = (
            "query_ready", "query_free", "scores_ready", "alpha_ready", "probs_ready", "rest_ready", "output_ready", "sums_ready",
            "sums_free",
        )  # fmt: skip
        return SmemLayout((
            Array("sQ", Uint8, QUERY_TILES * self.query_bytes, SWIZZLE_PERIOD),
            Array("sKv", Uint8, self.stages * STAGE_BYTES, SWIZZLE_PERIOD),
            Array("sAlpha", Float32, QUERY_TILES * TILE_ROWS),
            Array("sInverse", Float32, QUERY_TILES * TILE_ROWS),
            Array("sItems", Int32, ITEM_STAGES * self.item_words, 16),
            *both_ways("item", ITEM_STAGES),
            *both_ways("kv", self.stages),
            *(Barriers(name, QUERY_TILES) for name in of_tiles),
            Array("tmem_cell", Int32, 1),
        ))  # fmt: skip

    @property
    def products(self) -> int:
        """Return the matrix products of one key tile with both Q tiles."""
        return QUERY_TILES * (self.key_stages * STEPS_PER_BOX + TILE_KEYS // K_STEP)


SMALL_BYTES = 2640  # factors and sums, items, barriers, a cell: no more than that


class RowTables(Protocol):
    """Numbers that a thread hands to another one of its row, in shared memory."""

    @property
    def sAlpha(self) -> cute.Pointer:
        """Return the rescale factors, fp32 (Q tiles or buffers of S, 128 rows)."""

    @property
    def sInverse(self) -> cute.Pointer:
        """Return 1 / row sum, fp32 (Q tiles, 128 rows)."""


@dataclass(frozen=True)
class DensePrefillSm100Smem:
    """Shared memory, as DensePrefillSm100Geometry.smem lays it out."""

    sQ: cute.Pointer  # bytes of 2 Q tiles of 128 rows, in boxes of 128 rows x 128 swizzled bytes
    sKv: cute.Pointer  # bytes of the stages: 128 keys x 128 bytes, or two boxes of 64 keys x 128 bytes of values
    sAlpha: cute.Pointer  # fp32 (2 Q tiles, 128 rows): rescale factors
    sInverse: cute.Pointer  # fp32 (2 Q tiles, 128 rows): 1 / row sum, 0 for a row that attends to nothing
    sItems: cute.Pointer  # int32 (4 rounds, item_words): items
    tmem_cell: cute.Pointer  # int32: address of the tensor memory
    item_ready: StageBarriers
    item_free: StageBarriers
    kv_ready: StageBarriers
    kv_free: StageBarriers
    query_ready: StageBarriers
    query_free: StageBarriers
    scores_ready: StageBarriers
    alpha_ready: StageBarriers
    probs_ready: StageBarriers
    rest_ready: StageBarriers
    output_ready: StageBarriers
    sums_ready: StageBarriers
    sums_free: StageBarriers

    def of_tile(self, tile: int | Int32) -> DensePrefillSm100Smem:
        """Return shared memory with the barriers of one Q tile, as pipelines of their own, and the ones that both share."""
        own = {
            field.name: StageBarriers(barriers.base + tile, 1)
            for field in fields(self)
            if isinstance(barriers := getattr(self, field.name), StageBarriers) and barriers.stages == QUERY_TILES
        }
        return replace(self, **own)


@dataclass(frozen=True)
class QueryTileWork:
    """The work of one Q tile of an item.

    rows: of the sequence, 0 or less if the tile has none. tiles: key tiles that any of its rows sees, the first ones of the
    sequence. skipped: key tiles of the item, which are walked from the last to the first, that the Q tile sits out. limit: a row i of
    the tile sees the keys 0 .. limit + i of the sequence, among the first `keys`.
    """

    rows: Int32
    tiles: Int32
    skipped: Int32
    limit: Int32
    keys: Int32

    @staticmethod
    def create(item: DensePrefillItem, tile: int | Int32) -> QueryTileWork:
        """Return the work of a Q tile."""
        first = tile * TILE_ROWS
        rows = item.rows - first
        limit = item.diagonal + first
        keys = smaller(item.keys, limit + TILE_ROWS)
        tiles = item.tiles_of(rows, key_tiles(cutlass.select_(rows > 0, larger(keys, Int32(0)), Int32(0))))
        return QueryTileWork(rows, tiles, item.walk(key_tiles(item.keys)).count - tiles, limit, item.keys)

    def key_limit(self, row: Int32) -> Int32:
        """Return the keys that a row of the tile sees; none if negative."""
        return smaller(self.keys, self.limit + row + 1)


def key_tiles(keys: Int32) -> Int32:
    """Return the tiles of so many keys."""
    return (keys + (TILE_KEYS - 1)) >> 7


def first_lane(tmem: Int32) -> Int32:
    """Return the tensor memory at the first of this warp's lanes."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % GROUP_WARPS
    return tmem + warp * (32 * TMEM_LANE)


PAIR = 2  # CTAs that share the products of an item, with TILE_ROWS of its rows each
EVEN_CTA = 0  # of a pair: it issues the products of both
CTA_KEYS = TILE_KEYS // PAIR  # of a key tile, whose K a CTA holds
STAGES = 5  # of half of K or half of V of a key tile
SCORE_STAGES = 2


@dataclass(frozen=True)
class DensePrefillPairGeometry:
    """Numbers that follow from the number of columns of q, k and v."""

    config: DensePrefillConfig

    @property
    def key_boxes(self) -> int:
        """Return the boxes of 64 columns of q and k."""
        return self.config.d_qk // BOX_COLUMNS

    @property
    def value_boxes(self) -> int:
        """Return the boxes of 64 columns of v that a CTA holds."""
        return self.config.d_v // PAIR // BOX_COLUMNS

    @property
    def query_bytes(self) -> int:
        """Return the bytes of a CTA's rows of Q."""
        return self.key_boxes * STAGE_BYTES

    @property
    def stage_bytes(self) -> int:
        """Return the bytes of a CTA's half of K of a key tile, and of its half of V."""
        return self.key_boxes * BOX_BYTES

    @property
    def products(self) -> int:
        """Return the matrix products of one key tile, and P V of an item's last one."""
        return self.config.d_qk // K_STEP + 2 * (TILE_KEYS // K_STEP)

    def smem(self) -> SmemLayout:
        """Return the layout of shared memory."""
        return SmemLayout((
            Array("sQ", Uint8, self.query_bytes, SWIZZLE_PERIOD),
            Array("sKv", Uint8, STAGES * self.stage_bytes, SWIZZLE_PERIOD),
            Array("sAlpha", Float32, SCORE_STAGES * TILE_ROWS),
            Array("sInverse", Float32, TILE_ROWS),
            Array("sItems", Int32, ITEM_STAGES * ITEM_WORDS, 16),
            *both_ways("item", ITEM_STAGES),
            *both_ways("kv", STAGES),
            Barriers("value_landed", 1),
            *both_ways("query", 1),
            Barriers("scores_ready", SCORE_STAGES),
            Barriers("alpha_ready", SCORE_STAGES),
            Barriers("probs_ready", SCORE_STAGES),
            Barriers("rest_ready", SCORE_STAGES),
            Barriers("output_ready", SCORE_STAGES),
            *both_ways("sums", 1),
            Array("tmem_cell", Int32, 1),
        ))  # fmt: skip


@dataclass(frozen=True)
class DensePrefillPairSmem(DensePrefillSm100Smem):
    """Shared memory of a CTA, as DensePrefillPairGeometry.smem lays it out: one Q tile, two buffers of S.

    A stage of sKv has 64 keys in boxes of 128 bytes, or 128 values in boxes of 128 bytes.
    """

    value_landed: StageBarriers


def cta_rank() -> Int32:
    """Return the number of this CTA in its pair."""
    return cute.arch.block_idx_in_cluster()

"""Tile geometry, shared and tensor memory, barriers and roles of the SM100 dK and dV kernel."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from ...spec.arch import SM100
from ...spec.dense_prefill import BOX_COLUMNS
from ...spec.dense_prefill_dkdv import ITEM_SUMS
from ...spec.dense_prefill_dkdv import TILE_KEYS as TILE_KEYS_OF
from ...spec.dense_prefill_dq import STATISTIC_BYTES, STATISTICS
from ...spec.mla import ELEMENT_BYTES
from ..attention.cta import both_ways
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import Array, Barriers, SmemLayout, Tile
from .load import DV_SUM, ITEM_WORDS, ITEMS_AHEAD, DkdvPostedItem
from .operands import DkdvGeometry, DkdvSmem

TILE_KEYS = 128  # of an item, a lane of tensor memory each
assert set(TILE_KEYS_OF[SM100.name].values()) == {TILE_KEYS}

BOX_ALIGNMENT = 128  # bytes; of what TMA writes without swizzle
ROW_BYTES = BOX_COLUMNS * ELEMENT_BYTES  # of a box
K_STEP = 16  # contraction depth of one MMA
STEPS_PER_BOX = BOX_COLUMNS // K_STEP

# by d_qk: boxes of a tile's rows x 64 columns of Q and of dO, as many as shared memory has room for with K and V
BOXES = {192: (9, 3), 128: (4, 4), 256: (8, 4)}
STATISTIC_STAGES = 2

HALVES = 2  # of a tile's query rows: a group of attend warps each
# by d_qk: of every eight pairs of exponentials, those that are computed on the FMA pipe. 192 columns leave the others time enough
POLYNOMIAL_PAIRS = {192: 0, 128: 2, 256: 0}
# by d_qk: of a half, whose P is handed over while that of the others is computed
FIRST_QUERIES = {192: 32, 128: 32, 256: 16}
GROUP_WARPS = 4
ATTEND_WARPS = HALVES * GROUP_WARPS
MMA_WARP, QUERY_WARP, DOUT_WARP, KEY_WARP = range(ATTEND_WARPS, ATTEND_WARPS + 4)
THREADS = 32 * (KEY_WARP + 1)

# per lane of a warp, by setmaxnreg: 2 x 208 + 88 = 504, all that three lanes at launch have
ATTEND_REGISTERS = 208
OTHER_REGISTERS = 88

# tensor memory, in 32-bit columns of 128 lanes, a key each: dV, dK (or one of them), then S of a tile, and dP of it. P and dS, two
# elements a column, overwrite the first half of the columns that they come from, in either half of the tile
VALUES_COLUMN = 0
TMEM_LANE = 1 << 16


@dataclass(frozen=True)
class DkdvSm100Geometry(DkdvGeometry):
    """Numbers of a variant."""

    arch = SM100.name

    @property
    def dout_boxes(self) -> int:
        """Return the boxes of a tile of dO."""
        return self.config.d_v // BOX_COLUMNS

    @property
    def half_queries(self) -> int:
        """Return the query rows of a tile that an attend warp has."""
        return self.tile_queries // HALVES

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Return the ranges of half_queries whose P is handed over one after the other."""
        first = FIRST_QUERIES[self.config.d_qk]
        return (0, first), (first, self.half_queries)

    @property
    def single_sums(self) -> bool:
        """Return whether dK and dV are a work item each."""
        return ITEM_SUMS[SM100.name][self.config.d_qk] > 1

    @property
    def keys_column(self) -> int:
        """Return the first column of dK."""
        return VALUES_COLUMN + (0 if self.single_sums else self.config.d_v)

    @property
    def scores_column(self) -> int:
        """Return the first column of S."""
        return self.keys_column + self.config.d_qk

    @property
    def dprobs_column(self) -> int:
        """Return the first column of dP."""
        return self.scores_column + self.tile_queries

    @property
    def query_boxes(self) -> int:
        """Return the boxes of a tile of Q."""
        return self.config.d_qk // BOX_COLUMNS

    @property
    def box_bytes(self) -> int:
        """Return the bytes of a box of Q or dO."""
        return self.tile_queries * ROW_BYTES

    @property
    def statistic_bytes(self) -> int:
        """Return the bytes of the statistics of a tile."""
        return self.tile_queries * STATISTICS * STATISTIC_BYTES

    @property
    def products(self) -> int:
        """Return the matrix products of one tile: S and dP, and dV and dK, in one piece or box by box."""
        pieces = sum(
            1 if turn % of_tile == 0 else of_tile for turn, of_tile in zip(self.boxes, (self.query_boxes, self.dout_boxes), strict=True)
        )
        return (self.config.d_qk + self.config.d_v + pieces * self.tile_queries) // K_STEP

    @property
    def boxes(self) -> tuple[int, int]:
        """Return the boxes of Q and of dO in shared memory."""
        return BOXES[self.config.d_qk]

    def smem(self, dtype: type[cutlass.Numeric]) -> SmemLayout:
        """Return the layout of shared memory. dtype: of q, dout, k and v."""
        of_queries, of_douts = self.boxes
        of_tile = ("scores_ready", "probs_ready", "rest_ready", "dprobs_ready", "dscores_ready", "sums_ready", "sums_free")
        return SmemLayout((
            Tile("sK", dtype, (TILE_KEYS, self.config.d_qk, 1)),
            Tile("sV", dtype, (TILE_KEYS, self.config.d_v, 1)),
            Tile("sQ", dtype, (self.tile_queries, BOX_COLUMNS, of_queries)),
            Tile("sD", dtype, (self.tile_queries, BOX_COLUMNS, of_douts)),
            Array("statistics", Float32, STATISTIC_STAGES * STATISTICS * self.tile_queries, BOX_ALIGNMENT),
            Array("items", Int32, ITEMS_AHEAD * ITEM_WORDS),
            *both_ways("query", of_queries),
            *both_ways("dout", of_douts),
            *both_ways("statistic", STATISTIC_STAGES),
            Barriers("query_landed", 1),
            Barriers("dout_landed", 1),
            *both_ways("key", 1),
            *(Barriers(name, 1) for name in of_tile),
            Array("tmem_cell", Int32, 1),
        ))  # fmt: skip

    def sums_of(self, item: DkdvPostedItem) -> tuple[Boolean | bool, Boolean | bool]:
        """Return whether an item has dV, and whether it has dK."""
        return (item.sums == DV_SUM, item.sums != DV_SUM) if self.single_sums else (True, True)


@dataclass(frozen=True)
class DkdvSm100Smem(DkdvSmem):
    """Shared memory, as DkdvSm100Geometry.smem lays it out. Q and dO are boxes of 64 columns, statistics two tiles'."""

    tmem_cell: cute.Pointer  # int32: address of the tensor memory
    statistic_ready: StageBarriers
    statistic_free: StageBarriers
    scores_ready: StageBarriers
    probs_ready: StageBarriers
    rest_ready: StageBarriers
    dprobs_ready: StageBarriers
    dscores_ready: StageBarriers
    sums_ready: StageBarriers
    sums_free: StageBarriers

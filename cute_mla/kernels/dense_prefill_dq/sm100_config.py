"""Constants of the SM100 dQ kernel: shared and tensor memory, barriers, roles. Boxes and products are the forward's."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, Int32, Uint8, cute

from ...spec.arch import SM100
from ...spec.dense_prefill import BOX_COLUMNS, BOX_ROWS, DensePrefillConfig
from ...spec.dense_prefill_dq import STATISTICS, TILE_KEYS, TILE_ROWS
from ..attention.cta import both_ways
from ..dense_prefill.operands import ITEM_WORDS
from ..dense_prefill.sm100_config import BOX_BYTES, GROUP_WARPS, ITEM_STAGES, K_STEP, STEPS_PER_BOX
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import SWIZZLE_PERIOD, Array, Barriers, SmemLayout

GROUPS = 2  # warpgroups that share the keys of a tile: a thread has a row and half of the columns of S and dP
ROW_BOX_BYTES = TILE_ROWS // BOX_ROWS * BOX_BYTES  # 64 columns of the rows of Q or dO

# tensor memory, in 32-bit columns of 128 lanes: S, dP, dQ, and dS, two elements a column, which lies where one of them leaves room
SCORE_COLUMN, DPROBS_COLUMN, DQ_COLUMN = 0, 128, 256
DSCORES_COLUMNS = {192: 448, 128: 448, 256: 64}  # by d_qk

ROW_WARP = GROUPS * GROUP_WARPS  # the first that does not attend
MMA_WARP = ROW_WARP + GROUP_WARPS
KEY_WARP = MMA_WARP + 1
VALUE_WARP = MMA_WARP + 2
LAST_WARP = VALUE_WARP
THREADS = 512

# per lane of a warp, by setmaxnreg: 2 x 176 + 112 + 48 = 512, all that four lanes at launch have
ATTEND_REGISTERS = 176
ROW_REGISTERS = 112
OTHER_REGISTERS = 48

SMALL_BYTES = 2048  # statistics, items, barriers, a cell: no more than that


@dataclass(frozen=True)
class DqSm100Geometry:
    """Numbers that follow from the number of columns of q and k."""

    config: DensePrefillConfig

    @property
    def tile_keys(self) -> int:
        """Return the keys of a tile."""
        return TILE_KEYS[SM100.name][self.config.d_qk]

    @property
    def group_keys(self) -> int:
        """Return the keys of a tile that a group attends to."""
        return self.tile_keys // GROUPS

    @property
    def stage_bytes(self) -> int:
        """Return the bytes of a stage: 64 columns of the keys of a tile, or of its values."""
        return self.tile_keys // BOX_ROWS * BOX_BYTES

    @property
    def dscores_column(self) -> int:
        """Return the first column of dS."""
        return DSCORES_COLUMNS[self.config.d_qk]

    @property
    def value_boxes(self) -> int:
        """Return the stages of the values of a tile, and the boxes of dO; 64 columns each."""
        return self.config.d_v // BOX_COLUMNS

    @property
    def key_boxes(self) -> int:
        """Return the stages of the keys of a tile, and of Q; 64 columns each."""
        return self.config.d_qk // BOX_COLUMNS

    @property
    def value_stages(self) -> int:
        """Return the stages of the pipeline for values: one tile, or two if keys leave room for them."""
        return self.value_boxes if self._stages < GROUPS * (self.key_boxes + self.value_boxes) else 2 * self.value_boxes

    @property
    def key_stages(self) -> int:
        """Return the stages of the pipeline for keys: what Q, dO, values and the small things leave room for."""
        return self._stages - self.value_stages

    @property
    def _stages(self) -> int:
        rows = (self.key_boxes + self.value_boxes) * ROW_BOX_BYTES
        return (SM100.smem_per_block - SMALL_BYTES - rows) // self.stage_bytes

    @property
    def products(self) -> int:
        """Return the matrix products of one tile: S, dP, and dQ by 64 columns."""
        return (self.key_boxes + self.value_boxes) * STEPS_PER_BOX + self.key_boxes * self.tile_keys // K_STEP

    def smem(self) -> SmemLayout:
        """Return the layout of shared memory."""
        return SmemLayout((
            Array("sQ", Uint8, self.key_boxes * ROW_BOX_BYTES, SWIZZLE_PERIOD),
            Array("sD", Uint8, self.value_boxes * ROW_BOX_BYTES, SWIZZLE_PERIOD),
            Array("sK", Uint8, self.key_stages * self.stage_bytes, SWIZZLE_PERIOD),
            Array("sV", Uint8, self.value_stages * self.stage_bytes, SWIZZLE_PERIOD),
            Array("sStatistics", Float32, STATISTICS * TILE_ROWS),
            Array("sItems", Int32, ITEM_STAGES * ITEM_WORDS, 16),
            *both_ways("item", ITEM_STAGES),
            *both_ways("key", self.key_stages),
            *both_ways("value", self.value_stages),
            *both_ways("query", 1),
            *both_ways("dout", 1),
            *both_ways("statistics", 1),
            *both_ways("scores", 1),
            Barriers("dprobs_ready", 1),
            Barriers("dscores_ready", 1),
            *both_ways("dq", 1),
            Array("tmem_cell", Int32, 1),
        ))  # fmt: skip

    def key_tiles(self, keys: Int32) -> Int32:
        """Return the tiles of that many keys. A tile has a power of two of them."""
        return (keys + (self.tile_keys - 1)) >> (self.tile_keys.bit_length() - 1)


@dataclass(frozen=True)
class DqSm100Smem:
    """Shared memory, as DqSm100Geometry.smem lays it out."""

    sQ: cute.Pointer  # bytes of Q: a box for 64 columns
    sD: cute.Pointer  # bytes of dO
    sK: cute.Pointer  # bytes of the stages of K
    sV: cute.Pointer  # bytes of the stages of V
    sStatistics: cute.Pointer  # fp32 (2, 128 rows): lse in log2 units, delta
    sItems: cute.Pointer  # int32 (4 rounds, 8): items
    tmem_cell: cute.Pointer  # int32: address of the tensor memory
    item_ready: StageBarriers
    item_free: StageBarriers
    key_ready: StageBarriers
    key_free: StageBarriers
    value_ready: StageBarriers
    value_free: StageBarriers
    query_ready: StageBarriers
    query_free: StageBarriers
    dout_ready: StageBarriers
    dout_free: StageBarriers
    statistics_ready: StageBarriers
    statistics_free: StageBarriers
    scores_ready: StageBarriers
    scores_free: StageBarriers
    dprobs_ready: StageBarriers
    dscores_ready: StageBarriers
    dq_ready: StageBarriers
    dq_free: StageBarriers

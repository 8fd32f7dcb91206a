"""Constants of the SM100 dense prefill kernel of heads of 256 columns: shared and tensor memory, barriers, roles of a pair of CTAs."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, Int32, Uint8, cute

from ...spec.dense_prefill import BOX_COLUMNS, DensePrefillConfig
from ..primitives.integers import smaller
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import SWIZZLE_PERIOD, Array, Barriers, SmemLayout
from .board import ITEM_WORDS
from .operands import WorkItem
from .sm100_config import BOX_BYTES, GROUP_WARPS, ITEM_STAGES, K_STEP, STAGE_BYTES, TILE_KEYS, TILE_ROWS, Pipes

PAIR = 2  # CTAs that share the products of an item, with TILE_ROWS of its rows each
EVEN_CTA = 0  # of a pair: it issues the products of both
CTA_KEYS = TILE_KEYS // PAIR  # of a key tile, whose K a CTA holds
STAGES = 5  # of half of K or half of V of a key tile
SCORE_STAGES = 2

SOFTMAX_WARP, OUTPUT_WARP, MMA_WARP, LOAD_WARP = 0, GROUP_WARPS, 2 * GROUP_WARPS, 2 * GROUP_WARPS + 1
THREADS = 3 * GROUP_WARPS * 32

# per lane of a warp, by setmaxnreg: 512 together; all threads start with 168
SOFTMAX_REGISTERS = 184
OUTPUT_REGISTERS = 200
OTHER_REGISTERS = 128


@dataclass(frozen=True)
class PairGeometry:
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
            Barriers("item_ready", ITEM_STAGES),
            Barriers("item_free", ITEM_STAGES),
            Barriers("kv_ready", STAGES),
            Barriers("kv_free", STAGES),
            Barriers("value_landed", 1),
            Barriers("query_ready", 1),
            Barriers("query_free", 1),
            Barriers("scores_ready", SCORE_STAGES),
            Barriers("alpha_ready", SCORE_STAGES),
            Barriers("probs_ready", SCORE_STAGES),
            Barriers("rest_ready", SCORE_STAGES),
            Barriers("output_ready", SCORE_STAGES),
            Barriers("sums_ready", 1),
            Barriers("sums_free", 1),
            Array("tmem_cell", Int32, 1),
        ))  # fmt: skip


@dataclass(frozen=True)
class PairTiles:
    """Shared memory of a CTA."""

    sQ: cute.Pointer  # bytes of 128 rows of Q, in boxes of 128 rows x 128 swizzled bytes
    sKv: cute.Pointer  # bytes of the stages: 64 keys in boxes of 128 bytes, or 128 values in boxes of 128 bytes
    sAlpha: cute.Pointer  # fp32 (2 buffers of S, 128 rows): rescale factors
    sInverse: cute.Pointer  # fp32 (128 rows): 1 / row sum, 0 for a row that attends to nothing
    sItems: cute.Pointer  # int32 (4 rounds, 8): items
    tmem_cell: cute.Pointer  # int32: address of the tensor memory


@dataclass(frozen=True)
class PairPipes(Pipes):
    """The barriers of PairGeometry.smem. sm100_pair.py says who arrives where."""

    value_landed: StageBarriers


def cta_rank() -> Int32:
    """Return the number of this CTA in its pair."""
    return cute.arch.block_idx_in_cluster()


def key_limit(item: WorkItem, row: Int32) -> Int32:
    """Return the keys that a row of the item's block sees; none if negative."""
    return smaller(item.keys, item.diagonal + row + 1)

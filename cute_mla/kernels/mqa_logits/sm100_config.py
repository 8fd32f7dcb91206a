"""Constants of the SM100 logits kernel: tile geometry, shared and tensor memory, barriers, roles. sm100.py describes them."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, Int32, Uint8, cute

from ...spec.mqa_logits import BLOCK_COLUMNS, COLUMNS, ITEM_BLOCKS, TILE_KEYS, MqaLogitsConfig
from ..attention.cta import TMEM_COLUMNS, Arrivals
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import SWIZZLE_PERIOD, Array, Barriers, SmemLayout
from .items import PostedItems

GROUPS = ITEM_BLOCKS  # of score warps: one for each row block of an item
ITEM_COLUMNS = GROUPS * BLOCK_COLUMNS

TILE_BYTES = TILE_KEYS * COLUMNS
BLOCK_BYTES = BLOCK_COLUMNS * COLUMNS
QUERY_BYTES = GROUPS * BLOCK_BYTES
K_STEPS = 4
STEP_BYTES = COLUMNS // K_STEPS

ITEM_STAGES = 4
QUERY_STAGES = 2
KEY_STAGES = 9
# More than keys have, by the tiles of the two rounds whose scores are kept: when a stage of keys is free, the scales of the tile that was
# SCALE_STAGES in front of the one to be loaded have been read. So nobody waits for stages of scales.
SCALE_STAGES = 16
SCORE_STAGES = 2  # rounds in tensor memory
assert SCALE_STAGES > KEY_STAGES + GROUPS * SCORE_STAGES
assert SCORE_STAGES * ITEM_COLUMNS == TMEM_COLUMNS

GROUP_WARPS = 4
SCORE_WARPS = GROUPS * GROUP_WARPS
MMA_WARP = SCORE_WARPS
LOAD_WARP = MMA_WARP + 1
ITEM_WARP = MMA_WARP + 2
FILL_WARP = MMA_WARP + 3
THREADS = 32 * (FILL_WARP + 1)
LANES = 32
TMEM_LANE = 1 << 16

# of a thread, by setmaxnreg: 2 x 224 + 56 = 504, all that three threads at launch have
SCORE_REGISTERS = 224
OTHER_REGISTERS = 56


@dataclass(frozen=True)
class MqaLogitsSmemSm100:
    """Shared memory, as smem_layout lays it out. sm100.py says who arrives where."""

    sQ: cute.Pointer  # bytes (2 stages, 2 row blocks): boxes of 128 rows x 128 swizzled bytes; a row is a head of a token
    sKeys: cute.Pointer  # bytes (9 stages): boxes of 128 keys x 128 swizzled bytes
    sScales: cute.Pointer  # fp32 (16 stages, 128 keys)
    sItems: cute.Pointer  # int32 (4 stages, words of an PostedItems)
    sWeights: cute.Pointer  # fp32 (4 stages, 256 columns): of the items, 0 where there is no head
    tmem_cell: cute.Pointer  # int32: address of the tensor memory
    item_ready: StageBarriers
    item_free: StageBarriers
    query_ready: StageBarriers
    query_free: StageBarriers
    key_ready: StageBarriers
    key_free: StageBarriers
    scale_ready: StageBarriers
    scores_ready: StageBarriers
    scores_free: StageBarriers

    def arrivals(self) -> tuple[Arrivals, ...]:
        """Return the arrivals of every barrier: warps or lanes of the arriving roles, or one commit."""
        return (
            (1, (self.query_ready, self.query_free, self.key_ready, self.key_free)),
            (2, (self.scores_ready,)),
            (1 + LANES, (self.item_ready,)),
            (SCORE_WARPS + 3, (self.item_free,)),  # mma, load, fill
            (LANES, (self.scale_ready,)),
            (GROUP_WARPS, (self.scores_free,)),
        )

    def scores_of(self, group: int | Int32) -> tuple[StageBarriers, StageBarriers]:
        """Return scores_ready and scores_free of a score group, as pipelines of their own."""
        first = group * SCORE_STAGES
        return StageBarriers(self.scores_ready.base + first, SCORE_STAGES), StageBarriers(self.scores_free.base + first, SCORE_STAGES)


def smem_layout(config: MqaLogitsConfig) -> SmemLayout:
    """Return the layout of shared memory."""
    item_words = PostedItems.words(GROUPS * config.block_tokens)
    return SmemLayout((
        Array("sQ", Uint8, QUERY_STAGES * QUERY_BYTES, SWIZZLE_PERIOD),
        Array("sKeys", Uint8, KEY_STAGES * TILE_BYTES, SWIZZLE_PERIOD),
        Array("sScales", Float32, SCALE_STAGES * TILE_KEYS, 16),
        Array("sItems", Int32, ITEM_STAGES * item_words, 16),
        Array("sWeights", Float32, ITEM_STAGES * ITEM_COLUMNS, 16),
        *(Barriers(name, ITEM_STAGES) for name in ("item_ready", "item_free")),
        *(Barriers(name, QUERY_STAGES) for name in ("query_ready", "query_free")),
        *(Barriers(name, KEY_STAGES) for name in ("key_ready", "key_free")),
        Barriers("scale_ready", SCALE_STAGES),
        *(Barriers(name, GROUPS * SCORE_STAGES) for name in ("scores_ready", "scores_free")),
        Array("tmem_cell", Int32, 1),
    ))  # fmt: skip

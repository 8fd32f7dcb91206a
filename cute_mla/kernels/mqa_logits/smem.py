"""Shared memory of the kernels whose items have two row blocks of queries beside tiles of keys in boxes: SM90, SM120."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float8E4M3FN, Float32, Int32, cute

from ...spec.mqa_logits import BLOCK_COLUMNS, COLUMNS, HEAD_TILES, ITEM_BLOCKS, TILE_KEYS
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import Array, Barriers, SmemLayout, Table, Tile
from .items import PostedItems

BLOCKS = ITEM_BLOCKS  # which share the keys of an item
HALF_KEYS = 64  # of a tile, a box of shared memory
HALVES = TILE_KEYS // HALF_KEYS
LANES = 32
ITEM_COLUMNS = BLOCKS * BLOCK_COLUMNS
MAX_ITEM_TOKENS = ITEM_COLUMNS // min(HEAD_TILES)
QUERY_BLOCK_BYTES = BLOCK_COLUMNS * COLUMNS
TILE_BYTES = TILE_KEYS * COLUMNS


@dataclass(frozen=True)
class MqaLogitsSmem:
    """The tensors and barriers. The kernels say who arrives where."""

    sK: cute.Tensor  # e4m3 (64 keys, 128 columns, 2 halves of each stage)
    sQ: cute.Tensor  # e4m3 (128 rows, 128 columns, 2 row blocks of each stage): tokens, with head_tile rows each
    sScales: cute.Tensor  # fp32 (128 keys, stages)
    sWeights: cute.Tensor  # fp32 (256, stages): of the rows of both row blocks
    sItems: cute.Pointer  # int32 (stages, words of an item)
    key_ready: StageBarriers
    key_free: StageBarriers
    item_ready: StageBarriers
    item_free: StageBarriers

    @staticmethod
    def layout(key_stages: int, item_stages: int) -> SmemLayout:
        """Return the fields."""
        return SmemLayout((
            Tile("sK", Float8E4M3FN, (HALF_KEYS, COLUMNS, HALVES * key_stages)),
            Tile("sQ", Float8E4M3FN, (BLOCK_COLUMNS, COLUMNS, BLOCKS * item_stages)),
            Table("sScales", Float32, (TILE_KEYS, key_stages)),
            Table("sWeights", Float32, (ITEM_COLUMNS, item_stages)),
            Array("sItems", Int32, item_stages * PostedItems.words(MAX_ITEM_TOKENS), 16),
            Barriers("key_ready", key_stages),
            Barriers("key_free", key_stages),
            Barriers("item_ready", item_stages),
            Barriers("item_free", item_stages),
        ))  # fmt: skip

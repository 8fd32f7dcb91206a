"""Tiles, shared memory, barriers and registers of the SM90 kernel."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float8E4M3FN, Float32, Int32, cute

from ...spec.mqa_logits import BLOCK_COLUMNS, COLUMNS, HEAD_TILES, ITEM_BLOCKS, TILE_KEYS
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import Array, Barriers, SmemLayout, Table, Tile
from .items import PostedItems

WARPGROUP = 128
WARPS_PER_GROUP = WARPGROUP // 32
GROUP_KEYS = 64  # rows of a product
HALVES = TILE_KEYS // GROUP_KEYS
BLOCKS = ITEM_BLOCKS  # which share the keys of an item
GROUPS = HALVES * BLOCKS  # of warps that compute
COMPUTE_WARPS = GROUPS * WARPS_PER_GROUP
PAIR_THREADS = HALVES * WARPGROUP  # of a row block
LOAD_WARP = COMPUTE_WARPS  # the first one of the last warpgroup, whose others do nothing
THREADS = (GROUPS + 1) * WARPGROUP
LANES = 32

LAUNCH_REGISTERS = 96  # a lane, of 640 threads
COMPUTE_REGISTERS = 112
LOAD_REGISTERS = 64
assert GROUPS * COMPUTE_REGISTERS + LOAD_REGISTERS <= 512, "registers of a lane of all warpgroups"

K_STEP = 32  # contraction depth of one WGMMA
K_STEPS = COLUMNS // K_STEP
KEY_STAGES = 8
ITEM_STAGES = 2
ITEM_COLUMNS = BLOCKS * BLOCK_COLUMNS
MAX_ITEM_TOKENS = ITEM_COLUMNS // min(HEAD_TILES)
QUERY_BLOCK_BYTES = BLOCK_COLUMNS * COLUMNS
TILE_BYTES = TILE_KEYS * COLUMNS

SMEM = SmemLayout((
    Tile("sK", Float8E4M3FN, (GROUP_KEYS, COLUMNS, HALVES * KEY_STAGES)),
    Tile("sQ", Float8E4M3FN, (BLOCK_COLUMNS, COLUMNS, BLOCKS * ITEM_STAGES)),
    Table("sScales", Float32, (TILE_KEYS, KEY_STAGES)),
    Table("sWeights", Float32, (ITEM_COLUMNS, ITEM_STAGES)),
    Array("sItems", Int32, ITEM_STAGES * PostedItems.words(MAX_ITEM_TOKENS), 16),
    Barriers("key_ready", KEY_STAGES),
    Barriers("key_free", KEY_STAGES),
    Barriers("item_ready", ITEM_STAGES),
    Barriers("item_free", ITEM_STAGES),
))  # fmt: skip


@dataclass(frozen=True)
class MqaLogitsSmemSm90:
    """The tensors and barriers of SMEM. sm90.py says who arrives where."""

    sK: cute.Tensor  # e4m3 (64 keys, 128 columns, 2 halves of 8 stages)
    sQ: cute.Tensor  # e4m3 (128 rows, 128 columns, 2 row blocks of 2 stages): tokens, with head_tile rows each
    sScales: cute.Tensor  # fp32 (128 keys, 8)
    sWeights: cute.Tensor  # fp32 (256, 2): of the rows of both row blocks
    sItems: cute.Pointer  # int32 (2, words of an item)
    key_ready: StageBarriers
    key_free: StageBarriers
    item_ready: StageBarriers
    item_free: StageBarriers

"""The page of constants of the SM90 dense decode kernel: tile geometry, shared memory, barriers, registers."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT, D_QK
from ...spec.split_plan import TILE_KEYS
from ..parts.barriers import Ring
from .operands import BOX_COLUMNS, ELEMENT_BYTES

SLOT_COLUMNS = 2 * BOX_COLUMNS
SLOTS_PER_TILE = D_LATENT // SLOT_COLUMNS
KV_SLOTS = 10
ROPE_SLOTS = 3
Q_TILES = D_QK // BOX_COLUMNS
Q_TILES_IN_REGISTERS = 5
Q_TILES_IN_SMEM = Q_TILES - Q_TILES_IN_REGISTERS
K_STEP = 16  # contraction depth of one WGMMA
STEPS_PER_BOX = BOX_COLUMNS // K_STEP

# WGMMA instructions of one tile: S in steps of 64 x 64 x 16, O in chunks of 64 x 128 x 16 (one role's code serves both sides)
WGMMA_PER_TILE = D_QK // K_STEP + (D_LATENT // 2 // SLOT_COLUMNS) * (TILE_KEYS // K_STEP)

WARPGROUP = 128
THREADS = 4 * WARPGROUP
WARPS_PER_GROUP = WARPGROUP // 32
OUTPUT_GROUPS = 2
OUTPUT_COLUMNS = D_LATENT // OUTPUT_GROUPS

# 4 warpgroups share 512 registers a lane: 32 + 3 x 160
LOAD_REGISTERS = 32
SCORE_REGISTERS = 160
OUTPUT_REGISTERS = 160

SCORE_BARRIER = 1  # bar.sync ids; 0 is the CTA's
OUTPUT_BARRIER = 2  # and 3


# (name, slots): one array of mbarriers, in this order, behind the tiles
BARRIERS = (
    ("kv_ready", KV_SLOTS),
    ("kv_free", KV_SLOTS),
    ("rope_ready", ROPE_SLOTS),
    ("rope_free", ROPE_SLOTS),
    ("probs_ready", ROPE_SLOTS),
    ("stats_ready", 1),
    ("stats_free", 1),
)
TILE_ALIGNMENT = 1024  # the period of the 128-byte swizzle
KV_BYTES = KV_SLOTS * TILE_KEYS * SLOT_COLUMNS * ELEMENT_BYTES
ROPE_BYTES = ROPE_SLOTS * TILE_KEYS * BOX_COLUMNS * ELEMENT_BYTES
Q_BYTES = Q_TILES_IN_SMEM * TILE_ROWS * BOX_COLUMNS * ELEMENT_BYTES
ALPHA_BYTES = ROPE_SLOTS * TILE_ROWS * 4
INVERSE_BYTES = TILE_ROWS * 4
BARRIER_OFFSET = KV_BYTES + ROPE_BYTES + Q_BYTES + ALPHA_BYTES + INVERSE_BYTES
SMEM_USED = BARRIER_OFFSET + 8 * sum(slots for _, slots in BARRIERS)


@dataclass(frozen=True)
class Tiles:
    """Shared memory as tensors: rows x columns x slots."""

    sKv: cute.Tensor  # (64 keys, 128 columns, 10)
    sRope: cute.Tensor  # (64 keys, 64 columns, 3): K's RoPE columns, then P as (64 rows, 64 keys)
    sQ: cute.Tensor  # (64 rows, 64 columns, 4): the last four column tiles of Q
    sAlpha: cute.Tensor  # (64 rows, 3) fp32: rescale factors, beside P
    sInverse: cute.Tensor  # (64 rows) fp32: 1 / row sum, 0 for a row that attends to nothing


@dataclass(frozen=True)
class Pipes:
    """The barriers of the table above."""

    kv_ready: Ring
    kv_free: Ring
    rope_ready: Ring
    rope_free: Ring
    probs_ready: Ring
    stats_ready: Ring
    stats_free: Ring

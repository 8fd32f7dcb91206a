"""Tiles, shared memory, barriers and registers of the SM90 kernel whose operands are e4m3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Float8E4M3FN, Float32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT, D_QK
from ...spec.split_plan import TILE_KEYS
from ..parts.barriers import Ring
from ..parts.sm90_geometry import ALL_REGISTERS, OUTPUT_COLUMNS, OUTPUT_GROUPS, TILE_ALIGNMENT

SLOT_COLUMNS = 128  # of a box
SLOT_BYTES = TILE_KEYS * SLOT_COLUMNS  # also of 128 columns of V^T
LATENT_SLOTS = D_LATENT // SLOT_COLUMNS  # of a tile
K_STEP = 32  # contraction depth of one WGMMA
STEPS_PER_SLOT = SLOT_COLUMNS // K_STEP
Q_STEPS = D_QK // K_STEP
PROBS_STEPS = TILE_KEYS // K_STEP
PROBS_BYTES = TILE_ROWS * TILE_KEYS
CHUNKS = OUTPUT_COLUMNS // SLOT_COLUMNS  # of V^T of one output warpgroup

STAGES = 3  # key tiles
VALUE_STAGES = 2  # transposed ones
PROBS_STAGES = 2

LOAD_REGISTERS = 48
SCORE_REGISTERS = 144
OUTPUT_REGISTERS = 160
assert LOAD_REGISTERS + SCORE_REGISTERS + OUTPUT_GROUPS * OUTPUT_REGISTERS <= ALL_REGISTERS

QGMMA_PER_TILE = Q_STEPS + CHUNKS * PROBS_STEPS  # S in steps of 64 x 64 x 32, O in chunks of 64 x 128 x 32

BARRIERS = (
    ("kv_ready", STAGES * LATENT_SLOTS),
    ("rope_ready", STAGES),
    ("keys_free", STAGES),
    ("values_ready", VALUE_STAGES * OUTPUT_GROUPS),
    ("values_free", VALUE_STAGES * OUTPUT_GROUPS),
    ("probs_ready", PROBS_STAGES),
    ("probs_free", PROBS_STAGES),
    ("stats_ready", 1),
    ("stats_free", 1),
)
TILE_BYTES = STAGES * (LATENT_SLOTS + 1) * SLOT_BYTES + VALUE_STAGES * LATENT_SLOTS * SLOT_BYTES + PROBS_STAGES * PROBS_BYTES
BARRIER_OFFSET = TILE_BYTES + (PROBS_STAGES + 1) * TILE_ROWS * 4
SMEM_BYTES = BARRIER_OFFSET + 8 * sum(slots for _, slots in BARRIERS)


@dataclass(frozen=True)
class Tiles:
    """Shared memory as tensors: rows x columns x slots."""

    sKv: cute.Tensor  # e4m3 (64 keys, 128 columns, 4 slots a stage)
    sRope: cute.Tensor  # e4m3 (64 keys, 128 columns, stages): 64 RoPE columns, then zeros that nobody reads
    sVt: cute.Tensor  # e4m3 (128 latent columns, 64 keys, 4 slots a stage), both dimensions in the order of sm90_bytes
    sProbs: cute.Tensor  # e4m3 (64 rows, 64 keys, stages), the same order of keys
    sAlpha: cute.Tensor  # fp32 (64 rows, stages of P): rescale factors
    sInverse: cute.Tensor  # fp32 (64 rows): what makes the output of a row, 0 for a row that attends to nothing


@dataclass(frozen=True)
class Pipes:
    """The barriers of the table above. Uses: a tile's slots in order for kv, a tile's sides for values."""

    kv_ready: Ring
    rope_ready: Ring
    keys_free: Ring
    values_ready: Ring
    values_free: Ring
    probs_ready: Ring
    probs_free: Ring
    stats_ready: Ring
    stats_free: Ring


def carve(smem: Any) -> tuple[Tiles, Pipes]:
    """Places tiles and barriers, in the order of BARRIER_OFFSET."""
    kinds = warpgroup.SmemLayoutAtomKind
    keys = _layout(kinds.K_SW128, TILE_KEYS, SLOT_COLUMNS, STAGES * LATENT_SLOTS)
    rope = _layout(kinds.K_SW128, TILE_KEYS, SLOT_COLUMNS, STAGES)
    values = _layout(kinds.K_SW64, SLOT_COLUMNS, TILE_KEYS, VALUE_STAGES * LATENT_SLOTS)
    probs = _layout(kinds.K_SW64, TILE_ROWS, TILE_KEYS, PROBS_STAGES)
    tiles = Tiles(
        sKv=_allocate(smem, keys),
        sRope=_allocate(smem, rope),
        sVt=_allocate(smem, values),
        sProbs=_allocate(smem, probs),
        sAlpha=smem.allocate_tensor(Float32, cute.make_layout((TILE_ROWS, PROBS_STAGES)), 16),
        sInverse=smem.allocate_tensor(Float32, cute.make_layout(TILE_ROWS), 16),
    )
    return tiles, Pipes(**{name: Ring(smem.allocate_array(Int64, slots), slots) for name, slots in BARRIERS})


def _allocate(smem: Any, layout: cute.ComposedLayout) -> cute.Tensor:
    return smem.allocate_tensor(Float8E4M3FN, layout.outer, TILE_ALIGNMENT, layout.inner)


def _layout(kind: warpgroup.SmemLayoutAtomKind, rows: int, columns: int, slots: int) -> cute.ComposedLayout:
    atom = warpgroup.make_smem_layout_atom(kind, Float8E4M3FN)
    return cute.tile_to_shape(atom, (rows, columns, slots), (0, 1, 2))

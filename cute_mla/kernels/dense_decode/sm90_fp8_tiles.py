"""Tiles, shared memory, barriers and registers of the SM90 kernel whose operands are e4m3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Float8E4M3FN, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT, D_QK
from ...spec.split_plan import TILE_KEYS
from ..primitives.pipeline import Place, Ring
from ..sm90.config import ALL_REGISTERS, OUTPUT_COLUMNS, OUTPUT_GROUPS, TILE_ALIGNMENT, TilePlace

SLOT_COLUMNS = 128  # of a box
SLOT_BYTES = TILE_KEYS * SLOT_COLUMNS
ONES_ROWS = 8  # behind the 128 columns of V^T in a slot: P times them is its row sum
VALUE_ROWS = SLOT_COLUMNS + ONES_ROWS
VALUE_BYTES = VALUE_ROWS * TILE_KEYS
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

QGMMA_PER_TILE = Q_STEPS + CHUNKS * PROBS_STEPS  # S in steps of 64 x 64 x 32, O in chunks of 64 x 136 x 32

BARRIERS = (
    ("kv_ready", STAGES * LATENT_SLOTS),
    ("rope_ready", STAGES),
    ("keys_free", STAGES),
    ("values_ready", VALUE_STAGES * LATENT_SLOTS),
    ("values_free", VALUE_STAGES * LATENT_SLOTS),
    ("probs_ready", PROBS_STAGES),
    ("probs_free", PROBS_STAGES),
)
TILE_BYTES = STAGES * (LATENT_SLOTS + 1) * SLOT_BYTES + VALUE_STAGES * LATENT_SLOTS * VALUE_BYTES + PROBS_STAGES * PROBS_BYTES
BARRIER_OFFSET = TILE_BYTES + PROBS_STAGES * TILE_ROWS * 4
SMEM_BYTES = BARRIER_OFFSET + 8 * sum(slots for _, slots in BARRIERS)


@dataclass(frozen=True)
class Tiles:
    """Shared memory as tensors: rows x columns x slots."""

    sKv: cute.Tensor  # e4m3 (64 keys, 128 columns, 4 slots a stage)
    sRope: cute.Tensor  # e4m3 (64 keys, 128 columns, stages): 64 RoPE columns, then zeros that nobody reads
    sVt: cute.Tensor  # e4m3 (128 latent columns and 8 rows of ones, 64 keys, 4 slots a stage), in the orders of sm90_bytes
    sProbs: cute.Tensor  # e4m3 (64 rows, 64 keys, stages), the same order of keys
    sAlpha: cute.Tensor  # fp32 (64 rows, stages of P): rescale factors


@dataclass(frozen=True)
class Rings:
    """One ring of `slots` for each part of a tile, one behind the other: the number of a tile is that of a use of all of them.
    The same order for what they guard."""

    base: cute.Pointer
    slots: int

    def of(self, part: int | Int32) -> Ring:
        """The ring of a part."""
        return Ring(self.base + part * self.slots, self.slots)

    def place(self, part: int | Int32, tile: Int32) -> Int32:
        """Where a part of a tile lies, in slots."""
        return part * self.slots + Ring(self.base, self.slots).slot(tile)

    def initialise(self, parts: int, arrivals: int) -> None:
        """Sets the arrivals that complete a phase. One thread, before any use."""
        Ring(self.base, parts * self.slots).initialise(arrivals)


@dataclass(frozen=True)
class Pipes:
    """The barriers of the table above."""

    kv_ready: Rings  # by box of columns
    rope_ready: Ring
    keys_free: Ring
    values_ready: Rings  # by chunk of V^T
    values_free: Rings
    probs_ready: Ring
    probs_free: Ring

    def tile(self, number: Int32) -> TilePlace:
        """Of a tile by its number."""
        return self._tile(number, self.rope_ready.place(number))

    def first_tile(self) -> TilePlace:
        """Of the first tile: all of it lies in one stage."""
        return self._tile(Int32(0), Place(Int32(0), Int32(0)))

    def next_tile(self, place: TilePlace) -> TilePlace:
        """Of the tile behind one."""
        return self._tile(place.number + 1, self.rope_ready.after(place.rope))

    def _tile(self, number: Int32, stage: Place) -> TilePlace:
        return TilePlace(number, stage, stage)


def carve(smem: Any) -> tuple[Tiles, Pipes]:
    """Places tiles and barriers, in the order of BARRIER_OFFSET."""
    kinds = warpgroup.SmemLayoutAtomKind
    keys = _layout(kinds.K_SW128, TILE_KEYS, SLOT_COLUMNS, STAGES * LATENT_SLOTS)
    rope = _layout(kinds.K_SW128, TILE_KEYS, SLOT_COLUMNS, STAGES)
    values = _layout(kinds.K_SW64, VALUE_ROWS, TILE_KEYS, VALUE_STAGES * LATENT_SLOTS)
    probs = _layout(kinds.K_SW64, TILE_ROWS, TILE_KEYS, PROBS_STAGES)
    tiles = Tiles(
        sKv=_allocate(smem, keys),
        sRope=_allocate(smem, rope),
        sVt=_allocate(smem, values),
        sProbs=_allocate(smem, probs),
        sAlpha=smem.allocate_tensor(Float32, cute.make_layout((TILE_ROWS, PROBS_STAGES)), 16),
    )
    arrays = {name: (smem.allocate_array(Int64, slots), slots) for name, slots in BARRIERS}
    pipes = Pipes(
        kv_ready=Rings(arrays["kv_ready"][0], STAGES),
        rope_ready=Ring(*arrays["rope_ready"]),
        keys_free=Ring(*arrays["keys_free"]),
        values_ready=Rings(arrays["values_ready"][0], VALUE_STAGES),
        values_free=Rings(arrays["values_free"][0], VALUE_STAGES),
        probs_ready=Ring(*arrays["probs_ready"]),
        probs_free=Ring(*arrays["probs_free"]),
    )
    return tiles, pipes


def _allocate(smem: Any, layout: cute.ComposedLayout) -> cute.Tensor:
    return smem.allocate_tensor(Float8E4M3FN, layout.outer, TILE_ALIGNMENT, layout.inner)


def _layout(kind: warpgroup.SmemLayoutAtomKind, rows: int, columns: int, slots: int) -> cute.ComposedLayout:
    atom = warpgroup.make_smem_layout_atom(kind, Float8E4M3FN)
    return cute.tile_to_shape(atom, (rows, columns, slots), (0, 1, 2))

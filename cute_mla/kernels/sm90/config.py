"""Tile geometry, shared memory, barriers and registers of the SM90 attention kernels over a latent."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT
from ...spec.split_plan import TILE_KEYS
from ..attention.tiles import BOX_COLUMNS, ELEMENT_BYTES
from ..primitives.pipeline import Place, Ring

SLOT_COLUMNS = 2 * BOX_COLUMNS
SLOTS_PER_TILE = D_LATENT // SLOT_COLUMNS
K_STEP = 16  # contraction depth of one WGMMA
STEPS_PER_BOX = BOX_COLUMNS // K_STEP

WARPGROUP = 128
THREADS = 4 * WARPGROUP
WARPS_PER_GROUP = WARPGROUP // 32
OUTPUT_GROUPS = 2
OUTPUT_COLUMNS = D_LATENT // OUTPUT_GROUPS

LAUNCH_REGISTERS = 128  # a lane, of 512 threads
ALL_REGISTERS = 512  # a lane of each of four warpgroups, together

SCORE_BARRIER = 1  # bar.sync ids; 0 is the CTA's
OUTPUT_BARRIER = 2  # and 3

TILE_ALIGNMENT = 1024  # the period of the 128-byte swizzle
VALID_BYTES = TILE_KEYS // 8
BOX_BYTES = TILE_KEYS * BOX_COLUMNS * ELEMENT_BYTES
SLOT_BYTES = TILE_KEYS * SLOT_COLUMNS * ELEMENT_BYTES


@dataclass(frozen=True)
class Geometry:
    """What differs between the kernels.

    d_qk: columns of a key, the values among them. q_tiles_in_registers: column tiles of Q that the score role keeps there.
    kv_slots, rope_slots: of the rings. first_registers, score_registers: of the role that brings the keys, and of score.
    ready_arrivals: on kv_ready and rope_ready, per phase. valid_slots: of the ring of bits that tell which keys are there, 0
    where all are. alternating: whether the slots of a tile alternate between the halves of the columns, so that both output
    groups' first ones, which come free first, are filled first. frees_rope: whether there is a barrier that tells when a RoPE slot
    is free. There need not be one where it is filled only after kv_free of all slots of its tile: those were the last ones, or later
    ones, of the tile whose P the RoPE slot had.
    """

    d_qk: int
    q_tiles_in_registers: int
    kv_slots: int
    rope_slots: int
    first_registers: int
    score_registers: int
    ready_arrivals: int
    valid_slots: int
    alternating: bool = False
    frees_rope: bool = True

    output_registers = 160

    def __post_init__(self) -> None:
        total = self.first_registers + self.score_registers + OUTPUT_GROUPS * self.output_registers
        assert total <= ALL_REGISTERS, f"{total} registers a lane of four warpgroups"
        assert self.valid_slots in (0, self.rope_slots), "the bits go round with the RoPE columns"
        assert self.frees_rope or self.kv_slots <= SLOTS_PER_TILE * self.rope_slots, "kv slots come free before RoPE slots"

    @property
    def q_tiles(self) -> int:
        """Column tiles of Q."""
        return self.d_qk // BOX_COLUMNS

    @property
    def q_tiles_in_smem(self) -> int:
        """Those of them that are operands in shared memory: the last ones."""
        return self.q_tiles - self.q_tiles_in_registers

    @property
    def slot_strides(self) -> tuple[int, int]:
        """Within a tile, from a slot of one output group to that of the other, and to the next of the same."""
        chunks = SLOTS_PER_TILE // OUTPUT_GROUPS
        return (1, OUTPUT_GROUPS) if self.alternating else (chunks, 1)

    def first_column(self, slot: int) -> int:
        """Of those in a slot of a tile."""
        to_other, to_next = self.slot_strides
        side, chunk = slot // to_other % OUTPUT_GROUPS, slot // to_next % (SLOTS_PER_TILE // OUTPUT_GROUPS)
        return side * OUTPUT_COLUMNS + chunk * SLOT_COLUMNS

    @property
    def has_rope(self) -> bool:
        """Whether keys have columns that are not values. Else the RoPE slots hold P only."""
        return self.d_qk > D_LATENT

    @property
    def wgmma_per_tile(self) -> int:
        """WGMMA instructions of one tile: S in steps of 64 x 64 x 16, O in chunks of 64 x 128 x 16 (one role's code serves
        both sides)."""
        return self.d_qk // K_STEP + (OUTPUT_COLUMNS // SLOT_COLUMNS) * (TILE_KEYS // K_STEP)

    @property
    def barriers(self) -> tuple[tuple[str, int], ...]:
        """(name, slots): one array of mbarriers, in this order, behind the tiles."""
        return (
            ("kv_ready", self.kv_slots),
            ("kv_free", self.kv_slots),
            ("rope_ready", self.rope_slots),
            *((("rope_free", self.rope_slots),) if self.frees_rope else ()),
            ("probs_ready", self.rope_slots),
            ("stats_ready", 1),
            ("stats_free", 1),
        )

    @property
    def barrier_offset(self) -> int:
        """Bytes of shared memory in front of the barriers."""
        tiles = self.kv_slots * SLOT_BYTES + (self.rope_slots + self.q_tiles_in_smem) * BOX_BYTES
        return tiles + (self.rope_slots + 1) * TILE_ROWS * 4 + self.valid_slots * VALID_BYTES

    @property
    def smem_bytes(self) -> int:
        """All shared memory."""
        return self.barrier_offset + 8 * sum(slots for _, slots in self.barriers)


@dataclass(frozen=True)
class Tiles:
    """Shared memory as tensors: rows x columns x slots."""

    sKv: cute.Tensor  # (64 keys, 128 columns, kv_slots)
    sRope: cute.Tensor  # (64 keys, 64 columns, rope_slots): K's RoPE columns, then P as (64 rows, 64 keys)
    sQ: cute.Tensor  # (64 rows, 64 columns, q_tiles_in_smem): the last column tiles of Q
    sAlpha: cute.Tensor  # (64 rows, rope_slots) fp32: rescale factors, beside P
    sInverse: cute.Tensor  # (64 rows) fp32: 1 / row sum, 0 for a row that attends to nothing
    sValid: cute.Pointer | None  # 8 bytes a slot of its ring: bit i of byte j is set if key 8 j + i is there


@dataclass(frozen=True)
class TilePlace:
    """Where a tile lies in the rings. number: of the tile in this CTA. kv: of the first slot that the role uses of it. rope: of
    its RoPE columns, of P and of its rescale factors."""

    number: Int32
    kv: Place
    rope: Place


@dataclass(frozen=True)
class Pipes:
    """The barriers of the table above."""

    kv_ready: Ring
    kv_free: Ring
    rope_ready: Ring
    rope_free: Ring  # without slots where the geometry has no barriers for it
    probs_ready: Ring
    stats_ready: Ring
    stats_free: Ring

    def tile(self, number: Int32) -> TilePlace:
        """Of a tile by its number, for a role that uses all of it."""
        return TilePlace(number, self.kv_ready.place(number * SLOTS_PER_TILE), self.rope_ready.place(number))

    def first_tile(self, slot: int | Int32 = 0) -> TilePlace:
        """Of the first tile. slot: the first of its slots that the role uses."""
        return TilePlace(Int32(0), Place(Int32(slot), Int32(0)), Place(Int32(0), Int32(0)))

    def next_tile(self, place: TilePlace) -> TilePlace:
        """Of the tile behind one."""
        return TilePlace(place.number + 1, self.kv_ready.ahead(place.kv, SLOTS_PER_TILE), self.rope_ready.after(place.rope))

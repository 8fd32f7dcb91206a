"""Tile geometry, shared memory, barriers and registers of the SM90 dense prefill kernel."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32, cute

from ...spec.arch import SM90
from ...spec.dense_prefill import BOX_COLUMNS, BOX_ROWS, D_V, TILE_ROWS
from ..attention.tiles import ELEMENT_BYTES
from ..primitives.pipeline import Ring

TILE_KEYS = 128
GROUPS = 2  # of warps that compute, each with its own query rows
GROUP_ROWS = TILE_ROWS[SM90.name] // GROUPS
K_STEP = 16  # contraction depth of one WGMMA

WARPGROUP = 128
WARPS_PER_GROUP = WARPGROUP // 32
THREADS = (1 + GROUPS) * WARPGROUP
KEY_WARP, VALUE_WARP, QUERY_WARP = 0, 1, 2  # of the first warpgroup

LOAD_REGISTERS = 24  # a lane; all threads start with 168
COMPUTE_REGISTERS = 240

TURN_BARRIER = 1  # and 2: bar.sync ids, of the warpgroup whose turn it is; 0 is the CTA's
STAGE_BARRIER = 3  # and 4: of one warpgroup

TILE_ALIGNMENT = 1024  # the period of the 128-byte swizzle
BOX_BYTES = BOX_ROWS * BOX_COLUMNS * ELEMENT_BYTES


@dataclass(frozen=True)
class Geometry:
    """What depends on the columns of q and k."""

    d_qk: int

    @property
    def query_bytes(self) -> int:
        """Of one warpgroup's rows of Q."""
        return GROUP_ROWS * self.d_qk * ELEMENT_BYTES

    @property
    def key_bytes(self) -> int:
        """Of one tile of K."""
        return TILE_KEYS * self.d_qk * ELEMENT_BYTES

    @property
    def value_bytes(self) -> int:
        """Of one tile of V."""
        return TILE_KEYS * D_V * ELEMENT_BYTES

    @property
    def slots(self) -> int:
        """Tiles of K, and as many of V, that shared memory has room for beside Q and the barriers."""
        return (SM90.smem_per_block - TILE_ALIGNMENT - GROUPS * self.query_bytes) // (self.key_bytes + self.value_bytes)

    @property
    def wgmma_per_tile(self) -> tuple[int, int]:
        """WGMMA instructions of S, in steps of 64 x 128 x 16, and of P V. One role's code serves both warpgroups."""
        return self.d_qk // K_STEP, TILE_KEYS // K_STEP

    @property
    def barriers(self) -> tuple[tuple[str, int], ...]:
        """(name, slots): one array of mbarriers, in this order, behind the tiles."""
        return (
            ("key_ready", self.slots),
            ("key_free", self.slots),
            ("value_ready", self.slots),
            ("value_free", self.slots),
            ("value_landed", 1),
            ("query_ready", GROUPS),
            ("query_free", GROUPS),
        )

    @property
    def barrier_offset(self) -> int:
        """Bytes of shared memory in front of the barriers."""
        return GROUPS * self.query_bytes + self.slots * (self.key_bytes + self.value_bytes)

    @property
    def smem_bytes(self) -> int:
        """All shared memory."""
        return self.barrier_offset + 8 * sum(slots for _, slots in self.barriers)


@dataclass(frozen=True)
class Tiles:
    """Shared memory as tensors: rows x columns x slots."""

    sQ: cute.Tensor  # (64 rows, d_qk, 2): of each warpgroup
    sK: cute.Tensor  # (128 keys, d_qk, slots)
    sV: cute.Tensor  # (128 keys, 128 columns, slots)


@dataclass(frozen=True)
class Pipes:
    """The barriers of the table above."""

    key_ready: Ring
    key_free: Ring
    value_ready: Ring
    value_free: Ring
    value_landed: Ring
    query_ready: Ring
    query_free: Ring


def key_tiles(keys: Int32) -> Int32:
    """Tiles of that many keys."""
    return (keys + (TILE_KEYS - 1)) // TILE_KEYS

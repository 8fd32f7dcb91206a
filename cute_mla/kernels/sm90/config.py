"""Tile geometry, shared memory, barriers and registers of the SM90 kernels over a latent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT, ELEMENT_BYTES
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import BOX_COLUMNS
from ..primitives.pipeline import PipelineState, StageBarriers
from ..primitives.smem import Array, Barriers, Field, SmemLayout, Table, Tile, fields_of
from ..primitives.wgmma import K_STEP
from .warpgroups import OUTPUT_GROUPS

STAGE_COLUMNS = 2 * BOX_COLUMNS
STAGES_PER_TILE = D_LATENT // STAGE_COLUMNS
STEPS_PER_BOX = BOX_COLUMNS // K_STEP
OUTPUT_COLUMNS = D_LATENT // OUTPUT_GROUPS

ALL_REGISTERS = 512  # a lane of each of four warpgroups, together
OUTPUT_REGISTERS = 160

VALID_BYTES = TILE_KEYS // 8
BOX_BYTES = TILE_KEYS * BOX_COLUMNS * ELEMENT_BYTES
STAGE_BYTES = TILE_KEYS * STAGE_COLUMNS * ELEMENT_BYTES


@dataclass(frozen=True)
class Geometry:
    """Numbers that differ between the kernels.

    d_qk: columns of a key, of which the first d_v are the values. q_tiles_in_registers: column tiles of Q that the score role keeps there.
    kv_stages, rope_stages: of the two pipelines for keys. producer_registers, score_registers: of the role that brings the keys, and
    of score. ready_arrivals: on kv_ready and rope_ready, per phase. valid_stages: of the bits that tell which keys are present, 0
    where all are. alternating: whether the stages of a tile alternate between the halves of the columns, so that both output
    groups' first ones, which come free first, are filled first. rope_after: stages of a tile that are filled, and multiplied, before its
    RoPE columns. frees_rope: whether a barrier tells when a RoPE stage is free. None is needed where it is filled only after kv_free of
    the tile's first stages and of all stages of the tile before: those had, among them, the last stages of both output groups of the
    tile whose P the RoPE stage had. Where keys have no RoPE columns, P is written when all stages of its tile are filled. takes_turns:
    whether the right output group multiplies a tile after the left one, whose stages then come free in half of the time. q_boxes: boxes
    of shared memory for Q, where more than the column tiles that stay there. prefetched: stages of a tile that L2 is asked for before
    the tile is loaded: those whose place comes free last before their keys are needed. tells_targets: whether the score role tells the
    output role where rows of O go.
    """

    d_qk: int
    q_tiles_in_registers: int
    kv_stages: int
    rope_stages: int
    producer_registers: int
    score_registers: int
    ready_arrivals: int
    valid_stages: int
    alternating: bool = False
    rope_after: int = STAGES_PER_TILE
    frees_rope: bool = True
    takes_turns: bool = False
    q_boxes: int = 0
    prefetched: tuple[int, ...] = ()
    d_v: int = D_LATENT
    tells_targets: bool = True

    def __post_init__(self) -> None:
        total = self.producer_registers + self.score_registers + OUTPUT_GROUPS * OUTPUT_REGISTERS
        assert total <= ALL_REGISTERS, f"{total} registers a lane of four warpgroups"
        assert self.valid_stages in (0, self.rope_stages), "the bits go round with the RoPE columns"
        before = self.rope_after if self.has_rope else self.tile_stages
        last_read = self.tile_stages * (self.rope_stages - 1) + before  # stages filled since P's tile, with those before RoPE
        assert self.frees_rope or self.kv_stages <= last_read, "kv stages come free before RoPE stages"

    @property
    def tile_stages(self) -> int:
        """Return the stages of a tile."""
        return self.d_v // STAGE_COLUMNS

    @property
    def output_columns(self) -> int:
        """Return the columns of O of an output group."""
        return self.d_v // OUTPUT_GROUPS

    @property
    def output_chunks(self) -> int:
        """Return the stages of a tile that an output group multiplies."""
        return self.tile_stages // OUTPUT_GROUPS

    @property
    def q_tiles(self) -> int:
        """Return the column tiles of Q."""
        return self.d_qk // BOX_COLUMNS

    @property
    def q_tiles_in_smem(self) -> int:
        """Return the column tiles of Q that are operands in shared memory: the last ones."""
        return self.q_tiles - self.q_tiles_in_registers

    @property
    def stage_strides(self) -> tuple[int, int]:
        """Return, within a tile, the distance from a stage of one output group to the other's, and to the next of the same."""
        return (1, OUTPUT_GROUPS) if self.alternating else (self.output_chunks, 1)

    def first_column(self, stage: int) -> int:
        """Return the first column of a stage of a tile."""
        to_other, to_next = self.stage_strides
        side, chunk = stage // to_other % OUTPUT_GROUPS, stage // to_next % self.output_chunks
        return side * self.output_columns + chunk * STAGE_COLUMNS

    @property
    def has_rope(self) -> bool:
        """Return whether keys have columns that are not values. Else the RoPE stages hold P only."""
        return self.d_qk > self.d_v

    @property
    def signals_rope(self) -> bool:
        """Return whether a barrier tells that the RoPE columns of a tile are there, or the bits of its keys."""
        return self.has_rope or self.valid_stages > 0

    @property
    def wgmma_per_tile(self) -> int:
        """Return the WGMMA instructions of one tile.

        S takes steps of 64 x 64 x 16, O chunks of 64 x 128 x 16; one role's code serves both sides.
        """
        return self.d_qk // K_STEP + self.output_chunks * (TILE_KEYS // K_STEP)

    def smem(self, dtype: type[cutlass.Numeric], *added: Field) -> SmemLayout:
        """Return the layout of shared memory. dtype: of keys, P and Q. added: fields of a kernel's own, behind the shared ones."""
        valid = (Array("sValid", Uint8, self.valid_stages * VALID_BYTES, 8),) if self.valid_stages else ()
        rope_ready = (Barriers("rope_ready", self.rope_stages),) if self.signals_rope else ()
        rope_free = (Barriers("rope_free", self.rope_stages),) if self.frees_rope else ()
        right_turn = (Barriers("right_turn", self.rope_stages),) if self.takes_turns else ()
        targets = (Table("sTarget", Int64, TILE_ROWS),) if self.tells_targets else ()
        return SmemLayout((
            Tile("sKv", dtype, (TILE_KEYS, STAGE_COLUMNS, self.kv_stages)),
            Tile("sRope", dtype, (TILE_KEYS, BOX_COLUMNS, self.rope_stages)),
            Tile("sQ", dtype, (TILE_ROWS, BOX_COLUMNS, max(self.q_boxes, self.q_tiles_in_smem))),
            Table("sAlpha", Float32, (TILE_ROWS, self.rope_stages)),
            Table("sInverse", Float32, TILE_ROWS),
            *targets,
            *valid,
            Barriers("kv_ready", self.kv_stages),
            Barriers("kv_free", self.kv_stages),
            *rope_ready,
            *rope_free,
            Barriers("probs_ready", self.rope_stages),
            *right_turn,
            Barriers("stats_ready", 1),
            Barriers("stats_free", 1),
            *added,
        ))  # fmt: skip


@dataclass(frozen=True)
class Tiles:
    """Shared memory as tensors: rows x columns x stages."""

    sKv: cute.Tensor  # (64 keys, 128 columns, kv_stages)
    sRope: cute.Tensor  # (64 keys, 64 columns, rope_stages): K's RoPE columns, then P as (64 rows, 64 keys)
    sQ: cute.Tensor  # (64 rows, 64 columns, q_tiles_in_smem or q_boxes): the last column tiles of Q
    sAlpha: cute.Tensor  # (64 rows, rope_stages) fp32: rescale factors, beside P
    sInverse: cute.Tensor  # (64 rows) fp32: 1 / row sum, 0 for a row that attends to nothing
    sTarget: cute.Tensor | None  # (64 rows) int64: where rows of O go, by row_targets.target_of
    sValid: cute.Pointer | None  # 8 bytes a stage, as many stages as RoPE columns: bit i of byte j is set if key 8 j + i is present

    @classmethod
    def create(cls, memory: dict) -> Tiles:
        """Return the tiles of the shared memory that Geometry.smem allocates."""
        return cls(**fields_of(cls, memory))


@dataclass(frozen=True)
class TileState:
    """Pipeline states of a tile.

    number: of the tile in this CTA. kv: of the first stage that the role uses of it. rope: of its RoPE columns, of P and of its
    rescale factors.
    """

    number: Int32
    kv: PipelineState
    rope: PipelineState


@dataclass(frozen=True)
class Pipes:
    """The barriers of Geometry.smem. dense_decode/sm90.py says who arrives where."""

    kv_ready: StageBarriers
    kv_free: StageBarriers
    rope_ready: StageBarriers  # without stages where the geometry has no barriers for it
    rope_free: StageBarriers  # likewise
    probs_ready: StageBarriers
    right_turn: StageBarriers  # likewise
    stats_ready: StageBarriers
    stats_free: StageBarriers
    tile_stages: int  # stages of a tile, in kv_ready and kv_free

    @classmethod
    def create(cls, memory: dict, tile_stages: int = STAGES_PER_TILE) -> Self:
        """Return the barriers of the shared memory that Geometry.smem allocates."""
        absent = StageBarriers(memory["kv_free"].base, 0)
        return cls(
            **fields_of(cls, {"rope_ready": absent, "rope_free": absent, "right_turn": absent, "tile_stages": tile_stages, **memory})
        )

    def tile(self, number: Int32) -> TileState:
        """Return the states of a tile by its number, for a role that uses all of it."""
        return TileState(number, self.kv_ready.state(number * self.tile_stages), self.probs_ready.state(number))

    def first_tile(self, stage: int | Int32 = 0) -> TileState:
        """Return the states of the first tile. stage: the first of its stages that the role uses."""
        return TileState(Int32(0), PipelineState(Int32(stage), Int32(0)), PipelineState(Int32(0), Int32(0)))

    def next_tile(self, state: TileState) -> TileState:
        """Return the states of the tile after one."""
        return TileState(state.number + 1, self.kv_ready.advance_by(state.kv, self.tile_stages), self.probs_ready.advance(state.rope))

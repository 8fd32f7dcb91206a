"""Tiles, shared memory with its barriers, and registers of the SM90 kernel with e4m3 operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Float8E4M3FN, Float32, Int32, Int64, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT, D_QK
from ...spec.split_plan import TILE_KEYS
from ..primitives.pipeline import PipelineState, StageBarriers
from ..primitives.smem import Barriers, SmemLayout, Table, Tile, fields_of
from ..sm90.cta import OUTPUT_GROUPS, OUTPUT_WARPS, WARPS_PER_GROUP, LatentSm90TileState

BOX_COLUMNS = 128
BOX_BYTES = TILE_KEYS * BOX_COLUMNS
ONES_ROWS = 8  # behind the 128 columns of a box of V^T: P times them is its row sum
VALUE_ROWS = BOX_COLUMNS + ONES_ROWS
VALUE_BYTES = VALUE_ROWS * TILE_KEYS
LATENT_BOXES = D_LATENT // BOX_COLUMNS  # of a tile
K_STEP = 32  # contraction depth of one WGMMA
STEPS_PER_BOX = BOX_COLUMNS // K_STEP
Q_STEPS = D_QK // K_STEP
PROBS_STEPS = TILE_KEYS // K_STEP
PROBS_BYTES = TILE_ROWS * TILE_KEYS
CHUNKS = LATENT_BOXES // OUTPUT_GROUPS  # of V^T of one output warpgroup

STAGES = 3  # key tiles
VALUE_STAGES = 2  # transposed ones
PROBS_STAGES = 2

REGISTERS = 48, 144  # a lane of load and transpose, and of score

QGMMA_PER_TILE = Q_STEPS + CHUNKS * PROBS_STEPS  # S in steps of 64 x 64 x 32, O in chunks of 64 x 136 x 32

SMEM = SmemLayout((
    Tile("sKv", Float8E4M3FN, (TILE_KEYS, BOX_COLUMNS, STAGES * LATENT_BOXES)),
    Tile("sRope", Float8E4M3FN, (TILE_KEYS, BOX_COLUMNS, STAGES)),
    Tile("sVt", Float8E4M3FN, (VALUE_ROWS, TILE_KEYS, VALUE_STAGES * LATENT_BOXES), swizzle=64),
    Tile("sProbs", Float8E4M3FN, (TILE_ROWS, TILE_KEYS, PROBS_STAGES), swizzle=64),
    Table("sAlpha", Float32, (TILE_ROWS, PROBS_STAGES)),
    Table("sInverse", Float32, TILE_ROWS),
    Table("sTarget", Int64, TILE_ROWS),
    Barriers("kv_ready", STAGES * LATENT_BOXES),
    Barriers("rope_ready", STAGES),
    Barriers("keys_free", STAGES),
    Barriers("values_ready", VALUE_STAGES * LATENT_BOXES),
    Barriers("values_free", VALUE_STAGES * LATENT_BOXES),
    Barriers("probs_ready", PROBS_STAGES),
    Barriers("probs_free", PROBS_STAGES),
    Barriers("stats_ready", 1),
    Barriers("stats_free", 1),
))  # fmt: skip


@dataclass(frozen=True)
class DenseDecodeBoxBarriers:
    """A StageBarriers for each box of a tile, one behind the other: use n of each is tile n. What they guard lies in the same order."""

    base: cute.Pointer
    stages: int

    def box(self, box: int | Int32) -> StageBarriers:
        """Return the barriers of one box."""
        return StageBarriers(self.base + box * self.stages, self.stages)

    def stage(self, box: int | Int32, tile: Int32) -> Int32:
        """Return the stage of a box of a tile, among those of all boxes."""
        return box * self.stages + StageBarriers(self.base, self.stages).stage(tile)

    def initialise(self, boxes: int, arrivals: int) -> None:
        """Set the arrivals that complete a phase. One thread, before any use."""
        StageBarriers(self.base, boxes * self.stages).initialise(arrivals)


@dataclass(frozen=True)
class DenseDecodeSm90Fp8Smem:
    """Shared memory: tensors of rows x columns x stages, and barriers. Of a box, stage s of number b lies at b * stages + s.

    sm90_fp8.py says who arrives where.
    """

    sKv: cute.Tensor  # e4m3 (64 keys, 128 columns, 4 boxes of 3 stages)
    sRope: cute.Tensor  # e4m3 (64 keys, 128 columns, 3): 64 RoPE columns, then zeros that nobody reads
    sVt: cute.Tensor  # e4m3 (128 latent columns and 8 rows of ones, 64 keys, 4 boxes of 2 stages), in the orders of sm90_fp8_transpose.py
    sProbs: cute.Tensor  # e4m3 (64 rows, 64 keys, 2), the same order of keys
    sAlpha: cute.Tensor  # fp32 (64 rows, stages of P): rescale factors
    sInverse: cute.Tensor  # fp32 (64 rows): factor of a row of O, but for its division by the sum of rounded P
    sTarget: cute.Tensor  # int64 (64 rows): where rows of O go, by output_target
    kv_ready: DenseDecodeBoxBarriers
    rope_ready: StageBarriers
    keys_free: StageBarriers
    values_ready: DenseDecodeBoxBarriers
    values_free: DenseDecodeBoxBarriers
    probs_ready: StageBarriers
    probs_free: StageBarriers
    stats_ready: StageBarriers
    stats_free: StageBarriers

    d_v = D_LATENT
    valid_ready = None  # every tile has keys

    @staticmethod
    def create(memory: dict[str, Any]) -> DenseDecodeSm90Fp8Smem:
        """Return the allocated fields of SMEM."""
        boxes = {"kv_ready": STAGES, "values_ready": VALUE_STAGES, "values_free": VALUE_STAGES}
        by_box = {name: DenseDecodeBoxBarriers(memory[name].base, stages) for name, stages in boxes.items()}
        return DenseDecodeSm90Fp8Smem(**fields_of(DenseDecodeSm90Fp8Smem, {**memory, **by_box}))

    def initialise(self, cluster: int) -> None:
        """Set the arrivals of every barrier: warps of the arriving role, times the CTAs that share a stage."""
        self.kv_ready.initialise(LATENT_BOXES, 1)
        self.rope_ready.initialise(1)
        self.keys_free.initialise((WARPS_PER_GROUP + LATENT_BOXES) * cluster)
        self.values_ready.initialise(LATENT_BOXES, 1)
        self.values_free.initialise(LATENT_BOXES, WARPS_PER_GROUP)
        self.probs_ready.initialise(WARPS_PER_GROUP)
        self.probs_free.initialise(OUTPUT_WARPS)
        self.stats_ready.initialise(WARPS_PER_GROUP)
        self.stats_free.initialise(OUTPUT_WARPS)
        cute.arch.mbarrier_init_fence()

    def tile(self, number: Int32) -> LatentSm90TileState:
        """Return the states of a tile by its number: all of it lies in one stage."""
        stage = self.rope_ready.state(number)
        return LatentSm90TileState(number, stage, stage)

    def first_tile(self, side: Int32) -> LatentSm90TileState:
        """Return the states of the first tile."""
        stage = PipelineState(Int32(0), Int32(0))
        return LatentSm90TileState(Int32(0), stage, stage)

    def next_tile(self, state: LatentSm90TileState) -> LatentSm90TileState:
        """Return the states of the tile after one."""
        stage = self.rope_ready.advance(state.rope)
        return LatentSm90TileState(state.number + 1, stage, stage)

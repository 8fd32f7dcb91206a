"""The CTA of the SM90 kernels over a latent: warpgroups, the stages of a tile, shared memory with its barriers, and the start of the roles.

dense_decode/sm90.py describes tiles, pipelines and the trick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32, cute

from ...manifest import NamedBarrier, Role
from ...spec.arch import Arch
from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT, D_QK, ELEMENT_BYTES, ceil_div
from ...spec.split_plan import TILE_KEYS
from ..attention.kernel import ELEMENT_TYPES, AttentionConfig, AttentionKernel, KernelAbi
from ..attention.scheduler import BOX_COLUMNS
from ..definition import KernelDefinition
from ..primitives.pipeline import PipelineState, StageBarriers
from ..primitives.rows import aligned
from ..primitives.smem import Array, Barriers, Field, SmemLayout, Table, Tile, fields_of
from ..primitives.wgmma import K_STEP

WARPGROUP = 128
WARPS_PER_GROUP = WARPGROUP // 32
THREADS = 4 * WARPGROUP
OUTPUT_GROUPS = 2
OUTPUT_WARPS = OUTPUT_GROUPS * WARPS_PER_GROUP

LAUNCH_REGISTERS = 128  # a lane, of 512 threads
ALL_REGISTERS = 512  # a lane of each of four warpgroups, together
OUTPUT_REGISTERS = 160
SHARED_REGISTERS = ALL_REGISTERS - OUTPUT_GROUPS * OUTPUT_REGISTERS  # by producer and score

SCORE_BARRIER = 1  # bar.sync ids; 0 is the CTA's
OUTPUT_BARRIER = 2  # and 3

STAGE_COLUMNS = 2 * BOX_COLUMNS
STAGE_BOXES = STAGE_COLUMNS // BOX_COLUMNS
STEPS_PER_BOX = BOX_COLUMNS // K_STEP
ROW_ELEMENTS = BOX_COLUMNS  # from a key's row in a box to the next
BOX_ELEMENTS = TILE_KEYS * ROW_ELEMENTS
STAGE_ELEMENTS = STAGE_BOXES * BOX_ELEMENTS
BOX_BYTES = BOX_ELEMENTS * ELEMENT_BYTES
STAGE_BYTES = STAGE_BOXES * BOX_BYTES
VALID_BYTES = TILE_KEYS // 8
ROPE = -1  # in place of a stage: the RoPE columns of a tile

# fields of shared memory that a kernel may do without
OPTIONAL = {"sTarget", "sValid", "rope_ready", "rope_free", "right_turn"}


def group_of(warp: Int32) -> Int32:
    """Return the warpgroup of a warp."""
    return Int32(Uint32(warp) // WARPS_PER_GROUP)


def set_registers(count: int) -> None:
    """Set the registers of each lane of this warpgroup. A whole warpgroup."""
    if count < LAUNCH_REGISTERS:
        cute.arch.setmaxregister_decrease(count)
    else:
        cute.arch.setmaxregister_increase(count)


def sync_start(cluster: int) -> None:
    """Wait until the barriers are initialised in every CTA that shares them. Their fence has released them, so the arrival need not."""
    if cluster > 1:
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()


def warpgroup_roles(producer: str) -> tuple[Role, ...]:
    """Return the four warpgroups. producer: name of the role that brings the keys."""
    names = (producer, "score", "output_left", "output_right")
    return tuple(Role(name, group * WARPS_PER_GROUP, WARPS_PER_GROUP) for group, name in enumerate(names))


@dataclass(frozen=True)
class LatentSm90Stages:
    """The stages of a tile of keys, 128 columns each, in the order in which they are filled and multiplied, and its RoPE columns.

    d_qk: columns of a key, of which the first d_v are the values. columns: the first one of each stage. The output groups have a half of
    them each. before_rope: stages before the RoPE columns.
    """

    d_qk: int = D_QK
    columns: tuple[int, ...] = tuple(range(0, D_LATENT, STAGE_COLUMNS))
    before_rope: int = D_LATENT // STAGE_COLUMNS

    @property
    def count(self) -> int:
        """Return the stages of a tile."""
        return len(self.columns)

    @property
    def d_v(self) -> int:
        """Return the columns of V, which are those of O."""
        return self.count * STAGE_COLUMNS

    @property
    def output_stages(self) -> int:
        """Return the stages of a tile that an output group multiplies."""
        return self.count // OUTPUT_GROUPS

    @property
    def to_other(self) -> int:
        """Return the distance from a stage of the left output group to the same one of the right group."""
        return self.columns.index(self.d_v // OUTPUT_GROUPS)

    @property
    def parts(self) -> tuple[int, ...]:
        """Return the stages and ROPE, in order."""
        stages = range(self.count)
        return (*stages[: self.before_rope], ROPE, *stages[self.before_rope :])

    def column(self, part: int, box: int | Int32 = 0) -> int | Int32:
        """Return the first column of a box of a stage, or of ROPE."""
        return self.d_v if part == ROPE else self.columns[part] + box * BOX_COLUMNS

    @property
    def rope_columns(self) -> int:
        """Return the columns of a key that are not values."""
        return self.d_qk - self.d_v

    @property
    def has_rope(self) -> bool:
        """Return whether keys have columns that are not values. Else the RoPE stages hold P only."""
        return self.d_qk > self.d_v

    @property
    def wgmma_per_tile(self) -> int:
        """Return the WGMMA instructions of one tile.

        S takes steps of 64 x 64 x 16, O chunks of 64 x 128 x 16; one role's code serves both sides.
        """
        return self.d_qk // K_STEP + self.output_stages * (TILE_KEYS // K_STEP)


@dataclass(frozen=True)
class LatentSm90Queries:
    """The column tiles of Q: the first ones in registers of the score role, the others in boxes of shared memory.

    boxes: where more than those others.
    """

    d_qk: int
    in_registers: int
    boxes: int = 0

    @property
    def tiles(self) -> int:
        """Return the column tiles, the last of which may be a part of one."""
        return ceil_div(self.d_qk, BOX_COLUMNS)

    def columns(self, tile: int) -> int:
        """Return the columns of a column tile."""
        return min(BOX_COLUMNS, self.d_qk - tile * BOX_COLUMNS)

    @property
    def phases(self) -> tuple[list[int], list[int]]:
        """Return the column tiles that go to registers, and the others. Where both come through boxes, tile i of either to box i."""
        tiles = list(range(self.tiles))
        return tiles[: self.in_registers], tiles[self.in_registers :]

    def tile(self, dtype: type[cutlass.Numeric]) -> Tile:
        """Return the boxes as a field of shared memory."""
        return Tile("sQ", dtype, (TILE_ROWS, BOX_COLUMNS, max(self.boxes, self.tiles - self.in_registers)))


@dataclass(frozen=True)
class LatentSm90TileState:
    """Pipeline states of a tile.

    number: of the tile in this CTA. kv: of the first stage that the role uses of it. rope: of its RoPE columns, of P and of its
    rescale factors.
    """

    number: Int32
    kv: PipelineState
    rope: PipelineState


@dataclass(frozen=True)
class LatentSm90Smem:
    """Shared memory: tensors of rows x columns x stages, and barriers. None for what a kernel does without.

    Without rope_free, RoPE stages are filled only after kv_free of the tile's first stages and of all stages of the tile before: those had,
    among them, the last stages of both output groups of the tile whose P the RoPE stage had. Where keys have no RoPE columns, P is written
    when all stages of its tile are filled.
    """

    stages: LatentSm90Stages
    sKv: cute.Tensor  # (64 keys, 128 columns, kv stages)
    sRope: cute.Tensor  # (64 keys, 64 columns, RoPE stages): K's RoPE columns, then P as (64 rows, 64 keys)
    sQ: cute.Tensor  # (64 rows, 64 columns, boxes): column tiles of Q
    sAlpha: cute.Tensor  # (64 rows, RoPE stages) fp32: rescale factors, beside P
    sInverse: cute.Tensor  # (64 rows) fp32: 1 / row sum, 0 for a row that attends to nothing
    sTarget: cute.Tensor | None  # (64 rows) int64: where rows of O go, by output_target; None: the output role computes it
    sValid: cute.Pointer | None  # 8 bytes a RoPE stage: bit i of byte j is set if key 8 j + i is present; None: all are
    kv_ready: StageBarriers
    kv_free: StageBarriers
    rope_ready: StageBarriers | None  # None where there is nothing to wait for: neither RoPE columns nor sValid
    rope_free: StageBarriers | None
    probs_ready: StageBarriers
    right_turn: StageBarriers | None  # where the right output group multiplies a tile after the left one, whose stages come free early
    stats_ready: StageBarriers
    stats_free: StageBarriers
    valid_ready: StageBarriers | None  # of sValid, where it is known ahead of the keys: tiles without keys are skipped

    stats_ctas = 1  # whose output roles release the factors and places of rows

    @staticmethod
    def layout(
        stages: LatentSm90Stages, queries: LatentSm90Queries, dtype: type[cutlass.Numeric], rings: tuple[int, int], optional: set[str],
        *added: Field,
    ) -> SmemLayout:  # fmt: skip
        """Return the fields. dtype: of keys, P and Q. rings: kv and RoPE stages. optional: those of OPTIONAL that the kernel has."""
        kv_stages, rope_stages = rings
        # stages filled since the tile whose P a RoPE stage had, with those before the RoPE columns
        filled = stages.count * (rope_stages - 1) + (stages.before_rope if stages.has_rope else stages.count)
        assert "rope_free" in optional or kv_stages <= filled, "kv stages come free before RoPE stages"
        fields: tuple[Field, ...] = (
            Tile("sKv", dtype, (TILE_KEYS, STAGE_COLUMNS, kv_stages)),
            Tile("sRope", dtype, (TILE_KEYS, BOX_COLUMNS, rope_stages)),
            queries.tile(dtype),
            Table("sAlpha", Float32, (TILE_ROWS, rope_stages)),
            Table("sInverse", Float32, TILE_ROWS),
            Table("sTarget", Int64, TILE_ROWS),
            Array("sValid", Uint8, rope_stages * VALID_BYTES, 8),
            Barriers("kv_ready", kv_stages),
            Barriers("kv_free", kv_stages),
            Barriers("rope_ready", rope_stages),
            Barriers("rope_free", rope_stages),
            Barriers("probs_ready", rope_stages),
            Barriers("right_turn", rope_stages),
            Barriers("stats_ready", 1),
            Barriers("stats_free", 1),
        )
        return SmemLayout(tuple(field for field in fields if field.name not in OPTIONAL - optional) + added)

    @classmethod
    def create(cls, stages: LatentSm90Stages, memory: dict[str, Any]) -> Self:
        """Return the allocated fields of a layout."""
        return cls(**fields_of(cls, {**memory, "stages": stages}))

    def initialise(self, cluster: int, producers: int = 1) -> None:
        """Set the arrivals of every barrier: warps of the arriving role, times the CTAs that share a stage. producers: on kv_ready."""
        arrivals = (
            (self.kv_ready, producers),
            (self.kv_free, WARPS_PER_GROUP * cluster),
            (self.rope_ready, producers),
            (self.rope_free, OUTPUT_WARPS * cluster),
            (self.probs_ready, WARPS_PER_GROUP),
            (self.right_turn, WARPS_PER_GROUP),
            (self.stats_ready, WARPS_PER_GROUP),
            (self.stats_free, OUTPUT_WARPS * self.stats_ctas),
        )
        for barriers, count in arrivals:
            if barriers is not None:
                barriers.initialise(count)
        cute.arch.mbarrier_init_fence()

    @property
    def d_v(self) -> int:
        """Return the columns of O."""
        return self.stages.d_v

    def tile(self, number: Int32) -> LatentSm90TileState:
        """Return the states of a tile by its number, for a role that uses all of it."""
        return LatentSm90TileState(number, self.kv_ready.state(number * self.stages.count), self.probs_ready.state(number))

    def first_tile(self, side: Int32) -> LatentSm90TileState:
        """Return the states of the first tile, for an output group."""
        first = PipelineState(Int32(side * self.stages.to_other), Int32(0))
        return LatentSm90TileState(Int32(0), first, PipelineState(Int32(0), Int32(0)))

    def next_tile(self, state: LatentSm90TileState) -> LatentSm90TileState:
        """Return the states of the tile after one."""
        kv = self.kv_ready.advance_by(state.kv, self.stages.count)
        return LatentSm90TileState(state.number + 1, kv, self.probs_ready.advance(state.rope))

    def kv_stage(self, use: Int32) -> Int32:
        """Return the address of the stage of a use of kv_ready."""
        return self.sKv.iterator.toint() + self.kv_ready.stage(use) * STAGE_BYTES

    def rope_stage(self, tile: Int32) -> Int32:
        """Return the address of the RoPE stage of a tile."""
        return self.sRope.iterator.toint() + self.probs_ready.stage(tile) * BOX_BYTES

    def valid_words(self, stage: Int32) -> tuple[Int32, Int32]:
        """Return the bits of the keys 0..31 and 32..63 of a tile. stage: of the RoPE columns."""
        words = cute.recast_ptr(self.sValid, dtype=Int32) + stage * (VALID_BYTES // 4)
        return words.load(), (words + 1).load()

    def has_keys(self, stage: Int32) -> Boolean:
        """Return whether a tile has any key. The same for all lanes."""
        low, high = self.valid_words(stage)
        return cute.arch.make_warp_uniform(low | high) != 0

    @cute.jit
    def await_peer(self, tiles_done: Int32):
        """Wait until every stage is free: the peer's last arrivals must not reach a CTA that is gone.

        No cluster barrier, which would make every warp wait for its stores. One warp is enough: the CTA stays as long as any.
        """
        kv = self.kv_free.state(tiles_done * self.stages.count)
        for _ in cutlass.range(self.kv_free.stages, unroll=1):
            self.kv_free.producer_acquire(kv)
            kv = self.kv_free.advance(kv)
        if cutlass.const_expr(self.rope_free is not None):
            rope = self.rope_free.state(tiles_done)
            for _ in cutlass.range(self.rope_free.stages, unroll=1):
                self.rope_free.producer_acquire(rope)
                rope = self.rope_free.advance(rope)


@cute.jit
def clear_rows(
    tiles: cute.Tensor, stage: Int32, first_row: Int32, thread: Int32, threads: int = WARPGROUP, more: tuple[Int32, Int32] | None = None
):
    """Zero the rows from first_row on of a stage of (rows, columns, stages). Whole 128-byte rows, so the swizzle does not matter.

    thread: one of `threads`, a multiple of 8. more: further rows, begin and end.
    """
    rows, columns = cute.size(tiles, mode=[0]), cute.size(tiles, mode=[1])
    chunk_elements = 8  # 16 bytes
    chunks_per_row = BOX_COLUMNS // chunk_elements
    rows_per_pass = threads // chunks_per_row
    zeros = cute.make_rmem_tensor(cute.make_layout(chunk_elements), tiles.element_type)
    zeros.fill(0.0)
    base = tiles.iterator + stage * (rows * columns)
    for box in cutlass.range_constexpr(columns // BOX_COLUMNS):
        for step in cutlass.range_constexpr(rows // rows_per_pass):
            row = step * rows_per_pass + thread // chunks_per_row
            unused = row >= first_row
            if cutlass.const_expr(more is not None):
                unused = unused | ((row >= more[0]) & (row < more[1]))  # type: ignore[index]  # not None here
            if unused:
                offset = (box * rows + row) * BOX_COLUMNS + thread % chunks_per_row * chunk_elements
                cute.autovec_copy(zeros, cute.make_tensor(aligned(base + offset, 16), cute.make_layout(chunk_elements)))


class LatentSm90Parts:
    """A variant's own part of a kernel over a latent: its shared memory, and the roles of its warpgroups.

    dtype: of out. registers: a lane of the producer and of the score warpgroup. expected: products of a tile, their opcode and number.
    """

    stages: LatentSm90Stages
    layout: SmemLayout
    registers: tuple[int, int]
    roles: tuple[Role, ...]
    expected: tuple[str, int]
    named_barriers: tuple[NamedBarrier, ...] = (
        NamedBarrier("score", SCORE_BARRIER),
        NamedBarrier("output_left", OUTPUT_BARRIER),
        NamedBarrier("output_right", OUTPUT_BARRIER + 1),
    )

    def __init__(self, config: AttentionConfig) -> None:
        self.dtype = ELEMENT_TYPES[config.dtype]
        self.cluster = config.cluster

    def smem(self, memory: dict[str, Any]) -> Any:
        """Return the allocated shared memory as the roles see it."""
        return LatentSm90Smem.create(self.stages, memory)

    def initialise(self, operands: Any, smem: Any) -> None:
        """Initialise the barriers. One thread."""
        smem.initialise(self.cluster)

    def prefetch(self, operands: Any) -> None:
        """Ask L2 for what every role reads first. One warp."""
        operands.schedule.prefetch()

    def produce(self, operands: Any, smem: Any, warp: Int32, thread: Int32) -> None:
        """Run the roles that bring the keys. One warpgroup."""
        raise NotImplementedError

    def score(self, operands: Any, smem: Any, thread: Int32) -> None:
        """Run the score role. One warpgroup."""
        raise NotImplementedError

    def output(self, operands: Any, smem: Any, thread: Int32, side: Int32) -> None:
        """Run the output role. Two warpgroups."""
        raise NotImplementedError


class LatentSm90Kernel(AttentionKernel):
    """One variant of a kernel over a latent."""

    threads = THREADS

    def __init__(self, abi: KernelAbi, arch: Arch, parts: LatentSm90Parts) -> None:
        super().__init__(abi, arch)
        self.parts = parts
        assert sum(parts.registers) <= SHARED_REGISTERS, f"{parts.registers} registers a lane of producer and score"

    @cute.jit
    def run(self, operands: Any):
        """Allocate, initialise the barriers, and give each role its warps."""
        smem = self.parts.smem(self.parts.layout.allocate())
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                self.parts.initialise(operands, smem)
        elif warp == 1:
            self.parts.prefetch(operands)
        sync_start(self.parts.cluster)
        # the plan, the lengths, the scales, the indices, Q and the cache may come from the kernel before
        cute.arch.griddepcontrol_wait()

        group = group_of(warp)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        if group == 0:
            set_registers(self.parts.registers[0])
            self.parts.produce(operands, smem, warp, thread)
        elif group == 1:
            set_registers(self.parts.registers[1])
            self.parts.score(operands, smem, thread)
        else:
            set_registers(OUTPUT_REGISTERS)
            self.parts.output(operands, smem, thread, group - 2)

    def complete(self) -> KernelDefinition:
        """Return the variant, ready to compile."""
        parts = self.parts
        return self.definition(
            smem_bytes=parts.layout.nbytes,
            barriers=parts.layout.barriers(),
            named_barriers=parts.named_barriers,
            roles=parts.roles,
            expected=dict([parts.expected]),
        )

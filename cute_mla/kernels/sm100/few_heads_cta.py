"""The CTA of the SM100 kernels with keys on M, for up to 64 query rows: warps, shared and tensor memory, barriers, start of the roles.

    S^T [64 keys x rows] = K Q^T        O^T [512 columns x rows] += V^T P^T

dense_decode/sm100_few_heads.py describes tiles, roles, pipelines and the trick.

A thread of the score role: warp w of four, r = lane / 4, q = lane % 4. It has the keys 16 w + r and 16 w + r + 8 of a tile, and of every 16
rows of its group the four from 4 q on. registers_of says which registers of S^T are a row's. So four rows of P are one or two words, and
columns of O^T are rows in their order; only Q lies in another order, by query_place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from cutlass import Float32, Int32, Int64, Uint8, cute

from ...manifest import NamedBarrier, Role
from ...spec.arch import Arch
from ...spec.mla import D_LATENT, D_QK, D_ROPE
from ...spec.split_plan import TILE_KEYS
from ..attention import cta
from ..attention.kernel import AttentionKernel, KernelAbi
from ..definition import KernelDefinition
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import SWIZZLE_PERIOD, Array, Barriers, SmemLayout, fields_of
from .config import BOX_BYTES, GROUP, GROUP_WARPS, ROW_BYTES, STEP_BYTES

BLOCK_COLUMNS = 128  # of a product of O^T
BLOCKS = D_LATENT // BLOCK_COLUMNS
STAGES = 5  # of 64 keys x 512 bytes of latent columns: all columns of e4m3 keys, with their RoPE columns, or half of those of 16 bits
PART_BOXES = 4
TILE_BUFFERS = {1: STAGES, 2: 3}  # of RoPE columns and P, by the bytes of an element
SCORE_BUFFERS = 2

ROW_GROUP = 16  # query rows
THREAD_ROWS = 4  # of each of these
MOST_GROUP_ROWS = 32  # of a group of four score warps
KEYS_APART = 8  # a thread's two keys
SOFTMAX_BARRIER = 1  # and the next, where there are two groups
OUTPUT_BARRIER = 3
ROLES = ("load", "query", "scores", "values")  # a warp each, behind score and output


def registers_of(row: int) -> tuple[int, int]:
    """Return the registers of S^T that have the thread's two keys of one of its rows."""
    first = row // THREAD_ROWS * 8 + row // 2 % 2 * 4 + row % 2
    return first, first + 2


def query_place(row: Int32) -> Int32:
    """Return the place of a query row in Q: it becomes that column of S^T."""
    within = row % ROW_GROUP
    return row - within + within // 4 * 2 + within % 2 + within // 2 % 2 * 8


@dataclass(frozen=True)
class FewHeadsGeometrySm100:
    """Numbers that depend on the rows on N, 16, 32 or 64, and on the bytes of an element of Q, K, V and P.

    e4m3 probabilities are rounded coarsely: O is divided by the sum of what was multiplied, which the tensor cores add up.
    """

    rows: int
    element_bytes: int = 1

    @property
    def sums_probs(self) -> bool:
        """Return whether O is divided by the sum of P as it was multiplied."""
        return self.element_bytes == 1

    @property
    def buffers(self) -> int:
        """Return the tiles whose RoPE columns, P and rescale factors shared memory has room for."""
        return TILE_BUFFERS[self.element_bytes]

    @property
    def parts(self) -> int:
        """Return the stages of a tile."""
        return self.boxes // PART_BOXES

    @property
    def boxes(self) -> int:
        """Return the boxes of 64 keys x 128 bytes of latent columns of a tile."""
        return D_LATENT * self.element_bytes // ROW_BYTES

    @property
    def rope_bytes(self) -> int:
        """Return the bytes of the RoPE columns of a key or query row."""
        return D_ROPE * self.element_bytes

    @property
    def rope_box_bytes(self) -> int:
        """Return the bytes of the RoPE columns of a tile, which P overwrites."""
        return TILE_KEYS * self.rope_bytes

    @property
    def stage_bytes(self) -> int:
        """Return the bytes of a stage."""
        return PART_BOXES * BOX_BYTES + (self.rope_box_bytes if self.parts == 1 else 0)

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of all stages, and of the RoPE columns that are not in them."""
        return STAGES * self.stage_bytes + (0 if self.parts == 1 else self.buffers * self.rope_box_bytes)

    def last_part(self, tile: Int32) -> Int32:
        """Return the number of a tile's last stage among those of all tiles."""
        return tile * self.parts + (self.parts - 1)

    @property
    def probs_bytes(self) -> int:
        """Return the bytes of P of a key."""
        return self.rows * self.element_bytes

    @property
    def score_steps(self) -> int:
        """Return the products of S^T of a tile."""
        return D_QK * self.element_bytes // STEP_BYTES

    @property
    def step_keys(self) -> int:
        """Return the keys that a product of O^T contracts."""
        return STEP_BYTES // self.element_bytes

    @property
    def products(self) -> int:
        """Return the products of a tile."""
        return self.score_steps + TILE_KEYS // self.step_keys * (BLOCKS + self.sums_probs)

    @property
    def groups(self) -> int:
        """Return the groups of four score warps, each of which has a share of the rows, of every tile."""
        return max(self.rows // MOST_GROUP_ROWS, 1)

    @property
    def group_rows(self) -> int:
        """Return the rows of a group."""
        return self.rows // self.groups

    @property
    def thread_rows(self) -> int:
        """Return the rows of a score thread."""
        return self.group_rows // ROW_GROUP * THREAD_ROWS

    @property
    def query_buffers(self) -> int:
        """Return the work tiles whose Q shared memory has room for."""
        return 1 if self.rows == 64 else 2

    @property
    def query_bytes(self) -> int:
        """Return the bytes of Q: boxes of 128 bytes a row, the last one of the RoPE columns."""
        return self.rows * D_QK * self.element_bytes

    @property
    def output_warp(self) -> int:
        """Return the first warp of the output role."""
        return self.groups * GROUP_WARPS

    # ---- tensor memory, in columns of 128 lanes ---------------------------------------------------------------------

    @property
    def sum_column(self) -> int:
        """Return the first column of the sums of P, behind the four times 128 columns of O^T: the same in all lanes."""
        return BLOCKS * self.rows

    @property
    def score_column(self) -> int:
        """Return the first column of S^T, of which each warp has keys in 16 of its lanes."""
        return self.sum_column + self.rows

    @property
    def ones_column(self) -> int:
        """Return the first of eight columns of ones, which sum P."""
        return self.score_column + SCORE_BUFFERS * self.rows

    def smem(self) -> SmemLayout:
        """Return the layout of shared memory."""
        return SmemLayout((
            Array("sKv", Uint8, self.kv_bytes, SWIZZLE_PERIOD),
            Array("sQ", Uint8, self.query_buffers * self.query_bytes, SWIZZLE_PERIOD),
            Array("sMaxima", Float32, 2 * self.groups * GROUP, 16),
            Array("sAlpha", Float32, self.buffers * self.rows, 16),
            Array("sSums", Float32, GROUP_WARPS * self.rows, 16),
            Array("sSeen", Float32, self.rows, 16),
            Array("sWeights", Float32, 2 * self.rows, 16),
            Array("sPlaces", Int64, 2 * self.rows, 16),
            *(Barriers(name, STAGES) for name in ("kv_ready", "kv_free")),
            *(Barriers(name, self.buffers) for name in ("alpha_ready", "probs_ready", "output_ready")),
            *(Barriers(name, self.query_buffers) for name in ("query_ready", "query_free")),
            *(Barriers(name, SCORE_BUFFERS) for name in ("scores_ready", "scores_free")),
            *(Barriers(name, 1) for name in ("stats_ready", "stats_free")),
            Array("tmem_cell", Int32, 1),
        ))  # fmt: skip


@dataclass(frozen=True)
class FewHeadsSmemSm100:
    """Shared memory, as FewHeadsGeometrySm100.smem lays it out."""

    geometry: FewHeadsGeometrySm100
    sKv: cute.Pointer  # bytes of stages: boxes of 64 keys x 128 bytes; RoPE columns, later P, in each or behind all of them
    sQ: cute.Pointer  # bytes of one work tile or two: boxes of rows x 128 bytes, then RoPE columns
    sMaxima: cute.Pointer  # [tile % 2, group, warp, lane]: of a tile, by the lane that has a row's
    sAlpha: cute.Pointer  # [buffer, row]: rescale factors
    sSums: cute.Pointer  # [warp, row]: of a work tile
    sSeen: cute.Pointer  # [row]: what the sums are relative to
    sWeights: cute.Pointer  # [work tile % 2, row]: factors of rows of O
    sPlaces: cute.Pointer  # [work tile % 2, row]: addresses of rows of O
    kv_ready: StageBarriers
    kv_free: StageBarriers
    alpha_ready: StageBarriers
    probs_ready: StageBarriers
    output_ready: StageBarriers
    query_ready: StageBarriers
    query_free: StageBarriers
    scores_ready: StageBarriers
    scores_free: StageBarriers
    stats_ready: StageBarriers
    stats_free: StageBarriers
    tmem_cell: cute.Pointer

    @classmethod
    def create(cls, geometry: FewHeadsGeometrySm100, memory: dict[str, Any]) -> Self:
        """Return the pointers and barriers that a layout has allocated."""
        return cls(**fields_of(cls, {**memory, "geometry": geometry}))

    def part(self, tile: Int32, number: int) -> cute.Pointer:
        """Return the first byte of a stage of a tile."""
        return self.sKv + self.kv_ready.stage(tile * self.geometry.parts + number) * self.geometry.stage_bytes

    def rope(self, tile: Int32) -> cute.Pointer:
        """Return the first byte of a tile's RoPE columns, later P."""
        if self.geometry.parts == 1:
            return self.part(tile, 0) + PART_BOXES * BOX_BYTES
        return self.sKv + (STAGES * self.geometry.stage_bytes + self.probs_ready.stage(tile) * self.geometry.rope_box_bytes)

    def queries(self, work_tile: Int32) -> cute.Pointer:
        """Return the first byte of Q of a work tile. work_tile: number among those with keys."""
        return self.sQ + self.query_ready.stage(work_tile) * self.geometry.query_bytes

    def arrivals(self) -> tuple[cta.Arrivals, ...]:
        """Return the arrivals of every barrier: warps of the arriving role, or one commit."""
        score_warps = self.geometry.groups * GROUP_WARPS
        # where a tile has several stages, S^T and O^T tell apart when they have read one
        return (
            (self.geometry.parts, (self.kv_free,)),
            (1, (self.kv_ready, self.query_ready, self.query_free, self.scores_ready)),
            (self.geometry.groups, (self.alpha_ready,)),
            (score_warps, (self.scores_free, self.probs_ready, self.stats_ready)),
            (GROUP_WARPS, (self.output_ready, self.stats_free)),
        )


class FewHeadsSm100Kernel(AttentionKernel):
    """One variant of a kernel with keys on M. A subclass has the roles: functions of operands, shared memory and tensor memory."""

    score: Any
    output: Any

    def __init__(self, abi: KernelAbi, arch: Arch, geometry: FewHeadsGeometrySm100) -> None:
        super().__init__(abi, arch)
        self.geometry = geometry
        self.layout = geometry.smem()
        self.first_of_four = geometry.output_warp + GROUP_WARPS
        self.threads = 32 * (self.first_of_four + len(ROLES))

    @cute.jit
    def run(self, operands: Any):
        """Allocate, initialise the barriers, and give each role its warps."""
        smem = FewHeadsSmemSm100.create(self.geometry, self.layout.allocate())
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta.initialise(warp, self.first_of_four, smem.arrivals(), self.tensor_maps(operands))
        if warp == 0:
            operands.schedule.prefetch()
        tmem = cta.allocate_tmem(smem, warp, self.first_of_four + 1)
        # the plan, the lengths, Q and the cache may come from the kernel before
        cute.arch.griddepcontrol_wait()
        if warp < self.geometry.output_warp:
            self.score(operands, smem, tmem)
        elif warp < self.first_of_four:
            self.output(operands, smem, tmem)
        else:
            for number, name in enumerate(ROLES):
                if warp == self.first_of_four + number:
                    getattr(self, name)(operands, smem, tmem)
        cta.free_tmem(tmem, warp, self.first_of_four + 1)

    def tensor_maps(self, operands: Any) -> tuple[Any, ...]:
        """Return the tensor maps to prefetch."""
        raise NotImplementedError

    def complete(self) -> KernelDefinition:
        """Return the variant, ready to compile."""
        names = ("softmax", "softmax_upper_rows")[: self.geometry.groups]
        barriers = tuple(NamedBarrier(name, SOFTMAX_BARRIER + i) for i, name in enumerate(names))
        return self.definition(
            smem_bytes=self.layout.nbytes,
            barriers=self.layout.barriers(),
            named_barriers=(*barriers, NamedBarrier("output", OUTPUT_BARRIER)),
            roles=(
                Role("score", 0, self.geometry.output_warp),
                Role("output", self.geometry.output_warp, GROUP_WARPS),
                *(Role(name, self.first_of_four + number, 1) for number, name in enumerate(ROLES)),
            ),
            expected={"UTCQMMA" if self.geometry.element_bytes == 1 else "UTCHMMA": self.geometry.products},
            tmem_columns=cta.TMEM_COLUMNS,
        )


@dataclass(frozen=True)
class FewHeadsThreadSm100:
    """A thread of the score role. group, warp: uniform; warp: of the group's four."""

    group: Int32
    warp: Int32
    lane: Int32

    @staticmethod
    def create() -> FewHeadsThreadSm100:
        """Return this thread."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        return FewHeadsThreadSm100(warp // GROUP_WARPS, warp % GROUP_WARPS, cute.arch.lane_idx())

    @property
    def key(self) -> Int32:
        """Return the first of the thread's two keys."""
        return self.warp * 16 + self.lane // 4

    def first_row(self, geometry: FewHeadsGeometrySm100) -> Int32:
        """Return the first of the thread's rows. Each further four lie ROW_GROUP further."""
        return self.group * geometry.group_rows + self.lane % 4 * THREAD_ROWS

    def row(self, geometry: FewHeadsGeometrySm100, number: int) -> Int32:
        """Return the number of one of the thread's rows."""
        return self.first_row(geometry) + (number // THREAD_ROWS * ROW_GROUP + number % THREAD_ROWS)


def load_floats(place: cute.Pointer, count: int) -> list[Float32]:
    """Load so many neighbouring fp32 numbers of shared memory, a multiple of four, at a multiple of 16 bytes."""
    rIn = cute.make_rmem_tensor(cute.make_layout(count), Float32)
    source = cute.make_ptr(Float32, place.toint(), cute.AddressSpace.smem, assumed_align=16)
    cute.autovec_copy(cute.make_tensor(source, rIn.layout), rIn)
    return [rIn[i] for i in range(count)]

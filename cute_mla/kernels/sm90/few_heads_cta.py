"""The CTA of the SM90 kernels with keys on M, for up to 16 query rows: warpgroups, shared memory with its barriers, start of the roles.

    S^T [64 keys x 16 rows] = K Q^T        O^T [512 columns x 16 rows] += V^T P^T

Two warpgroups convert and score, tiles in turn: a tile of a work tile with an even number goes to the first one. The third one multiplies
V^T P^T, loads Q and stores O. sparse_decode/sm90_few_heads.py describes tiles, pipelines and the trick.

A thread of a warpgroup: warp w, r = lane / 4, q = lane % 4. In S^T it has keys 16 w + r and 16 w + r + 8, in O^T columns at these places;
in both rows 2 q, 2 q + 1, 2 q + 8, 2 q + 9 (HEADS_PER_THREAD). A 64-column box holds column 16 q + 2 c + e at place 8 c + 2 q + e, in Q, K
and V alike, so that 16 bytes of e4m3 of a key are two fragments of A.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import cutlass
from cutlass import Float32, Int32, Int64, cute

from ...manifest import NamedBarrier, Role
from ...spec.arch import Arch
from ...spec.dense_decode import FEW_HEADS
from ...spec.mla import D_LATENT
from ...spec.split_plan import TILE_KEYS
from ..attention.kernel import AttentionKernel, KernelAbi
from ..attention.scheduler import BOX_COLUMNS
from ..definition import KernelDefinition
from ..primitives.pipeline import PipelineState, StageBarriers
from ..primitives.smem import Array, Barriers, Field, SmemLayout, Tile, fields_of
from .cta import STAGE_COLUMNS, WARPGROUP, WARPS_PER_GROUP, group_of, sync_start

HEADS = 16  # rows on N
HEADS_PER_THREAD = 4
assert FEW_HEADS <= HEADS, "rows beyond HEADS would not be computed"
FLOAT_BYTES = 4
HEAD_TABLE_BYTES = HEADS * FLOAT_BYTES
CONVERTERS = 2  # warpgroups
THREADS = (CONVERTERS + 1) * WARPGROUP
REGISTERS = (208, 96)  # a lane of a converter, and of the output warpgroup

TILE_STAGES = D_LATENT // STAGE_COLUMNS
V_STAGES = CONVERTERS * TILE_STAGES
BOXES = D_LATENT // BOX_COLUMNS
Q_TILES = 2
OUT_ROW = D_LATENT + 4  # fp32 words: rows 2 q apart lie 8 q banks apart

SOFTMAX_BARRIER = 1  # and the following: one for each converter
STAGGER_BARRIER = 3
OUTPUT_BARRIER = 4


@dataclass(frozen=True)
class FewHeadsThread:
    """A thread of a warpgroup. warp: uniform."""

    warp: Int32
    lane: Int32

    @staticmethod
    def create() -> FewHeadsThread:
        """Return this thread."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        return FewHeadsThread(warp % WARPS_PER_GROUP, cute.arch.lane_idx())

    @property
    def heads(self) -> Int32:
        """Return the place of the thread's rows in a table of fp32 numbers, in bytes."""
        return self.lane % 4 * (2 * FLOAT_BYTES)

    @property
    def key(self) -> Int32:
        """Return the first of the thread's two keys, which lie 8 apart."""
        return self.warp * 16 + self.lane // 4


def head_of(register: int) -> int:
    """Return which of the thread's rows an accumulator belongs to."""
    return 2 * (register >> 2) + (register & 1)


def head_number(thread: FewHeadsThread, head: int) -> Int32:
    """Return the number of one of the thread's rows."""
    return thread.lane % 4 * 2 + 8 * (head >> 1) + (head & 1)


def load_heads(place: Int32) -> list[Float32]:
    """Load the numbers of the thread's rows. place: of its first one in a table, in shared memory."""
    found = []
    for half in range(2):
        pair = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        cute.autovec_copy(_pair_at(place, half), pair)
        found += [pair[0], pair[1]]
    return found


def store_heads(place: Int32, values: list[Float32]) -> None:
    """Store the numbers of the thread's rows, as load_heads finds them. One of eight lanes."""
    for half in range(2):
        pair = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        pair[0], pair[1] = values[2 * half], values[2 * half + 1]
        cute.autovec_copy(pair, _pair_at(place, half))


def _pair_at(place: Int32, half: int) -> cute.Tensor:
    address = place + half * (HEADS // 2 * FLOAT_BYTES)
    return cute.make_tensor(cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=8), cute.make_layout(2))


@dataclass(frozen=True)
class FewHeadsSmem:
    """Shared memory: tensors of rows x columns x stages, tables of 16 fp32 numbers, and barriers."""

    sV: cute.Tensor  # (64 keys, 128 columns, stages)
    sQ: cute.Tensor  # (16 rows, 64 columns, boxes of two work tiles)
    sP: cute.Tensor  # (16 rows, 64 keys, groups of columns of either converter), MN-major
    sMaxima: cute.Pointer  # [converter, turn, warp]: of a tile
    sReference: cute.Pointer  # [converter]
    sAlpha: cute.Pointer  # [converter]: rescale factors
    sSums: cute.Pointer  # [work tile % 2, converter, warp]
    sSeen: cute.Pointer  # [work tile % 2, converter]: what the sums are relative to
    sWeights: cute.Pointer  # of a work tile: factors of rows of O
    sPlaces: cute.Pointer  # [work tile % 2]: addresses of rows of O, then of their lse
    sOut: cute.Pointer  # (16 rows, 516) fp32: O by places, on its way to gmem
    v_free: StageBarriers
    p_ready: StageBarriers
    loads_issued: StageBarriers
    reference_ready: StageBarriers
    q_ready: StageBarriers
    sums_ready: StageBarriers

    @staticmethod
    def layout(dtype: type[cutlass.Numeric], q_boxes: int, p_groups: int) -> SmemLayout:
        """Return the fields. dtype: of keys, P and Q. q_boxes: of 64 columns. p_groups: of columns, with a P each."""
        fields: tuple[Field, ...] = (
            Tile("sV", dtype, (TILE_KEYS, STAGE_COLUMNS, V_STAGES)),
            Tile("sQ", dtype, (HEADS, BOX_COLUMNS, Q_TILES * q_boxes)),
            Tile("sP", dtype, (HEADS, TILE_KEYS, CONVERTERS * p_groups), swizzle=32, mn_major=True),
            Array("sMaxima", Float32, HEADS * WARPS_PER_GROUP * 2 * CONVERTERS, 16),
            Array("sReference", Float32, HEADS * CONVERTERS, 16),
            Array("sAlpha", Float32, HEADS * CONVERTERS, 16),
            Array("sSums", Float32, HEADS * WARPS_PER_GROUP * CONVERTERS * Q_TILES, 16),
            Array("sSeen", Float32, HEADS * CONVERTERS * Q_TILES, 16),
            Array("sWeights", Float32, HEADS, 16),
            Array("sPlaces", Int64, HEADS * 2 * Q_TILES, 16),
            Array("sOut", Float32, HEADS * OUT_ROW, 16),
            Barriers("v_free", V_STAGES),
            Barriers("p_ready", CONVERTERS),
            Barriers("loads_issued", CONVERTERS),
            Barriers("reference_ready", CONVERTERS),
            Barriers("q_ready", Q_TILES),
            Barriers("sums_ready", Q_TILES),
        )
        return SmemLayout(fields)

    @classmethod
    def create(cls, memory: dict[str, Any]) -> Self:
        """Return the allocated fields of a layout."""
        return cls(**fields_of(cls, memory))

    def initialise(self) -> None:
        """Set the arrivals of every barrier: warps of the arriving role. One thread."""
        arrivals = (
            (self.v_free, WARPS_PER_GROUP),
            (self.p_ready, WARPS_PER_GROUP),
            (self.loads_issued, WARPS_PER_GROUP),
            (self.reference_ready, WARPS_PER_GROUP),
            (self.q_ready, WARPS_PER_GROUP),
            (self.sums_ready, WARPS_PER_GROUP * CONVERTERS),
        )
        for barriers, count in arrivals:
            barriers.initialise(count)
        cute.arch.mbarrier_init_fence()

    def v_state(self, group: Int32, turn: Int32, stage: int) -> PipelineState:
        """Return the state of a stage of a converter's tile. turn: the parity of the tiles that it had before."""
        return PipelineState(group * TILE_STAGES + stage, turn)

    def table(self, tables: cute.Pointer, number: Int32, thread: FewHeadsThread) -> Int32:
        """Return the place of the thread's rows in one of several tables."""
        return tables.toint() + number * HEAD_TABLE_BYTES + thread.heads


class FewHeadsSm90Parts:
    """A variant's own part of a kernel with keys on M.

    dtype: of out and of products' operands. expected: products of a tile of either role.
    """

    layout: SmemLayout
    expected: int

    def convert(self, operands: Any, smem: FewHeadsSmem, group: Int32) -> None:
        """Run the role that converts and scores. One warpgroup of two."""
        raise NotImplementedError

    def output(self, operands: Any, smem: FewHeadsSmem) -> None:
        """Run the output role. One warpgroup."""
        raise NotImplementedError


class FewHeadsSm90Kernel(AttentionKernel):
    """One variant of a kernel with keys on M."""

    threads = THREADS

    def __init__(self, abi: KernelAbi, arch: Arch, parts: FewHeadsSm90Parts) -> None:
        super().__init__(abi, arch)
        self.parts = parts

    @cute.jit
    def run(self, operands: Any):
        """Allocate, initialise the barriers, and give each role its warps."""
        smem = FewHeadsSmem.create(self.parts.layout.allocate())
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                smem.initialise()
        elif warp == 1:
            operands.schedule.prefetch()
        sync_start(1)
        # the plan, the lengths, the scales, the indices, Q and the cache may come from the kernel before
        cute.arch.griddepcontrol_wait()

        group = group_of(warp)
        if group < CONVERTERS:
            cute.arch.setmaxregister_increase(REGISTERS[0])
            self.parts.convert(operands, smem, group)
        else:
            cute.arch.setmaxregister_decrease(REGISTERS[1])
            self.parts.output(operands, smem)

    def complete(self) -> KernelDefinition:
        """Return the variant, ready to compile."""
        names = "convert_even", "convert_odd", "output"
        barriers = {
            "softmax_even": SOFTMAX_BARRIER,
            "softmax_odd": SOFTMAX_BARRIER + 1,
            "stagger": STAGGER_BARRIER,
            "output": OUTPUT_BARRIER,
        }
        return self.definition(
            smem_bytes=self.parts.layout.nbytes,
            barriers=self.parts.layout.barriers(),
            named_barriers=tuple(NamedBarrier(name, number) for name, number in barriers.items()),
            roles=tuple(Role(name, group * WARPS_PER_GROUP, WARPS_PER_GROUP) for group, name in enumerate(names)),
            expected={"HGMMA": self.parts.expected},
        )

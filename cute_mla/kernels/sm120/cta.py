"""The CTA of the SM120 kernels over a latent: warps, shared memory with its barriers, start of the roles.

    S [rows x 32 keys] = Q K^T        O [rows x 512 columns] += P V

HEADS_ON_M  up to 16 rows. Four warps multiply. Where keys pass registers, four others bring those of each stage, so that DRAM has the
            bytes of one stage to bring while the warps of the other wait for the latency of theirs, and convert: 384 threads leave 168
            registers to each. Where they do not, four bring all
KEYS_ON_M   up to 64 rows. Eight warps multiply, and take registers of the four that bring keys past registers, or convert them in place

A row of Q, of a key or of P in shared memory is 16 bytes longer than its elements: rows lie in different banks without a swizzle
(primitives/warp_products.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import cutlass
from cutlass import Float32, Int32, cute

from ...manifest import NamedBarrier, Role
from ...spec.arch import Arch
from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT, ELEMENT_BYTES
from ...spec.split_plan import TILE_KEYS
from ..attention.kernel import AttentionKernel, KernelAbi
from ..definition import KernelDefinition
from ..primitives.copies import CHUNK
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import Array, Barriers, SmemLayout, fields_of
from ..primitives.warp_products import K, M, N

ROWS = M  # of Q and O
WARPS = 4  # that bring keys, and that multiply with heads on M
LANES = 32
KEYS = 32  # of a stage
WARP_KEYS = KEYS // WARPS
STAGES = TILE_KEYS // KEYS
P_PITCH = KEYS * ELEMENT_BYTES + CHUNK
MATH_BARRIER = 1
TURN_BARRIER = 5  # keys on M: [stage][couple of pairs]
SCHEDULERS = 4
REGISTER_COLUMNS = D_LATENT - 2 * K  # of Q that threads have room for with keys on M
COPY_ARRIVALS = WARPS * LANES + 1  # on k_ready, of threads' copies that land by themselves, and of bits


@dataclass(frozen=True)
class Sm120Form:
    """The warps of a CTA. rows: of Q. warps: that multiply. loaders: warps that bring keys. turns: buffers of P.

    registers: of a lane of the loaders, and of one of the others; None: as at the launch.
    """

    rows: int
    warps: int
    loaders: int
    turns: int
    barriers: tuple[NamedBarrier, ...]
    registers: tuple[int, int] | None = None

    @property
    def threads(self) -> int:
        """Return the threads of a CTA."""
        return (self.warps + self.loaders) * LANES

    def leave_registers(self) -> None:
        """Leave registers of a warp that brings keys to those that multiply."""
        if self.registers is not None:
            cute.arch.setmaxregister_decrease(self.registers[0])

    def take_registers(self) -> None:
        """Take registers for a warp that multiplies."""
        if self.registers is not None:
            cute.arch.setmaxregister_increase(self.registers[1])


HEADS_ON_M = Sm120Form(ROWS, WARPS, WARPS, 1, (NamedBarrier("attend", MATH_BARRIER),))
HEADS_ON_M_BY_REGISTERS = replace(HEADS_ON_M, loaders=STAGES * WARPS)
KEYS_ON_M = Sm120Form(
    TILE_ROWS,
    8,
    WARPS,
    2,
    (
        *(NamedBarrier(f"pair_{i}", MATH_BARRIER + i) for i in range(4)),
        *(NamedBarrier(f"turn_{i}", TURN_BARRIER + i) for i in range(2 * STAGES)),
    ),
    (24, 240),
)
KEYS_ON_M_CONVERTING = replace(KEYS_ON_M, registers=(40, 232))  # as far as slots are looked up and their bytes pass registers


def pitch_of(columns: int) -> int:
    """Return the bytes from a row of 16-bit elements to the next."""
    return columns * ELEMENT_BYTES + CHUNK


@dataclass(frozen=True)
class Sm120Smem:
    """Shared memory."""

    sK: cute.Pointer  # dtype [stage][key][d_qk], rows pitch_of(d_qk) bytes apart; keys that do not exist are zeros
    sP: cute.Pointer  # dtype [turn][row][key], P_PITCH bytes apart
    sRows: cute.Pointer  # fp32 [warp][row]: maxima of a stage; at the end of a work tile sums. Keys on M: [turn][row]: factors of O
    k_ready: StageBarriers
    k_free: StageBarriers
    sQ: cute.Pointer | None = None  # dtype [row][d_qk], as sK, zeros where there is no row. Keys on M: words of threads
    sPresent: cute.Pointer | None = None  # int32, where indices decide which keys exist: [stage][key], or [stage] of bits
    sScales: cute.Pointer | None = None  # bytes [key][..]: scales of a stage that is being converted
    sKept: cute.Pointer | None = None  # fp32: what results of an op keep until the end of a work tile

    @staticmethod
    def layout(dtype: type[cutlass.Numeric], d_qk: int, *more: Array, form: Sm120Form = HEADS_ON_M) -> SmemLayout:
        """Return the fields. dtype: of Q, keys and P. more: fields of a variant."""
        elements = pitch_of(d_qk) // ELEMENT_BYTES
        queries = ROWS * elements if form.rows == ROWS else TILE_ROWS * max(d_qk - REGISTER_COLUMNS, CHUNK // ELEMENT_BYTES)  # never none
        fields: tuple[Array | Barriers, ...] = (
            Array("sK", dtype, STAGES * KEYS * elements, 128),
            Array("sQ", dtype, queries, 128),
            Array("sP", dtype, form.turns * form.rows * P_PITCH // ELEMENT_BYTES, 128),
            Array("sRows", Float32, WARPS * ROWS if form.rows == ROWS else form.turns * form.rows, 16),
            *more,
            Barriers("k_ready", STAGES),
            Barriers("k_free", STAGES),
        )
        return SmemLayout(fields)

    @classmethod
    def create(cls, memory: dict[str, Any]) -> Self:
        """Return the allocated fields of a layout."""
        return cls(**fields_of(cls, memory))

    def initialise(self, producers: int, consumers: int) -> None:
        """Set the arrivals of every barrier: threads or warps of the arriving role. One thread."""
        self.k_ready.initialise(producers)
        self.k_free.initialise(consumers)
        cute.arch.mbarrier_init_fence()


@dataclass(frozen=True)
class Sm120Thread:
    """A thread of a role.

    warp: of four, uniform. lane: of the warp. stage: whose keys the four warps bring; those that multiply have none. row: of S and O, and
    the one 8 further. column: the first of two of S and of 8 of O.
    """

    warp: Int32
    lane: Int32
    stage: Int32

    @staticmethod
    def create() -> Sm120Thread:
        """Return this thread."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        return Sm120Thread(warp % WARPS, cute.arch.lane_idx(), warp // WARPS - 1)

    @property
    def key(self) -> Int32:
        """Return the key of a tile that is the lane's: one of the warp's 8 keys of a stage."""
        return self.stage * KEYS + self.warp * WARP_KEYS + self.lane % WARP_KEYS

    @property
    def row(self) -> Int32:
        """Return the first of the thread's rows."""
        return self.lane // 4

    @property
    def column(self) -> Int32:
        """Return the first of the thread's columns of a product."""
        return self.lane % 4 * 2


def first_query_row() -> Int32:
    """Return the first row of this CTA, among all rows that its CTAs share out along x."""
    return cute.arch.block_idx()[0] * ROWS


class Sm120Parts:
    """A variant's own part of a kernel."""

    @property
    def form(self) -> Sm120Form:
        """Return how it multiplies."""
        return HEADS_ON_M_BY_REGISTERS

    @property
    def producers(self) -> int:
        """Return the arrivals that hand over a stage."""
        return WARPS

    @property
    def layout(self) -> SmemLayout:
        """Return the fields of shared memory."""
        raise NotImplementedError

    @property
    def expected(self) -> int:
        """Return the products in the code."""
        raise NotImplementedError

    def load(self, operands: Any, smem: Sm120Smem) -> None:
        """Run the role that brings keys."""
        raise NotImplementedError

    def attend(self, operands: Any, smem: Sm120Smem) -> None:
        """Run the role that multiplies."""
        raise NotImplementedError


class Sm120Kernel(AttentionKernel):
    """One variant of a kernel."""

    def __init__(self, abi: KernelAbi, arch: Arch, parts: Sm120Parts) -> None:
        super().__init__(abi, arch)
        self.parts, self.form, self.threads = parts, parts.form, parts.form.threads

    @cute.jit
    def run(self, operands: Any):
        """Allocate, initialise the barriers, and give each role its warps."""
        smem = Sm120Smem.create(self.parts.layout.allocate())
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                smem.initialise(self.parts.producers, self.form.warps)
        elif warp == 1:
            operands.schedule.prefetch()
        cute.arch.sync_threads()
        # the plan, the lengths, the indices, Q and the cache may come from the kernel before
        cute.arch.griddepcontrol_wait()
        if warp < self.form.warps:
            self.form.take_registers()
            self.parts.attend(operands, smem)
        else:
            self.form.leave_registers()
            self.parts.load(operands, smem)

    def complete(self) -> KernelDefinition:
        """Return the variant, ready to compile."""
        return self.definition(
            smem_bytes=self.parts.layout.nbytes,
            barriers=self.parts.layout.barriers(),
            named_barriers=self.form.barriers,
            roles=(Role("attend", 0, self.form.warps), Role("load", self.form.warps, self.form.loaders)),
            expected={"HMMA": self.parts.expected},
        )


def products_of_stage(d_qk: int, d_v: int) -> int:
    """Return the products of a stage in a warp's code."""
    return d_qk // K + d_v // WARPS // N * (KEYS // K)

"""The shell of the SM100 kernels over a latent: begin and end of a pair of CTAs, and which warps have which role."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Int32, cute

from ...manifest import NamedBarrier, Role
from ...spec.arch import Arch
from ..attention import cta
from ..attention.kernel import AttentionKernel, KernelAbi
from ..definition import KernelDefinition
from ..primitives.smem import SmemLayout
from .config import GROUP_WARPS, PAIR, LatentGeometrySm100, LatentSmemSm100
from .mma import LatentGemmSm100, LatentMmaRoleSm100
from .output import LatentOutputRoleSm100
from .score import NAMED_BARRIERS, LatentQueriesSm100
from .scout import PublishedSchedule, ScoutRoleSm100, readers

REGISTERS_AT_LAUNCH = 128  # of a lane, where a CTA has 512 threads


@dataclass(frozen=True)
class LatentRegistersSm100:
    """Registers of a lane in the warps of each role. None: as at launch."""

    score: int | None = None
    output: int | None = None
    producer: int | None = None
    mma: int | None = None

    def __post_init__(self) -> None:
        counts = (count or REGISTERS_AT_LAUNCH for count in (self.score, self.output, self.producer, self.mma))
        assert sum(counts) <= 512, "of a lane in four warps"


GATHER_REGISTERS = LatentRegistersSm100(152, 160, 136, 64)
TWO_GROUPS = LatentRegistersSm100(136, 160, 80, 80)  # of score warps: score and output take registers of the others


class LatentKernelSm100(AttentionKernel):
    """One variant of a kernel over a latent.

    A subclass has score_role and producer_role, and may replace the other roles. producer: the role that brings the keys, its warps.
    scouted: whether a warp finds the work tiles and the output role loads Q (scout.py). clustered: whether CTAs that multiply alone signal
    to each other.
    """

    scouted = False
    clustered = False

    registers = GATHER_REGISTERS
    producer = "gather"
    producer_warps = GROUP_WARPS
    named_barriers: tuple[NamedBarrier, ...] = NAMED_BARRIERS
    mma_role: Any = LatentMmaRoleSm100()
    gemm: Any = LatentGemmSm100
    smem_type: type[LatentSmemSm100] = LatentSmemSm100
    kv_arrivals = PAIR * GROUP_WARPS  # that fill a stage
    kv_releases: Any = 1
    queries: LatentQueriesSm100

    def __init__(self, abi: KernelAbi, arch: Arch, geometry: LatentGeometrySm100, smem: SmemLayout, has_rope: bool) -> None:
        super().__init__(abi, arch)
        self.geometry = geometry
        self.smem = smem
        self.has_rope = has_rope
        self.operand_dtype = self.dtype
        self.mma_warp = geometry.load_warp + self.producer_warps
        self.scout_warp = self.mma_warp + 1
        self.threads = 32 * GROUP_WARPS * (self.mma_warp // GROUP_WARPS + 1)  # registers are dealt out to four warps at a time

    @cute.jit
    def run(self, operands: Any):
        """Allocate, initialise the barriers, and give each role its warps."""
        smem = self.smem_type.create(self.geometry, self.smem.allocate())
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if cutlass.const_expr(self.scouted):  # noqa: SIM102  # of the DSL, which knows the one and not the other
            if warp == self.scout_warp:
                operands.schedule.prefetch()
        cta.initialise(warp, self.geometry.load_warp, self.arrivals(smem), self.tensor_maps(operands))
        tmem = cta.allocate_tmem(smem, warp, self.mma_warp, self.geometry.paired, self.clustered)
        # the plan, the lengths, Q and the cache may come from the kernel before
        cute.arch.griddepcontrol_wait()
        operands = self.prepare(operands, smem)
        if warp < self.geometry.output_warp:
            set_registers(self.registers.score)
            self.run_score(operands, smem, tmem)
        elif warp < self.geometry.load_warp:
            set_registers(self.registers.output)
            self.output_role().run(operands, smem, tmem)
        else:
            self.run_others(operands, smem, tmem, warp)
        cta.free_tmem(tmem, warp, self.mma_warp, self.geometry.paired, self.clustered)

    @cute.jit
    def run_others(self, operands: Any, smem: LatentSmemSm100, tmem: Int32, warp: Int32):
        """Give the roles producer and mma their warps."""
        if warp < self.mma_warp:
            set_registers(self.registers.producer)
            self.producer_role(smem).run(operands, smem, warp - self.geometry.load_warp)
        else:
            set_registers(self.registers.mma)
            self.run_mma(operands, smem, tmem, warp)

    @cute.jit
    def run_scout(self, operands: Any, warp: Int32):
        """Run the scout in its warp."""
        if warp == self.scout_warp:
            ScoutRoleSm100().run(operands)

    @cute.jit
    def run_mma(self, operands: Any, smem: LatentSmemSm100, tmem: Int32, warp: Int32):
        """Run the mma role in its warp, of a pair in that of the even CTA."""
        if warp == self.mma_warp and self.geometry.multiplies():
            self.mma_role.run(operands, smem, self.gemm(self.operand_dtype, self.has_rope, smem, tmem))

    # ---- what kernels have of their own -----------------------------------------------------------------------------

    def tensor_maps(self, operands: Any) -> tuple[Any, ...]:
        """Return the tensor maps to prefetch."""
        return ()

    def prepare(self, operands: Any, smem: LatentSmemSm100) -> Any:
        """Return the operands of all roles."""
        return replace(operands, schedule=PublishedSchedule(operands.schedule, smem)) if self.scouted else operands

    def run_score(self, operands: Any, smem: LatentSmemSm100, tmem: Int32) -> None:
        """Run the score role."""
        self.score_role().run(operands, smem, tmem)

    def score_role(self) -> Any:
        """Return the score role."""
        raise NotImplementedError

    def output_role(self) -> Any:
        """Return the output role."""
        return LatentOutputRoleSm100(self.dtype, self.queries if self.scouted else None)

    def producer_role(self, smem: Any) -> Any:
        """Return the role that brings the keys."""
        raise NotImplementedError

    def arrivals(self, smem: LatentSmemSm100) -> tuple[cta.Arrivals, ...]:
        """Return the arrivals of every barrier: warps of the arriving role, of both CTAs where the mma role waits, or one commit."""
        optional = tuple(barriers for barriers in (smem.reference_ready, smem.seen_ready) if barriers is not None)
        return (
            *(self.work_arrivals(smem) if self.scouted else ()),
            (GROUP_WARPS, optional),
            (self.kv_arrivals, (smem.kv_ready,)),
            (self.kv_releases, (smem.kv_free,)),
            (PAIR * GROUP_WARPS, (smem.query_ready,)),
            (1, (smem.scores_ready,)),
            (PAIR * GROUP_WARPS, (smem.scores_free,)),
            (GROUP_WARPS // 2, (smem.alpha_ready,)),
            (PAIR * GROUP_WARPS, (smem.probs_ready, smem.output_ready)),
            (self.geometry.score_groups * GROUP_WARPS, (smem.stats_ready,)),
            (GROUP_WARPS, (smem.stats_free,)),
        )

    def work_arrivals(self, smem: Any) -> tuple[cta.Arrivals, ...]:
        """Return the arrivals of the barriers of work tiles."""
        return (
            (1, (smem.work_ready,)),
            (readers(self.mma_warp, self.geometry.multiplies), (smem.work_free,)),
            (self.producer_warps, (smem.pages_asked,)),
        )

    # ---- the manifest -----------------------------------------------------------------------------------------------

    def built(self) -> KernelDefinition:
        """Return the variant, ready to compile."""
        geometry = self.geometry
        roles = (
            Role("score", 0, geometry.output_warp),
            Role("output", geometry.output_warp, GROUP_WARPS),
            Role(self.producer, geometry.load_warp, self.producer_warps),
            Role("mma", self.mma_warp, 1),
            *((Role("scout", self.scout_warp, 1),) if self.scouted else ()),
        )
        return self.definition(
            smem_bytes=self.smem.nbytes,
            barriers=self.smem.barriers(),
            named_barriers=self.named_barriers,
            roles=roles,
            expected={"UTCQMMA" if geometry.element_bytes == 1 else "UTCHMMA": geometry.products_per_tile(self.has_rope)},
            tmem_columns=cta.TMEM_COLUMNS,
        )


def set_registers(count: int | None) -> None:
    """Set the registers of a lane in the warps of a role. None: leave them."""
    if count is not None:
        (cute.arch.setmaxregister_decrease if count < REGISTERS_AT_LAUNCH else cute.arch.setmaxregister_increase)(count)

"""A barrier that thread 0 of each CTA makes, a wait on it, one that parted lanes reach, and the schedules that such kernels run under."""

from __future__ import annotations

import re

import pytest

from cute_mla.simulator import Policy
from tests.simulator.small_kernels import LAZY

ALL = [Policy.named("round_robin"), LAZY, *(Policy.named("random", seed) for seed in range(3)), Policy.named("adversarial")]
each_policy = pytest.mark.parametrize("policy", ALL)
BARRIER = """
    mov.b32 %r100, smem;
    mov.u32 %r101, %cluster_ctarank;
    setp.ne.u32 %p20, %r0, 0;
    @%p20 bra INITIALISED;
    mbarrier.init.shared.b64 [%r100], %count;
    fence.mbarrier_init.release.cluster;
INITIALISED:
    barrier.cluster.arrive;
    barrier.cluster.wait;
"""
WAIT = """
WAITING:
    mbarrier.try_wait.parity.shared.b64 %p21, [%r100], 0, 10000000;
    @!%p21 bra WAITING;
"""


def barrier(count: int) -> str:
    """Thread 0 of each CTA makes the barrier at smem+0."""
    return BARRIER.replace("%count", str(count))


PLACES = """
ld.global.u32 %r1, [%rd2]; and.b32 %r2, %r1, 1; setp.eq.u32 %p1, %r2, 0; mov.u32 %r3, smem; mad.lo.u32 %r4, %r0, 4, %r3;
xor.b32 %r5, %r4, 132; st.shared.u32 [%r4], %r1; @%p1 bra EVEN;
mul.lo.u32 %r1, %r1, 77; barrier.sync 3, COUNT; ld.shared.u32 %r6, [%r5]; add.u32 %r1, %r1, %r6; bra JOIN;
EVEN: add.u32 %r1, %r1, 5; barrier.sync 3, COUNT; ld.shared.u32 %r6, [%r5]; xor.b32 %r1, %r1, %r6;
JOIN: st.global.u32 [%rd2], %r1;
"""


def converging(text: str) -> str:
    """Turn BRA.DIV ahead of barriers into the BRA.CONV of older versions of ptxas: a converged warp jumps to the barrier."""
    lines: list[str] = []
    pending = ""
    for line in text.splitlines():
        if "BRA.DIV" in line:
            pending = f".L_c_{len(lines)}"
        elif pending and re.search(r"BAR\.(SYNC|ARV)", line):
            lines.append(f"{pending}:")
            pending = ""
        lines.append(re.sub(r"BRA\.DIV (UR\d+), `\(\S+\)", rf"BRA.CONV \1, `({pending})", line))
    return "\n".join(lines)

"""A barrier that thread 0 of each CTA makes, a wait on it, and the schedules that such kernels run under."""

from __future__ import annotations

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

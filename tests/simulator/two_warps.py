"""Programs of two warps over shared memory: stores, copies and waits to put in order."""

from __future__ import annotations

import numpy as np

from cute_mla.simulator import Policy
from tests.simulator.small_kernels import Kernel, aligned, kinds

POLICIES = [Policy.named("round_robin"), Policy.named("lazy"), Policy.named("random", 3), Policy.named("adversarial")]
SETUP = """
    mov.u32 %r1, smem; shl.b32 %r2, %r0, 2; add.u32 %r3, %r1, %r2; xor.b32 %r4, %r0, 32; shl.b32 %r4, %r4, 2; add.u32 %r4, %r4, %r1;
    setp.eq.u32 %p0, %r0, 0; setp.ge.u32 %p1, %r0, 32; setp.eq.u32 %p2, %r0, 32; ld.param.u64 %rd4, [p1]; mov.u32 %r5, %cluster_ctarank;
    xor.b32 %r6, %r5, 1; mapa.shared::cluster.u32 %r7, %r1, %r6; mapa.shared::cluster.u32 %r8, %r3, %r6;
    @%p0 mbarrier.init.shared.b64 [%r1], 1;
    @%p0 mbarrier.init.shared.b64 [%r1+8], 1;
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
"""
MINE = "st.shared.u32 [%r3+1024], %r0;\n"  # every thread its own word
THEIRS = "st.shared.u32 [%r4+1024], %r0;\n"  # the word of a thread of the other warp
LOAD = "ld.shared.u32 %r20, [%r3+1024];\n"
BAR = "bar.sync 0;\n"
PAIR = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"


def copy(barrier: int = 0, to: int = 1024) -> str:
    """Thread 0 copies 256 bytes, one word for each thread."""
    return (
        f"@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1+{barrier}], 256;\n@%p0 cp.async.bulk.shared::cluster.global"
        f".mbarrier::complete_tx::bytes [%r1+{to}], [%rd4], 256, [%r1+{barrier}];\n"
    )


def wait(name: str, barrier: int = 0, parity: int = 0) -> str:
    """Everybody waits."""
    return f"{name}: mbarrier.try_wait.parity.shared.b64 %p9, [%r1+{barrier}], {parity}, 10000;\n@!%p9 bra {name};\n"


def findings(program: str, policy: Policy, ctas: int = 1) -> set[str]:
    """Return the kinds of findings of 64 threads."""
    source = aligned(1024, np.uint8)
    kernel = Kernel(SETUP + program, threads=64, smem=4096, grid=ctas, cluster=ctas)
    return kinds(kernel.run(aligned(256, np.uint32), source, policy=policy))


CP_ASYNC = "shl.b32 %r9, %r0, 4; add.u32 %r9, %r9, %r1; cp.async.cg.shared.global [%r9+1024], [%rd4], 16;\n"

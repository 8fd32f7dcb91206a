"""A kernel with two wgmma products, whose operands come by bulk copies."""

from __future__ import annotations

import numpy as np

from cute_mla.simulator import Policy, Report
from tests.simulator.small_kernels import Kernel, aligned

A_BYTES, B_BYTES = 64 * 16 * 2, 8 * 16 * 2

BODY = """
    mov.b32 %r100, smem;
    setp.ne.u32 %p20, %r0, 0;
    @%p20 bra INITIALISED;
    mbarrier.init.shared.b64 [%r100], 1;
INITIALISED:
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
    @%p20 bra LOADED;
    mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r100], 2304;
    ld.param.u64 %rd10, [p1];
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r100+1024], [%rd10], 2048, [%r100];
    add.s64 %rd10, %rd10, 2048;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r100+3072], [%rd10], 256, [%r100];
LOADED:
WAITING:
    mbarrier.try_wait.parity.shared.b64 %p21, [%r100], 0, 10000000;
    @!%p21 bra WAITING;
    add.u32 %r101, %r100, 1024;
    shr.u32 %r101, %r101, 4;
    cvt.u64.u32 %rd11, %r101;
    or.b64 %rd11, %rd11, 0x0000001000080000;
    add.s64 %rd12, %rd11, 128;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r10, %r11, %r12, %r13}, %rd11, %rd12, 0, 1, 1, 0, 0;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r10, %r11, %r12, %r13}, %rd11, %rd12, 1, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    mul.wide.u32 %rd3, %r0, 16;
    add.s64 %rd3, %rd0, %rd3;
    st.global.v4.b32 [%rd3], {%r10, %r11, %r12, %r13};
"""


def cores(matrix: np.ndarray) -> np.ndarray:
    """Return a K-major operand without swizzle: 8x8 core matrices of 128 bytes, along k first."""
    rows = matrix.shape[0]
    return np.ascontiguousarray(matrix.reshape(rows // 8, 8, 2, 8).transpose(0, 2, 1, 3)).reshape(-1)


def run(body: str, policy: Policy) -> tuple[Report, np.ndarray, np.ndarray]:
    """Run on small random integers; returns the report, D and twice the product."""
    rng = np.random.default_rng(1)
    a = rng.integers(-4, 5, (64, 16)).astype(np.float16)
    b = rng.integers(-4, 5, (8, 16)).astype(np.float16)
    source = aligned((A_BYTES + B_BYTES) // 2, np.float16)
    source[:] = np.concatenate([cores(a), cores(b)])
    out = aligned(128 * 4, np.float32)
    report = Kernel(body, threads=128, smem=4096).run(out, source, policy=policy)
    thread = np.arange(128)[:, None]
    register = np.arange(4)[None, :]
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register // 2)
    column = 2 * (thread % 4) + register % 2
    d = np.zeros((64, 8), np.float32)
    d[row, column] = out.reshape(128, 4)
    return report, d, 2 * a.astype(np.float32) @ b.astype(np.float32).T

"""A TMA store that all 32 lanes of a warp issue."""

from __future__ import annotations

import numpy as np

from cute_mla.simulator import Policy, TensorMap
from tests.simulator.small_kernels import Kernel, aligned, kinds

STORE = """
    .reg .b32 %s<4>;
    .reg .b64 %sd<4>;
    mov.b32 %s0, smem;
    shl.b32 %s1, %r0, 2;
    add.s32 %s1, %s1, %s0;
    add.s32 %s2, %r0, 1;
    st.shared.b32 [%s1], %s2;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    mov.b64 %sd0, p1;
    cvta.param.u64 %sd1, %sd0;
    mov.b32 %s3, 0;
    OPCODE [%sd1, {%s3, %s3}], [%s0];
    cp.async.bulk.commit_group;
    WAIT
"""
PLAIN = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
ADD = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"
WAIT = "cp.async.bulk.wait_group.read 0;"


def store(opcode: str, policy: Policy | None, wait: str = WAIT) -> tuple[np.ndarray, set[str]]:
    """Store 4 rows of 8 numbers from 32 threads; the output and the kinds of findings."""
    out = aligned(32, np.int32)
    described = TensorMap("i32", out.ctypes.data, (8, 4), (32,), (8, 4))
    report = Kernel(STORE.replace("OPCODE", opcode).replace("WAIT", wait), smem=1024).run(out, described, policy=policy)
    return out, kinds(report)

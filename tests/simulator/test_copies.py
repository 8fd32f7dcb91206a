"""Matrix moves and asynchronous copies, under schedules that complete them early, late and at random."""

from __future__ import annotations

import numpy as np
import pytest

from cute_mla.simulator import Policy
from cute_mla.spec.tensor_map import Swizzle, TensorMap
from tests.simulator.small_kernels import LAZY, Kernel, aligned, kinds

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


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_matrices_go_to_shared_memory_and_back(trans: str) -> None:
    body = f"""
        mov.b32 %r1, smem;
        shl.b32 %r2, %r0, 4;
        add.u32 %r2, %r2, %r1;
        shl.b32 %r3, %r0, 8;
        add.u32 %r4, %r3, 1;
        add.u32 %r5, %r3, 2;
        add.u32 %r6, %r3, 3;
        stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r2], {{%r3, %r4, %r5, %r6}};
        bar.warp.sync -1;
        ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r7, %r8, %r9, %r10}}, [%r2];
        mul.wide.u32 %rd3, %r0, 16;
        add.s64 %rd3, %rd0, %rd3;
        st.global.v4.b32 [%rd3], {{%r7, %r8, %r9, %r10}};
    """
    out = aligned(128, np.uint32)
    assert Kernel(body, smem=512).run(out).ok
    assert out.tolist() == [256 * lane + part for lane in range(32) for part in range(4)]


def test_ldmatrix_of_unwritten_rows_is_poison() -> None:
    body = """
        mov.b32 %r1, smem;
        shl.b32 %r2, %r0, 4;
        add.u32 %r2, %r2, %r1;
        setp.ne.u32 %p1, %r0, 5;
        @%p1 st.shared.v4.u32 [%r2], {%r0, %r0, %r0, %r0};
        bar.warp.sync -1;
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r3}, [%r2];
        shr.u32 %r4, %r0, 2;
        setp.eq.u32 %p2, %r4, ROW;
        selp.b32 %r5, 0, %r3, %p2;
        st.global.u32 [%rd2], %r5;
    """
    out = np.zeros(32, np.uint32)
    assert Kernel(body.replace("ROW", "5"), smem=512).run(out).ok
    assert kinds(Kernel(body.replace("ROW", "4"), smem=512).run(out)) == {"poison"}


CP_ASYNC = """
    mov.b32 %r1, smem;
    shl.b32 %r2, %r0, 4;
    add.u32 %r2, %r2, %r1;
    ld.param.u64 %rd3, [p1];
    mul.wide.u32 %rd4, %r0, 16;
    add.s64 %rd3, %rd3, %rd4;
    mov.u32 %r3, 16;
    setp.eq.u32 %p1, %r0, 3;
    @%p1 mov.u32 %r3, 4;
    cp.async.cg.shared.global [%r2], [%rd3], 16, %r3;
    cp.async.commit_group;
    %wait
    ld.shared.v4.u32 {%r4, %r5, %r6, %r7}, [%r2];
    add.s64 %rd5, %rd0, %rd4;
    st.global.v4.u32 [%rd5], {%r4, %r5, %r6, %r7};
"""


@each_policy
def test_cp_async(policy: Policy) -> None:
    source, out = aligned(128, np.uint32), aligned(128, np.uint32)
    source[:] = np.arange(128) + 1
    assert Kernel(CP_ASYNC.replace("%wait", "cp.async.wait_group 0;"), smem=512).run(out, source, policy=policy).ok
    expected = source.copy()
    expected[13:16] = 0
    assert out.tolist() == expected.tolist()
    if policy.async_mode == "lazy":
        for wait in ("", "cp.async.wait_group 1;"):
            assert kinds(Kernel(CP_ASYNC.replace("%wait", wait), smem=512).run(out, source, policy=policy)) == {"poison"}


@each_policy
def test_cp_async_arrives_on_an_mbarrier(policy: Policy) -> None:
    arrive = "cp.async.mbarrier.arrive.noinc.shared.b64 [%r100];" + WAIT
    body = barrier(32) + CP_ASYNC.replace("mov.b32 %r1, smem;", "add.u32 %r1, %r100, 64;").replace("%wait", arrive)
    source, out = aligned(128, np.uint32), aligned(128, np.uint32)
    source[:] = np.arange(128) + 1
    assert Kernel(body, smem=1024).run(out, source, policy=policy).ok
    assert out[0] == 1
    assert kinds(Kernel(body.replace("b64 [%r100], 32", "b64 [%r100], 33"), smem=1024).run(out, source, policy=policy)) == {"deadlock"}


PEER = """
    shl.b32 %r1, %r0, 2;
    add.u32 %r1, %r1, %r100;
    mad.lo.u32 %r2, %r101, 1000, %r0;
    st.shared.u32 [%r1+256], %r2;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    xor.b32 %r3, %r101, 1;
    mapa.shared::cluster.u32 %r4, %r100, %r3;
    @%p20 bra SENT;
    mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r100], 128;
    add.u32 %r5, %r4, 512;
    add.u32 %r6, %r100, 256;
    cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r5], [%r6], 128, [%r4];
SENT:
"""
READ = """
    ld.shared.u32 %r7, [%r1+512];
    mad.lo.u32 %r8, %r101, 32, %r0;
    mul.wide.u32 %rd3, %r8, 4;
    add.s64 %rd3, %rd0, %rd3;
    st.global.u32 [%rd3], %r7;
    barrier.cluster.arrive;
    barrier.cluster.wait;
"""


@each_policy
def test_bulk_copy_to_the_peer(policy: Policy) -> None:
    out = np.zeros(64, np.uint32)
    assert Kernel(barrier(1) + PEER + WAIT + READ, smem=1024, grid=2, cluster=2).run(out, policy=policy).ok
    assert out.tolist() == [1000 + lane for lane in range(32)] + list(range(32))


@each_policy
def test_st_async(policy: Policy) -> None:
    send = PEER[: PEER.index("    add.u32 %r5, %r4, 512;")] + "SENT:\n"
    send += "shl.b32 %r5, %r0, 2;\nadd.u32 %r5, %r5, %r4;\nadd.u32 %r5, %r5, 512;\n"
    send += "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r5], %r2, [%r4];\n"
    out = np.zeros(64, np.uint32)
    assert Kernel(barrier(1) + send + WAIT + READ, smem=1024, grid=2, cluster=2).run(out, policy=policy).ok
    assert out.tolist() == [1000 + lane for lane in range(32)] + list(range(32))


MULTICAST = """
    @%p20 bra LOADED;
    mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r100], 1024;
    shl.b32 %r1, %r101, 9;
    add.u32 %r1, %r1, %r100;
    shl.b32 %r2, %r101, 2;
    mov.u32 %r3, 0;
    mov.b64 %rd3, p1;
    cvta.param.u64 %rd4, %rd3;
    mov.b16 %h1, 3;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
        [%r1+1024], [%rd4, {%r3, %r2}], [%r100], %h1;
LOADED:
"""


@each_policy
def test_multicast_load(policy: Policy) -> None:
    """Each CTA loads 4 rows of 32 floats into both; all threads read the 8 rows."""
    source, out = aligned(32 * 8, np.float32), np.zeros(512, np.float32)
    source[:] = np.arange(256)
    tensor_map = TensorMap("fp32", source.ctypes.data, (32, 8), (128,), (32, 4), Swizzle.NONE)
    read = """
        shl.b32 %r4, %r0, 2;
        add.u32 %r4, %r4, %r100;
        ld.shared.u32 %r5, [%r4+1024];
        mad.lo.u32 %r6, %r101, 256, %r0;
        mul.wide.u32 %rd5, %r6, 4;
        add.s64 %rd5, %rd0, %rd5;
        st.global.u32 [%rd5], %r5;
        barrier.cluster.arrive;
        barrier.cluster.wait;
    """
    kernel = Kernel(barrier(1) + MULTICAST + WAIT + read, smem=4096, grid=2, cluster=2, threads=256)
    assert kernel.run(out, tensor_map, source, policy=policy).ok
    assert out.tolist() == [float(index % 256) for index in range(512)]
    wrong = Kernel(kernel.body.replace("mov.b16 %h1, 3;", "mov.b16 %h1, 1;"), smem=4096, grid=2, cluster=2, threads=256)
    assert not wrong.run(out, tensor_map, source, policy=policy).ok


def test_store_adds_to_global_memory() -> None:
    out = aligned(32, np.float32)
    out[:] = 100
    tensor_map = TensorMap("fp32", out.ctypes.data, (32, 1), (128,), (32, 1))
    body = """
        mov.b32 %r100, smem;
        shl.b32 %r1, %r0, 2;
        add.u32 %r1, %r1, %r100;
        cvt.rn.f32.u32 %f1, %r0;
        st.shared.f32 [%r1], %f1;
        fence.proxy.async.shared::cta;
        bar.sync 0;
        setp.ne.u32 %p1, %r0, 0;
        @%p1 bra OUT;
        mov.b64 %rd3, p1;
        cvta.param.u64 %rd4, %rd3;
        mov.u32 %r3, 0;
        cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%rd4, {%r3, %r3}], [%r100];
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
    OUT:
    """
    for policy in ALL:
        out[:] = 100
        assert Kernel(body, smem=1024).run(np.zeros(1, np.uint32), tensor_map, out, policy=policy).ok
        assert out.tolist() == [100.0 + lane for lane in range(32)]

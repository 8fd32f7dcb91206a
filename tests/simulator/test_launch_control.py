"""Cluster launch control: a persistent kernel that asks for further clusters, under all schedules."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import pytest

from cute_mla.simulator import GlobalMemory, Launch, Names, Policy, run
from tests.simulator import small_kernels
from tests.simulator.assembled import Evidence, as_machine_code, check_machine_code
from tests.simulator.barrier_kernels import ALL, barrier, each_policy
from tests.simulator.small_kernels import LAZY, Kernel, aligned, kinds

# every CTA counts the work of its own cluster and of those it cancels: out[ctaid] += 1 + its rank
LOOP = """
    mov.u32 %r30, %ctaid.x;
    mov.u32 %r31, 0;
    setp.ne.u32 %p22, %r101, 0;
AGAIN:
    @%p20 bra WAITING;
    mul.wide.u32 %rd3, %r30, 4;
    add.s64 %rd3, %rd0, %rd3;
    add.u32 %r32, %r101, 1;
    atom.global.add.u32 %r33, [%rd3], %r32;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r100], 16;
    ASK
WAITING:
    mbarrier.try_wait.parity.shared.b64 %p21, [%r100], %r31, 10000000;
    @!%p21 bra WAITING;
    xor.b32 %r31, %r31, 1;
    ld.shared.v2.b64 {%rd20, %rd21}, [%r100+16];
    SYNC
    {
    .reg .b128 %response;
    mov.b128 %response, {%rd20, %rd21};
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p23, %response;
    QUERY
    }
    @%p23 bra AGAIN;
    barrier.cluster.arrive;
    barrier.cluster.wait;
"""
WAITING = "mbarrier.try_wait.parity.shared.b64 %p21, [%r100], %r31, 10000000;"
TRY = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
ASK = f"{TRY}.b128 [%r100+16], [%r100];"
X = "clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r30, %response;\nadd.u32 %r30, %r30, %r101;"
ALL_AXES = """
    clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r30, %r34, %r35, _}, %response;
    @%p23 add.u32 %r30, %r30, %r34;
    @%p23 add.u32 %r30, %r30, %r35;
"""


def kernel(ask: str = ASK, query: str = X, cluster: int = 1, grid: int = 12, sync: str = "bar.sync 0;") -> Kernel:
    """Return the persistent kernel."""
    body = LOOP.replace("ASK", ask).replace("QUERY", query).replace("SYNC", sync)
    return Kernel(barrier(1) + body, smem=64, grid=grid, cluster=cluster, threads=64)


CLUSTER_SYNC = "barrier.cluster.arrive;\nbarrier.cluster.wait;"


@each_policy
@pytest.mark.parametrize("query", [X, ALL_AXES])
def test_all_work_is_done_once(policy: Policy, query: str) -> None:
    out = aligned(12, np.uint32)
    assert kernel(query=query).run(out, policy=policy).ok
    assert out.tolist() == [1] * 12


@each_policy
def test_a_response_for_the_whole_cluster(policy: Policy) -> None:
    """One CTA asks; the response and its 16 bytes reach both."""
    out = aligned(12, np.uint32)
    ask = f"@%p22 bra WAITING;\n{TRY}.multicast::cluster::all.b128 [%r100+16], [%r100];"
    assert kernel(ask, cluster=2, sync=CLUSTER_SYNC).run(out, policy=policy).ok
    assert out.tolist() == [1, 2] * 6
    alone = ask.replace(".multicast::cluster::all", "")
    assert "deadlock" in kinds(kernel(alone, cluster=2, sync=CLUSTER_SYNC).run(out, policy=policy))


def test_random_schedules_start_other_clusters_too() -> None:
    """Then some work is done by its own cluster: the number of cancelled ones differs from run to run."""
    body = LOOP.replace("ASK", ASK).replace("QUERY", X + "\n@%p23 add.u32 %r36, %r36, 1;").replace("SYNC", "bar.sync 0;")
    body = "mov.u32 %r36, 0;\n" + body + "@%p20 bra OUT;\nld.param.u64 %rd4, [p1];\natom.global.add.u32 %r33, [%rd4], %r36;\nOUT:"
    counts = set()
    for seed in range(8):
        out, cancelled = aligned(12, np.uint32), aligned(1, np.uint32)
        launch = Kernel(barrier(1) + body, smem=64, grid=12, threads=64)
        assert launch.run(out, cancelled, policy=Policy.named("random", seed)).ok
        assert out.tolist() == [1] * 12
        counts.add(int(cancelled[0]))
    assert len(counts) > 1


@each_policy
def test_no_try_after_a_failure_was_seen(policy: Policy) -> None:
    again = "mov.u32 %r30, 0;\nadd.u32 %r38, %r38, 1;\nsetp.lt.u32 %p24, %r38, 4;\n@%p24 bra AGAIN;"
    body = "mov.u32 %r38, 0;\n" + kernel().body.replace("@%p23 bra AGAIN;", again)
    assert kinds(Kernel(body, smem=64, grid=2, threads=64).run(aligned(16, np.uint32), policy=policy)) == {"undefined"}


@each_policy
def test_the_first_cta_of_a_failed_response_is_undefined(policy: Policy) -> None:
    """A poisoned response may be moved, but not stored."""
    body = kernel(grid=1).body + "st.global.u32 [%rd0], %r30;"
    assert kinds(Kernel(body, smem=64, threads=64).run(aligned(16, np.uint32), policy=policy)) == {"poison"}


@each_policy
def test_a_response_must_be_waited_for(policy: Policy) -> None:
    hasty = kernel().body.replace("@!%p21 bra WAITING;", "").replace(WAITING, "")
    found = kinds(Kernel(hasty, smem=64, grid=12, threads=64).run(aligned(12, np.uint32), policy=policy))
    if policy.async_mode == "lazy":
        assert "poison" in found


def test_misuse() -> None:
    out = aligned(12, np.uint32)
    assert kinds(kernel(ASK.replace("100+16", "100+24")).run(out)) == {"misaligned"}
    assert kinds(kernel(ASK.replace("100+16", "100+64")).run(out)) == {"out_of_bounds"}
    assert kinds(kernel(ASK.replace("[%r100];", "[%r100+8];")).run(out)) == {"barrier_uninitialised"}
    peer = "mapa.shared::cluster.u32 %r37, %r100, 1;\n" + ASK.replace("[%r100+16]", "[%r37+16]")
    assert kinds(kernel(peer, cluster=2, sync=CLUSTER_SYNC).run(out)) == {"out_of_bounds"}
    short = kernel().body.replace("expect_tx.shared.b64 _, [%r100], 16", "expect_tx.shared.b64 _, [%r100], 32")
    assert kinds(Kernel(short, smem=64, grid=12, threads=64).run(out)) == {"deadlock"}


# ---------------------------------------------------------------- machine code

MACHINE_CODE: dict[str, Evidence] = {
    **{f"alone, {policy.schedule} {policy.seed}": (partial(test_all_work_is_done_once, policy, ALL_AXES), "UGETNEXTWORKID.SELFCAST")
       for policy in ALL},
    **{f"cluster, {policy.schedule} {policy.seed}": (partial(test_a_response_for_the_whole_cluster, policy), "UGETNEXTWORKID.BROADCAST")
       for policy in ALL},
    "other clusters": (test_random_schedules_start_other_clusters_too, "UGETNEXTWORKID.SELFCAST"),
    "undefined": (partial(test_the_first_cta_of_a_failed_response_is_undefined, LAZY), "UGETNEXTWORKID.SELFCAST"),
    "no wait": (partial(test_a_response_must_be_waited_for, LAZY), "UGETNEXTWORKID.SELFCAST"),
    "misuse": (test_misuse, "UGETNEXTWORKID.SELFCAST"),
}  # fmt: skip


@pytest.mark.parametrize("name", MACHINE_CODE)
def test_as_machine_code(name: str) -> None:
    check_machine_code(*MACHINE_CODE[name])


GRID = """
@%p20 bra OUT; mbarrier.arrive.expect_tx.shared.b64 _, [%r100], 16; ASK
WAITING: mbarrier.try_wait.parity.shared.b64 %p21, [%r100], 0, 10000000; @!%p21 bra WAITING;
ld.shared.v2.b64 {%rd20, %rd21}, [%r100+16];
{ .reg .b128 %response; mov.b128 %response, {%rd20, %rd21}; clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p23, %response;
clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r30, %r34, %r35, _}, %response; }
mov.u32 %r36, %ctaid.x; mov.u32 %r37, %ctaid.y; mov.u32 %r38, %ctaid.z; mad.lo.u32 %r39, %r38, 3, %r37; mad.lo.u32 %r39, %r39, 5, %r36;
mul.wide.u32 %rd3, %r39, 16; add.s64 %rd3, %rd0, %rd3; selp.u32 %r40, 1, 0, %p23; st.global.u32 [%rd3+12], %r40; @!%p23 bra OUT;
st.global.u32 [%rd3], %r30; st.global.u32 [%rd3+4], %r34; st.global.u32 [%rd3+8], %r35;
OUT:
"""


@pytest.mark.parametrize("as_code", [nullcontext, as_machine_code], ids=["PTX", "machine code"])
def test_a_response_has_three_axes(as_code: Callable[[], AbstractContextManager[object]]) -> None:
    """Each cluster of 5 x 3 x 2 that runs asks once: those that it cancels are others, each one once."""
    out = aligned(30 * 4, np.uint32)
    text = Kernel(barrier(1) + GRID.replace("ASK", ASK), 64, 64).text([out])
    memory = GlobalMemory()
    memory.add("out", out.ctypes.data, out.nbytes)
    with as_code():
        launch = Launch(
            small_kernels.load_module(text), "k", (5, 3, 2), (64, 1, 1), (1, 1, 1), 64, [struct.pack("<Q", out.ctypes.data)], Names()
        )
        assert run(launch, memory, LAZY).ok
    found = out.reshape(30, 4)
    taken = {tuple(row[:3].tolist()) for row in found if row[3]}
    assert len(taken) == int(found[:, 3].sum()) == 15
    assert all(x < 5 and y < 3 and z < 2 for x, y, z in taken)
    assert not any(found[x + 5 * y + 15 * z].any() for x, y, z in taken)

"""mbarrier operations on another CTA's barrier, in all spellings, under all schedules."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import pytest

from cute_mla.simulator import Policy, UnsupportedInstruction, load_module
from tests.simulator.assembled import check_opcodes
from tests.simulator.barrier_kernels import WAIT, barrier, each_policy
from tests.simulator.small_kernels import Kernel, kinds

# the odd CTA writes to the even one's shared memory and arrives at its mbarrier; the even CTA waits and stores what it got
SEND = """
    and.b32 %r102, %r100, 0xFEFFFFFF;
    mapa.shared::cluster.u32 %r103, %r100, 0;
    setp.eq.u32 %p22, %r101, 0;
    shl.b32 %r1, %r0, 2;
    @%p22 bra RECEIVE;
    add.u32 %r2, %r1, %r103;
    add.u32 %r3, %r0, 77;
    st.shared::cluster.u32 [%r2+64], %r3;
    ARRIVE
    bra.uni LEAVE;
RECEIVE:
"""
RECEIVE = """
    add.u32 %r1, %r1, %r100;
    ld.shared.u32 %r4, [%r1+64];
    st.global.u32 [%rd2], %r4;
LEAVE:
"""
END = "barrier.cluster.arrive;\nbarrier.cluster.wait;"


def kernel(arrive: str, count: int, end: str = END) -> Kernel:
    """Return two CTAs of 32 threads."""
    return Kernel(barrier(count) + SEND.replace("ARRIVE", arrive) + WAIT + RECEIVE + end, smem=1024, grid=2, cluster=2)


ARRIVALS = [
    (f"mbarrier.arrive{order}.shared::cluster.b64 _, [{address}]{number};", count)
    for order in ("", ".release.cluster", ".relaxed.cluster")
    for address, (number, count) in (("%r102", ("", 32)), ("%r103", (", 3", 96)))
]


@each_policy
@pytest.mark.parametrize(("arrive", "count"), ARRIVALS)
def test_arrivals_at_the_peer(policy: Policy, arrive: str, count: int) -> None:
    out = np.zeros(32, np.uint32)
    assert kernel(arrive, count).run(out, policy=policy).ok
    assert out.tolist() == list(range(77, 109))
    assert "deadlock" in kinds(kernel(arrive, count + 1).run(out, policy=policy))
    assert "deadlock" in kinds(kernel(arrive.replace("%r102", "%r100").replace("%r103", "%r100"), count).run(out, policy=policy))


EXPECTING = """
    add.u32 %r6, %r2, 64;
    {expect}
    st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r6], %r3, [%r103];
"""


@each_policy
@pytest.mark.parametrize("order", ["", ".release.cluster", ".relaxed.cluster"])
def test_bytes_expected_at_the_peer(policy: Policy, order: str) -> None:
    """Each thread arrives there with the 4 bytes that it then sends."""
    out = np.zeros(32, np.uint32)
    expect = f"mbarrier.arrive.expect_tx{order}.shared::cluster.b64 _, [%r103], 4;"
    send = EXPECTING.format(expect=expect)
    assert kernel(send, 32).run(out, policy=policy).ok
    assert out.tolist() == list(range(77, 109))
    assert "deadlock" in kinds(kernel(send.replace("], 4;", "], 8;"), 32).run(out, policy=policy))
    later = f"mbarrier.expect_tx{order.replace('release', 'relaxed')}.shared::cluster.b64 [%r103], 4;"
    later += "\nmbarrier.arrive.shared::cluster.b64 _, [%r103];"
    assert kernel(EXPECTING.format(expect=later), 32).run(out, policy=policy).ok


BYTES = """
    and.b32 %r2, %r101, 1; xor.b32 %r1, %r2, 1; mapa.shared::cluster.u32 %r103, %r100, %r1;
    @%p20 bra AHEAD; mbarrier.arrive.expect_tx.shared.b64 _, [%r100], 64;
AHEAD: barrier.cluster.arrive; barrier.cluster.wait; setp.ne.u32 %p24, %r0, 1; @%p24 bra AWAIT;
    mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r100], OWN; mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%r103], 16;
AWAIT:
"""


@each_policy
@pytest.mark.parametrize("as_code", [nullcontext, partial(check_opcodes, "SYNCS.ARRIVE.TRANS64.RED.A0TX")], ids=["PTX", "machine code"])
def test_bytes_that_no_copy_brings(policy: Policy, as_code: Callable[[], AbstractContextManager[object]]) -> None:
    """Each CTA completes 48 bytes of its own barrier and 16 of the peer's, which arrive nowhere."""
    out = np.zeros(32, np.uint32)
    for own, found in (("48", set()), ("32", {"deadlock"}), ("2097152", {"barrier_tx"})):
        body = barrier(1) + BYTES.replace("OWN", own) + WAIT + END
        with as_code():
            assert kinds(Kernel(body, smem=1024, grid=2, cluster=2).run(out, policy=policy)) == found


@each_policy
def test_what_does_not_reach_the_peer(policy: Policy) -> None:
    out = np.zeros(32, np.uint32)
    for space in ("shared", "shared::cta"):
        arrive = f"mbarrier.arrive.{space}.b64 _, [%r102];"
        assert kinds(kernel(arrive, 32).run(out, policy=policy)) == {"out_of_bounds"}
    far = "mapa.shared::cluster.u32 %r103, %r100, 2;\nmbarrier.arrive.shared::cluster.b64 _, [%r103];"
    assert kinds(kernel(far, 32).run(out, policy=policy)) == {"out_of_bounds"}
    with pytest.raises(UnsupportedInstruction, match="returns no state"):
        kernel("mbarrier.arrive.shared::cluster.b64 %rd9, [%r103];", 32).run(out)


def test_an_arrival_at_a_cta_that_has_exited() -> None:
    """The even CTA wakes the odd one and is gone when that one answers."""
    body = """
        setp.eq.u32 %p22, %r101, 0;
        xor.b32 %r1, %r101, 1;
        mapa.shared::cluster.u32 %r103, %r100, %r1;
        @%p22 bra ANSWER;
    """
    body = barrier(32) + body + WAIT + "ANSWER:\nmbarrier.arrive.shared::cluster.b64 _, [%r103];\n"
    for schedule in ("round_robin", "lazy", "adversarial"):
        out = np.zeros(32, np.uint32)
        policy = Policy.named(schedule)
        assert kinds(Kernel(body, smem=1024, grid=2, cluster=2).run(out, policy=policy)) == {"exited_cta"}
        assert Kernel(body + END, smem=1024, grid=2, cluster=2).run(out, policy=policy).ok


@pytest.mark.parametrize("target", ["sm_90a", "sm_100", "sm_100a", "sm_100f", "sm_103a", "sm_100f, debug"])
def test_module_headers(target: str) -> None:
    directives = ".reqntid 128, 1, 1\n.maxntid 128\n.minnctapersm 1\n.blocksareclusters\n.explicitcluster\n.reqnctapercluster 2, 1, 1\n"
    body = '{\n.pragma "nounroll";\nret;\n}\n'
    text = f".version 9.4\n.target {target}\n.address_size 64\n.visible .entry k(.param .u64 p0)\n{directives}.maxclusterrank 8\n{body}"
    entry = load_module(text).entries["k"]
    assert entry.reqntid == (128, 1, 1)
    assert entry.params[0].size == 8

"""Stores and copies over bytes that something else writes or reads: planted once each, beside the kernel that is right."""

from __future__ import annotations

import numpy as np
import pytest

from cute_mla.simulator import Policy
from tests.simulator.small_kernels import Kernel, aligned, kinds
from tests.simulator.two_warps import BAR, CP_ASYNC, LOAD, MINE, PAIR, POLICIES, THEIRS, copy, findings, wait
from tests.simulator.wgmma_kernel import A_BYTES, B_BYTES
from tests.simulator.wgmma_kernel import BODY as PRODUCT

each_policy = pytest.mark.parametrize("policy", POLICIES)


@each_policy
@pytest.mark.parametrize(
    ("program", "kind"),
    [
        (MINE + THEIRS, "race"),
        (MINE + "@%p1 add.u32 %r9, %r0, 1;\n@!%p1 mov.u32 %r9, %r0;\n" + THEIRS.replace("%r0;", "%r9;"), "race"),
        (copy() + MINE + wait("W"), "missing_wait"),
        (MINE + copy() + wait("W"), "race"),
        (copy() + copy(8) + wait("W") + wait("V", 8), "missing_wait"),
        (copy() + copy(8, 2048) + wait("V", 8) + LOAD + BAR + wait("W"), "missing_wait"),
    ],
    ids=["store, store", "store, other store", "copy, store", "store, copy", "copy, copy", "another copy's barrier"],
)
def test_unordered(program: str, kind: str, policy: Policy) -> None:
    """A schedule that swaps the two accesses reports the other one."""
    found = findings(program, policy)
    assert kind in found or (policy.splits_convoys and found == {"race"})


@each_policy
@pytest.mark.parametrize(
    "program",
    [
        MINE + BAR + THEIRS,
        "st.shared.u32 [%r1+1024], 7;\n",
        copy() + wait("W") + MINE,
        MINE + BAR + copy() + wait("W"),
        copy() + wait("W") + BAR + copy(8) + wait("V", 8),
        copy() + copy(8, 2048) + wait("W") + wait("V", 8) + LOAD,
    ],
    ids=["store, store", "the same value", "copy, store", "store, copy", "copy, copy", "both barriers"],
)
def test_ordered(program: str, policy: Policy) -> None:
    assert not findings(program, policy)


@each_policy
def test_stores_of_bytes(policy: Policy) -> None:
    """Warps may share a word as long as they do not share its bytes."""
    place = "shl.b32 %r9, %r0, 1; and.b32 %r9, %r9, 63; add.u32 %r9, %r9, %r1;\n@%p1 add.u32 %r9, %r9, 1;\n"
    store = "st.shared.u8 [%r9+1024], %r0;\nld.shared.u8 %r10, [%r9+1024];\n"
    assert not findings(place + store, policy)
    if policy.splits_convoys:  # in a convoy, one instruction stores for both
        assert findings(place.replace("@%p1 add.u32 %r9, %r9, 1;", "") + store, policy) == {"race"}


LOAD_COPIED = "ld.shared.u32 %r10, [%r9+1024];\n"


@each_policy
@pytest.mark.parametrize(
    ("program", "kind"),
    [
        (CP_ASYNC + LOAD_COPIED + "cp.async.wait_all;\n", "missing_wait"),
        (CP_ASYNC + "cp.async.commit_group;\ncp.async.wait_group 1;\n" + LOAD_COPIED + "cp.async.wait_all;\n", "missing_wait"),
        (CP_ASYNC + BAR + LOAD + "cp.async.wait_all;\n", "missing_wait"),
        (CP_ASYNC + "st.shared.u32 [%r9+1024], %r0;\ncp.async.wait_all;\n", "missing_wait"),
        ("xor.b32 %r9, %r0, 32; shl.b32 %r9, %r9, 4; add.u32 %r9, %r9, %r1;\n" + LOAD_COPIED + CP_ASYNC + "cp.async.wait_all;\n", "race"),
    ],
    ids=["no wait", "too loose a wait", "another warp", "store", "load before"],
)
def test_cp_async_without_a_wait(program: str, kind: str, policy: Policy) -> None:
    assert kind in findings(program, policy)


@each_policy
def test_cp_async_with_a_wait(policy: Policy) -> None:
    load = LOAD_COPIED
    assert not findings(CP_ASYNC + "cp.async.wait_all;\n" + load + BAR + LOAD, policy)
    assert not findings(CP_ASYNC + "cp.async.commit_group;\ncp.async.wait_group 0;\n" + load, policy)
    arrive = "@%p0 mbarrier.init.shared.b64 [%r1+16], 64;\nbar.sync 0;\ncp.async.mbarrier.arrive.noinc.shared.b64 [%r1+16];\n"
    program = CP_ASYNC + arrive + wait("W", 16) + load + LOAD
    assert not findings(program, policy)


@each_policy
def test_source_of_a_bulk_store_that_another_warp_has_waited_for(policy: Policy) -> None:
    store = "@%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r1+1024], 256;\n@%p0 cp.async.bulk.commit_group;\n"
    program = MINE + "fence.proxy.async.shared::cta;\n" + BAR + store + "@%p0 cp.async.bulk.wait_group.read 0;\n"
    assert not findings(program + BAR + THEIRS, policy)
    assert findings(program + THEIRS, policy) & {"race", "missing_wait"}


@each_policy
def test_operands_of_a_product_that_another_warpgroup_has_waited_for(policy: Policy) -> None:
    """A fifth warp overwrites an operand, with and without a barrier behind the warpgroup's wait."""
    work, store = PRODUCT.index("    add.u32 %r101"), PRODUCT.index("    mul.wide.u32 %rd3")
    store_a = "st.shared.u32 [%r100+1024], 0;\n"
    source = aligned((A_BYTES + B_BYTES) // 2, np.float16)
    for barrier, kind in (("bar.sync 1, 160;\n", set()), ("", {"race"} if policy.schedule == "random" else {"missing_wait"})):
        body = PRODUCT[:work] + "setp.ge.u32 %p22, %r0, 128;\n@%p22 bra OTHER;\n" + PRODUCT[work:store] + barrier + "bra END;\n"
        body += "OTHER:\n" + barrier + store_a + "END:\n"
        assert kinds(Kernel(body, threads=160, smem=4096).run(aligned(512, np.float32), source, policy=policy)) == kind


@each_policy
def test_loads_of_the_peer_that_are_overwritten(policy: Policy) -> None:
    program = MINE + PAIR + "ld.shared::cluster.u32 %r10, [%r8+1024];\n"
    again = "add.u32 %r11, %r0, 5; st.shared.u32 [%r3+1024], %r11;\n"
    assert not findings(program + PAIR + again + PAIR, policy, 2)
    assert findings(program + again + PAIR, policy, 2) == {"race"}


@each_policy
def test_source_of_a_copy_to_the_peer(policy: Policy) -> None:
    """The sender may overwrite it when the receiver, who waits for the copy, has said so."""
    send = f"""{MINE}fence.proxy.async.shared::cta;\n{BAR}@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 256;\n{PAIR}
    add.u32 %r9, %r7, 2048;
    @%p0 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r9], [%r1+1024], 256, [%r7];
    """
    assert not findings(send + wait("W") + PAIR + THEIRS + PAIR, policy, 2)
    assert findings(send + THEIRS + wait("W") + PAIR, policy, 2) & {"missing_wait", "race"}

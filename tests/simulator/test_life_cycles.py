"""Barriers, asynchronous work and launches from their beginning to their end: each rule kept, and broken once, in every schedule."""

from __future__ import annotations

import numpy as np
import pytest

from cute_mla.simulator import Policy
from tests.simulator.small_kernels import Kernel, aligned, kinds
from tests.simulator.two_warps import BAR, CP_ASYNC, PAIR, POLICIES, SETUP, copy, findings, wait

each_policy = pytest.mark.parametrize("policy", POLICIES)
FENCE = "fence.mbarrier_init.release.cluster;\n"
UNFENCED = SETUP.replace(FENCE.strip(), "")
ARRIVE = "@%p0 mbarrier.arrive.shared.b64 _, [%r1];\n"


def run(program: str, policy: Policy, ctas: int = 1, dependent: bool = False) -> set[str]:
    """Return the kinds of findings of 64 threads, whose kernel is this and nothing else."""
    kernel = Kernel(program, threads=64, smem=4096, grid=ctas, cluster=ctas, dependent=dependent)
    return kinds(kernel.run(aligned(256, np.uint32), aligned(1024, np.uint8), policy=policy))


# ---------------------------------------------------------------- ranges


@each_policy
def test_transaction_bytes_in_range(policy: Policy) -> None:
    assert not findings(copy() + wait("W"), policy)
    assert findings("@%p0 mbarrier.expect_tx.relaxed.cta.shared.b64 [%r1], 1048576;\n", policy) == {"barrier_tx"}
    twice = "@%p0 mbarrier.expect_tx.relaxed.cta.shared.b64 [%r1], 1048000;\n" * 2
    assert findings(twice, policy) == {"barrier_tx"}


@each_policy
@pytest.mark.parametrize(("count", "expected"), [(64, set()), (1048575, {"barrier_count"})])
def test_pending_arrivals_in_range(count: int, expected: set[str], policy: Policy) -> None:
    """Without .noinc, cp.async.mbarrier.arrive adds to the arrivals that are missing."""
    init = f"@%p0 mbarrier.init.shared.b64 [%r1+16], {count};\nbar.sync 0;\n"
    arrive = "cp.async.mbarrier.arrive.shared.b64 [%r1+16];\nmbarrier.arrive.shared.b64 _, [%r1+16];\n"
    assert findings(init + CP_ASYNC + arrive + wait("W", 16), policy) - {"unfinished"} == expected


# ---------------------------------------------------------------- phases


@each_policy
def test_a_phase_that_completes_before_a_waiter_has_seen_the_last(policy: Policy) -> None:
    """Warp 1 waits for phase 0 of a barrier that warp 0 drives alone."""
    waits = "@!%p1 bra NEXT;\n" + wait("W") + "NEXT:\n"
    assert not findings(ARRIVE + waits + BAR + ARRIVE, policy)
    assert findings(ARRIVE + waits + ARRIVE, policy) & {"barrier_lapped", "deadlock"}


@each_policy
def test_lanes_that_wait_for_different_barriers(policy: Policy) -> None:
    """A lane that waits for a complete phase says nothing of its warp's other lanes.

    Thread 0 waits for a complete phase, the other lanes for one that thread 32 is about to complete. When thread 0 may go on, no lane has
    waited for the second phase.
    """
    split = "add.u32 %r9, %r1, 8;\nselp.b32 %r9, %r1, %r9, %p0;\n"
    waits = "W: mbarrier.try_wait.parity.shared.b64 %p9, [%r9], 0, 10000000;\n@!%p9 bra W;\n"
    completes = "bra END;\nOTHER:\n@%p2 mbarrier.arrive.shared.b64 _, [%r1+8];\nEND:\n"
    assert not findings(f"{ARRIVE}{BAR}@%p1 bra OTHER;\n{split}{waits}{completes}", policy)


@each_policy
def test_a_phase_that_completes_behind_a_copy(policy: Policy) -> None:
    """A ring of one slot: the producer fills it again when the consumer, warp 1, has said that it has seen the first filling."""
    consume = "@!%p1 bra NEXT;\n" + wait("W") + "@%p2 mbarrier.arrive.shared.b64 _, [%r1+8];\nNEXT:\n"
    again = "@%p1 bra LAST;\n" + wait("F", 8) + "LAST:\n" + copy() + "@%p1 bra END;\n" + wait("E", 0, 1) + "END:\n"
    assert not findings(copy() + consume + again, policy)
    hasty = findings(copy() + consume + again.replace(wait("F", 8), wait("F")), policy)
    assert hasty & {"barrier_lapped", "deadlock"}


@each_policy
def test_an_arrival_that_may_count_for_the_phase_before(policy: Policy) -> None:
    """Both warps arrive twice. The second time they must know that the other one has arrived before."""
    both = "@%p0 mbarrier.arrive.shared.b64 _, [%r1+16];\n@%p2 mbarrier.arrive.shared.b64 _, [%r1+16];\n"
    init = "@%p0 mbarrier.init.shared.b64 [%r1+16], 2;\nbar.sync 0;\n"
    assert not findings(init + both + wait("W", 16) + both, policy)
    assert findings(init + both + both, policy) == {"barrier_early"}


@each_policy
def test_arrivals_of_one_instruction(policy: Policy) -> None:
    """Arrivals of one instruction are one event.

    Both warps arrive at two barriers, wait for one of them and arrive again. They know of the other barrier as well if the lanes of a warp
    arrive at both by one instruction, and not if by two.
    """
    init = "@%p0 mbarrier.init.shared.b64 [%r1+16], 2;\n@%p0 mbarrier.init.shared.b64 [%r1+24], 2;\nbar.sync 0;\n"
    lanes = "and.b32 %r9, %r0, 31;\nsetp.lt.u32 %p3, %r9, 2;\nsetp.eq.u32 %p4, %r9, 0;\nshl.b32 %r10, %r9, 3;\nadd.u32 %r10, %r10, %r1;\n"
    together = "@%p3 mbarrier.arrive.shared.b64 _, [%r10+16];\n"
    apart = "@%p4 mbarrier.arrive.shared.b64 _, [%r1+16];\n@%p4 mbarrier.arrive.shared.b64 _, [%r1+24];\n"
    assert not findings(init + lanes + together + wait("W", 16) + together, policy)
    assert findings(init + lanes + apart + wait("W", 16) + apart, policy) == {"barrier_early"}


@each_policy
def test_a_wait_that_an_older_phase_may_pass(policy: Policy) -> None:
    """A warp that is early by a phase reads too soon.

    Warp 1 waits for phase 1, for whose parity the barrier also looks complete before phase 0 is.
    """
    produce = ARRIVE + wait("S", 8) + "@%p0 st.shared.u32 [%r1+1024], %r0;\n" + ARRIVE
    consume = wait("F") + "@%p2 mbarrier.arrive.shared.b64 _, [%r1+8];\n" + wait("L", 0, 1) + "ld.shared.u32 %r20, [%r1+1024];\n"
    roles = "@%p1 bra CONSUME;\n" + produce + "bra END;\nCONSUME:\n{}END:\n"
    assert not findings(roles.format(consume), policy)
    assert findings(roles.format(consume.replace(wait("F"), "")), policy) & {"barrier_early", "race"}


@each_policy
def test_a_named_barrier_that_is_arrived_at_twice(policy: Policy) -> None:
    """The producer arrives again only when it knows that the consumer has passed."""
    consumer, producer = "bar.sync 1, 64;\nSYNC\nbar.sync 1, 64;\n", "bar.arrive 1, 64;\nSYNC\nbar.arrive 1, 64;\n"
    rounds = f"@%p1 bra PRODUCER;\n{consumer}bra END;\nPRODUCER:\n{producer}END:\n"
    assert not findings(rounds.replace("SYNC", "bar.sync 2, 64;"), policy)
    assert "barrier_lapped" in findings(rounds.replace("SYNC", ""), policy)


@each_policy
def test_a_warp_that_arrives_and_then_waits_for_the_same_round(policy: Policy) -> None:
    """One warp of those that arrive waits for all of them: its threads count twice. A second arrival without a wait is a finding."""
    body = "bar.arrive 1, 96;\n@%p1 bra END;\nbar.sync 1, 96;\nEND:\n"
    assert not findings(body, policy)
    assert findings(body.replace("bar.sync", "bar.arrive"), policy) & {"barrier_lapped"}


# ---------------------------------------------------------------- initialisation


@each_policy
def test_mbarrier_that_others_use(policy: Policy) -> None:
    arrive = "@%p2 mbarrier.arrive.shared.b64 _, [%r1];\n"
    assert not run(SETUP + arrive, policy)
    assert run(SETUP.replace("bar.sync 0;", "") + arrive, policy) & {"race", "barrier_uninitialised"}


@each_policy
def test_mbarrier_that_copies_signal(policy: Policy) -> None:
    program = copy() + wait("W")
    assert not run(UNFENCED.replace("bar.sync 0;", "fence.proxy.async.shared::cta;\nbar.sync 0;") + program, policy)
    assert run(UNFENCED + program, policy) == {"missing_fence"}
    others = UNFENCED.replace("bar.sync 0;", "@%p1 fence.mbarrier_init.release.cluster;\nbar.sync 0;")
    assert run(others + program, policy) == {"missing_fence"}


@each_policy
def test_mbarrier_that_another_cta_signals(policy: Policy) -> None:
    remote = "@%p0 mbarrier.arrive.shared::cluster.b64 _, [%r7];\n" + wait("W")
    relaxed = PAIR.replace("arrive", "arrive.relaxed")
    assert not run(SETUP + relaxed + remote + PAIR, policy, 2)
    assert not run(UNFENCED + PAIR + remote + PAIR, policy, 2)  # which releases
    assert run(UNFENCED + relaxed + remote + PAIR, policy, 2) == {"missing_fence"}


@each_policy
def test_a_relaxed_cluster_barrier_hands_nothing_over(policy: Policy) -> None:
    """Unless a fence, or a barrier of the CTA, has."""
    store, load = "st.shared.u32 [%r3+1024], %r0;\n", "ld.shared.u32 %r20, [%r4+1024];\n"
    relaxed = PAIR.replace("arrive", "arrive.relaxed")
    assert run(SETUP + store + relaxed + load, policy, 2) == {"race"}
    for order in (BAR + relaxed, "fence.acq_rel.cluster;\n" + relaxed, PAIR):
        assert not run(SETUP + store + order + load, policy, 2)


# ---------------------------------------------------------------- exits


@each_policy
def test_exit_with_copies_on_their_way(policy: Policy) -> None:
    """A finding comes whether the copies land in time or not."""
    assert findings(copy(), policy) == {"unfinished"}
    assert findings(copy() + copy(8, 2048) + wait("W"), policy) == {"unfinished"}
    assert not findings(copy() + copy(8, 2048) + wait("W") + wait("V", 8), policy)
    assert findings(CP_ASYNC, policy) == {"unfinished"}
    assert not findings(CP_ASYNC + "cp.async.wait_all;\n", policy)


@each_policy
def test_arrival_at_a_cta_that_may_have_gone(policy: Policy) -> None:
    """Each CTA signals the other one; it must wait for that, or for something behind it, before it ends."""
    remote = "@%p0 mbarrier.arrive.shared::cluster.b64 _, [%r7];\n"
    assert not findings(PAIR + remote + wait("W"), policy, 2)
    assert not findings(PAIR + remote + PAIR, policy, 2)
    assert findings(PAIR + remote, policy, 2) & {"unfinished", "exited_cta"}


# ---------------------------------------------------------------- the grid ahead


AHEAD = "ld.global.u32 %r20, [%rd4];\n"
GRID = "griddepcontrol.wait;\n"


@each_policy
@pytest.mark.parametrize(
    ("access", "done"),
    [
        (AHEAD, ""),
        ("st.global.u32 [%rd2], %r0;\n", ""),
        ("red.global.add.u32 [%rd2], 1;\n", ""),
        (copy(), wait("W")),
        (CP_ASYNC, "cp.async.wait_all;\n"),
    ],
    ids=["load", "store", "atomic", "bulk copy", "cp.async"],
)
def test_memory_of_the_grid_ahead(access: str, done: str, policy: Policy) -> None:
    assert not run(SETUP + GRID + access + done, policy, dependent=True)
    assert not run(SETUP + access + done, policy)
    assert run(SETUP + access + GRID + done, policy, dependent=True) == {"missing_wait"}


@each_policy
def test_one_warp_waits_for_the_grid_ahead(policy: Policy) -> None:
    one = "@%p1 bra OTHER;\n" + GRID + "OTHER:\n"
    assert not run(SETUP + one + BAR + AHEAD, policy, dependent=True)
    assert run(SETUP + one + AHEAD, policy, dependent=True) == {"missing_wait"}


# ---------------------------------------------------------------- global memory

PLACE = (
    "mul.wide.u32 %rd5, %r0, 4; add.s64 %rd5, %rd0, %rd5; xor.b32 %r21, %r0, 32; mul.wide.u32 %rd6, %r21, 4; add.s64 %rd6, %rd0, %rd6;\n"
)
WRITE, READ, CROSS = "st.global.u32 [%rd5], %r0;\n", "ld.global.u32 %r20, [%rd6];\n", "st.global.u32 [%rd6], %r0;\n"


@each_policy
def test_races_on_global_memory(policy: Policy) -> None:
    assert not findings(PLACE + WRITE + BAR + READ + BAR + CROSS, policy)
    assert not findings(PLACE + "st.global.u32 [%rd0], 7;\n", policy)
    assert "race" in findings(PLACE + WRITE + READ, policy)
    assert "race" in findings(PLACE + WRITE + CROSS, policy)
    assert "race" in findings(PLACE + WRITE + BAR + READ + WRITE.replace("%r0", "%r5"), policy)


@each_policy
def test_halves_of_a_word_of_global_memory(policy: Policy) -> None:
    place = "mul.wide.u32 %rd5, %r0, 2; add.s64 %rd5, %rd0, %rd5; shr.u32 %r21, %r0, 5; and.b32 %r22, %r0, 31;\n"
    place += "mad.lo.u32 %r22, %r22, 2, %r21; mul.wide.u32 %rd5, %r22, 2; add.s64 %rd5, %rd0, %rd5; cvt.u16.u32 %h1, %r0;\n"
    assert not findings(place + "st.global.u16 [%rd5], %h1;\n", policy)


@each_policy
def test_global_memory_between_clusters(policy: Policy) -> None:
    """The last CTA to come reads what the others have left: in order through an atomic operation, if all of them wait for their stores."""
    body = """
    mov.u32 %r1, %ctaid.x; mov.u32 %r10, 0;
    mul.wide.u32 %rd5, %r1, 4; add.s64 %rd5, %rd0, %rd5; st.global.u32 [%rd5+64], %r1;
    ATOMIC
    setp.ne.u32 %p1, %r10, LAST; @%p1 bra END;
    ld.global.u32 %r11, [%rd0+64]; ld.global.u32 %r12, [%rd0+68];
    END:
    """
    setup = "setp.ne.u32 %p9, %r0, 0; @%p9 bra END;\n"
    counted = setup + body.replace("ATOMIC", "fence.acq_rel.gpu; atom.global.add.u32 %r10, [%rd0], 1; fence.acq_rel.gpu;").replace(
        "LAST", "1"
    )
    blind = setup + body.replace("ATOMIC", "").replace("LAST", "0")
    assert not kinds(Kernel(counted, threads=32, grid=2).run(aligned(64, np.uint32), policy=policy))
    assert kinds(Kernel(blind, threads=32, grid=2).run(aligned(64, np.uint32), policy=policy)) == {"race"}

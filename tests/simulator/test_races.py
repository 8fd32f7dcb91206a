"""Races on shared memory and missing proxy fences in kernels with tensor memory: planted once each, beside the kernel that is right."""

from __future__ import annotations

import pytest

from cute_mla.simulator import Policy
from tests.simulator.small_kernels import kinds
from tests.simulator.tensor_kernels import (
    DATA,
    PAIR,
    SCHEDULES,
    TensorKernel,
    commit,
    fill,
    instruction_descriptor,
    mma,
    smem_descriptor,
    wait,
)

SIZE = 16 * 1024
PRODUCT = mma(smem_descriptor(0), smem_descriptor(SIZE), instruction_descriptor(128, 32)) + commit() + wait("$done")
STORE = f"shl.b32 %r10, %r0, 2; add.u32 %r10, %r10, %r1;\nst.shared.u32 [%r10+{DATA}], %r0;\n"
OTHER = "xor.b32 %r11, %r0, 32; shl.b32 %r11, %r11, 2; add.u32 %r11, %r11, %r1;\n"  # the word of another warp
LOAD = f"ld.shared.u32 %r12, [%r11+{DATA}];\n"
BAR = "bar.sync 0;\n"
FENCE = "fence.proxy.async.shared::cta;\n"


def findings(program: str, policy: Policy, group: int = 1, image: int = 2 * SIZE) -> set[str]:
    """Return the kinds of findings. The image has been copied, so the operands of products are defined."""
    report = TensorKernel(fill(32, group) + program, group, image=image, output=False).run(policy=policy)[1]
    return kinds(report)


@pytest.mark.parametrize("policy", SCHEDULES)
@pytest.mark.parametrize(
    ("program", "kind"),
    [
        (STORE + OTHER + LOAD, "race"),
        (OTHER + LOAD + STORE, "race"),
        (STORE + OTHER + BAR + LOAD + STORE, "race"),  # the read of one round, the store of the next
        (STORE + BAR + PRODUCT, "missing_fence"),
        (STORE + BAR + FENCE.replace("fence", "@%p6 fence") + PRODUCT, "missing_fence"),
        (FENCE + STORE + BAR + PRODUCT, "missing_fence"),
        (STORE + "fence.proxy.async.global;\n" + BAR + PRODUCT, "missing_fence"),
        (STORE + FENCE + PRODUCT, "race"),
        ("setp.ne.u32 %p6, %r0, %r0;\n" + STORE + BAR + PRODUCT, "missing_fence"),
    ],
)
def test_found(program: str, kind: str, policy: Policy) -> None:
    assert kind in findings("setp.ne.u32 %p6, %r0, %r0;\n" + program, policy)


@pytest.mark.parametrize("policy", SCHEDULES)
@pytest.mark.parametrize(
    "program",
    [
        STORE + OTHER + BAR + LOAD,
        OTHER + LOAD + BAR + STORE,
        STORE + OTHER + BAR + LOAD + BAR + STORE,
        STORE + FENCE + BAR + PRODUCT,
        STORE + BAR + FENCE + PRODUCT,  # the reader's fence, after it has waited, does as well
        PRODUCT + STORE + OTHER + BAR + LOAD,
        STORE + "ld.shared.u32 %r12, [%r10+1024];\n" + STORE,
        "red.shared.add.u32 [%r1+1024], 1;\n",
        "st.shared.u32 [%r1+1024], 7;\n",  # everybody the same value: not told from a race by time, and left out
    ],
)
def test_ordered(program: str, policy: Policy) -> None:
    assert not findings(program, policy)


@pytest.mark.parametrize("policy", SCHEDULES)
def test_bulk_store(policy: Policy) -> None:
    store = "@%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r13], 512;\n@%p0 cp.async.bulk.commit_group;\n"
    store = f"add.u32 %r13, %r1, {DATA};\n" + store + "@%p0 cp.async.bulk.wait_group 0;\n"
    assert findings(STORE + FENCE + BAR + store, policy) == set()
    assert "missing_fence" in findings(STORE + BAR + store, policy)
    assert "race" in findings(STORE + FENCE + store, policy)


@pytest.mark.parametrize("policy", SCHEDULES)
def test_bulk_copy_to_the_peer(policy: Policy) -> None:
    copy = f"""
add.u32 %r13, %r1, {DATA}; xor.b32 %r14, %r4, 1; add.u32 %r15, %r13, 4096;
mapa.shared::cluster.u32 %r15, %r15, %r14; mapa.shared::cluster.u32 %r16, %r1, %r14;
@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 512;
@%p0 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r15], [%r13], 512, [%r16];
{wait("$again", 0, 1)}ld.shared.u32 %r12, [%r13+4096];
"""
    assert findings(STORE + FENCE + BAR + PAIR + copy + PAIR, policy, 2) == set()
    assert "missing_fence" in findings(STORE + BAR + PAIR + copy + PAIR, policy, 2)
    assert "race" in findings(PAIR + STORE + FENCE + copy + PAIR, policy, 2)


@pytest.mark.parametrize("policy", SCHEDULES)
def test_copy_over_what_is_read(policy: Policy) -> None:
    """A slot of a pipeline is filled again: its readers must have said that they are done."""
    again = f"""
@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 512;
@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r13], [%rd8], 512, [%r1];
{wait("$again", 0, 1)}"""
    program = f"add.u32 %r13, %r1, {DATA};\n" + OTHER + LOAD
    assert findings(program + BAR + again, policy) == set()
    assert "race" in findings(program + again, policy)


@pytest.mark.parametrize("policy", SCHEDULES)
def test_memory_of_the_peer(policy: Policy) -> None:
    """A store into the other CTA's shared memory, and that one's load of it."""
    store = f"xor.b32 %r14, %r4, 1; mapa.shared::cluster.u32 %r15, %r10, %r14;\nst.shared::cluster.u32 [%r15+{DATA}], %r0;\n"
    store = "shl.b32 %r10, %r0, 2; add.u32 %r10, %r10, %r1;\n" + store
    load = f"ld.shared.u32 %r12, [%r10+{DATA}];\n"
    assert findings(store + PAIR + load, policy, 2) == set()
    assert "race" in findings(store + load, policy, 2) | findings(load + store, policy, 2)


@pytest.mark.parametrize("policy", SCHEDULES)
def test_flags_in_shared_memory(policy: Policy) -> None:
    """A hand-over through a flag with release and acquire is an order, too."""
    program = f"""
@%p0 st.shared.u32 [%r1+32], 0;
bar.sync 0;
setp.eq.u32 %p6, %r2, 0; setp.eq.u32 %p7, %r2, 1;
@%p6 st.shared.u32 [%r10+{DATA}], %r0;
@%p0 st.release.cta.shared.u32 [%r1+32], 1;
@!%p7 bra $not;
$poll: ld.acquire.cta.shared.u32 %r16, [%r1+32];
setp.eq.u32 %p8, %r16, 0;
@%p8 bra $poll;
ld.shared.u32 %r12, [%r11+{DATA}];
$not:
"""
    assert not findings("shl.b32 %r10, %r0, 2; add.u32 %r10, %r10, %r1;\n" + OTHER + program, policy)

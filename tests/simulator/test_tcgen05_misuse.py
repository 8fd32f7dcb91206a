"""Allocation, commits, and every misuse of tensor memory that is a finding, each planted once beside the kernel that is right."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from cute_mla.simulator import Policy
from tests.simulator.assembled import Evidence, check_machine_code
from tests.simulator.small_kernels import LAZY, kinds
from tests.simulator.tensor_kernels import (
    PAIR,
    SCHEDULES,
    TensorKernel,
    commit,
    fill,
    instruction_descriptor,
    mma,
    smem_descriptor,
    wait,
)  # fmt: skip
from tests.simulator.tensor_programs import GOOD, IDESC, LOAD, SIZE, STORE, WAITED, A, B, image, message, report_of

# ---------------------------------------------------------------- allocation


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r9], 48;", "power of two"),
        ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r9], 16;", "power of two"),
        (
            "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n"
            "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r9], 32;",
            "after tcgen05.relinquish",
        ),
        ("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 128;", "dealloc of 128 columns"),
        ("add.u32 %r3, %r3, 32;\ntcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 32;", "dealloc of 32 columns at 0x20"),
        ("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r9], 32;", "cta_group::2 in a kernel that has used cta_group::1"),
    ],
)
def test_wrong_allocation(program: str, text: str) -> None:
    guarded = f"add.u32 %r9, %r1, 24;\n@!%p3 bra $after;\n{program}\n$after:\n"
    report = report_of(guarded, columns=64, output=False)
    assert kinds(report) == {"tensor_memory"}
    assert text in message(report)


def test_columns_that_are_not_allocated() -> None:
    for program in (
        "add.u32 %r8, %r5, 60;\ntcgen05.ld.sync.aligned.32x32b.x8.b32 {%r30,%r31,%r32,%r33,%r34,%r35,%r36,%r37}, [%r8];\n",
        "add.u32 %r8, %r5, 64;\ntcgen05.st.sync.aligned.32x32b.x1.b32 [%r8], {%r0};\n",
        mma(A, B, IDESC, d=48) + commit() + wait("$done"),
        mma("60", B, IDESC) + commit() + wait("$done"),
        "mov.u64 %rd10, 0x400000000040;\nadd.u32 %r6, %r3, 60;\n@%p0 tcgen05.cp.cta_group::1.128x256b [%r6], %rd10;\n",
    ):
        report = report_of(program, columns=64, output=False)
        assert kinds(report) == {"tensor_memory"}
        assert "column 64 is not allocated" in message(report)


@pytest.mark.parametrize("policy", SCHEDULES)
def test_allocation_waits_for_room(policy: Policy) -> None:
    """Warp 1 wants 512 columns while warp 0 has 64; it gets them when those are freed."""
    program = """
setp.eq.u32 %p6, %r2, 1; add.u32 %r9, %r1, 24;
@!%p6 bra $other;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r9], 512;
ld.shared.u32 %r10, [%r1+24];
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 512;
$other:
@!%p3 bra $end;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 64;
$end:
"""
    assert not report_of(program, policy, columns=64, output=False, epilogue="").findings


def test_allocation_that_never_gets_room_is_a_deadlock() -> None:
    program = "add.u32 %r9, %r1, 24;\n@!%p3 bra $o;\ntcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r9], 512;\n$o:\n"
    assert "deadlock" in kinds(report_of(program, columns=64, output=False))


def test_not_freed_at_exit() -> None:
    report = report_of("", output=False, epilogue="")
    assert kinds(report) == {"unfinished"}
    assert "without tcgen05.dealloc of 512 columns" in message(report)


def test_pair_that_allocates_differently() -> None:
    program = (
        "add.u32 %r9, %r1, 24;\n@!%p3 bra $o;\nmad.lo.u32 %r10, %r4, 32, 32;\n"
        "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r9], %r10;\n$o:\n"
    )
    report = report_of(program, group=2, columns=64, output=False)
    assert "where its peer allocates" in message(report)


class Unordered(TensorKernel):
    """The CTAs of the pair meet before the allocation, and not again."""

    def prologue(self) -> str:
        text = super().prologue()
        assert text.count(PAIR) == 1
        return text.replace(PAIR, "").replace("@!%p3 bra $allocated;", f"bar.sync 0;\n{PAIR}@!%p3 bra $allocated;")


@pytest.mark.parametrize("policy", SCHEDULES)
def test_pair_allocates_together(policy: Policy) -> None:
    """The even CTA issues a product as soon as it has its memory: the odd one has it then, too."""
    program = mma(A, B, instruction_descriptor(256, 32), group=2) + commit(2) + wait("$done")
    _, report = Unordered(program, 2, 32, output=False, room=4 * SIZE).run(policy=policy)
    assert not report.findings


def test_pair_of_which_one_allocates() -> None:
    program = "@!%p2 bra $o;\n@!%p3 bra $o;\ntcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r1], 32;\n$o:\n"
    report = report_of(program, group=2, columns=64, output=False)
    assert any("the peer CTA must allocate 32 too" in finding.message for finding in report.findings)


def test_several_warps_allocate_one_after_the_other() -> None:
    program = """
mad.lo.u32 %r9, %r2, 4, %r1; add.u32 %r9, %r9, 32;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r9], 64;
ld.shared.u32 %r10, [%r9]; bar.sync 0;
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 64;
"""
    assert not report_of(program, Policy.named("round_robin"), columns=64, output=False).findings


# ---------------------------------------------------------------- lanes, descriptors, shapes


@pytest.mark.parametrize(
    ("program", "kind", "text"),
    [
        ("add.u32 %r8, %r3, 0x400000;\ntcgen05.ld.sync.aligned.32x32b.x1.b32 {%r30}, [%r8];\n", "tensor_memory", "from lane 64 by warp 0"),
        (
            "add.u32 %r8, %r5, 0x100000;\ntcgen05.ld.sync.aligned.32x32b.x1.b32 {%r30}, [%r8];\n",
            "tensor_memory",
            "of 32 lanes from lane 16",
        ),
        ("add.u32 %r8, %r5, 0x80000;\ntcgen05.ld.sync.aligned.16x64b.x1.b32 {%r30}, [%r8];\n", "tensor_memory", "of 16 lanes from lane 8"),
        ("add.u32 %r8, %r5, %r0;\ntcgen05.ld.sync.aligned.32x32b.x1.b32 {%r30}, [%r8];\n", "divergence", "differs between the lanes"),
        (mma(A, B, IDESC | 1 << 6), "descriptor", "reserved bits"),
        (mma(A, B, IDESC | 1 << 23), "descriptor", "reserved bits"),
        (mma(A, B, IDESC | 1 << 2), "descriptor", "sparsity"),
        (mma(A, B, instruction_descriptor(96, 32)), "descriptor", "M 96, N 32"),
        (mma(A, B, instruction_descriptor(128, 0)), "descriptor", "M 128, N 0"),
        (mma(A, B, instruction_descriptor(256, 32)), "descriptor", "M 256, N 32"),
        (mma(A, B, instruction_descriptor(64, 32), ws=True), "descriptor", "M 64, N 32"),
        (mma(A, B, instruction_descriptor(128, 32, a=2)), "descriptor", "no such types"),
        (mma(A, B, instruction_descriptor(128, 32, a=0)), "descriptor", "does not exist"),
        (mma(A, B, instruction_descriptor(128, 32, d=2)), "descriptor", "no such types"),
        (mma(A, B, IDESC | 1 << 3), "descriptor", "saturation"),
        (mma(A & ~(7 << 46), B, IDESC), "descriptor", "bits 46 to 48"),
        (mma(A, B | 1 << 53, IDESC), "descriptor", "reserved bits"),
        (mma(A, B | 1 << 49, IDESC), "descriptor", "base offset"),
        (mma(A, B | 7 << 61, IDESC), "descriptor", "swizzle 7"),
        (mma("256", B, IDESC | 1 << 15), "descriptor", "cannot be MN-major"),
        (mma(A, B, IDESC, d=16 << 16), "descriptor", "at lane 16"),
        (mma("256", B, instruction_descriptor(64, 32), d=16 << 16), "descriptor", "A begins at lane 0, D at lane 16"),
        (mma(A, smem_descriptor(2 * SIZE + 4096), IDESC) + commit(), "out_of_bounds", "beyond the CTA's shared memory"),
        (mma(A, B, IDESC, group=2), "tensor_memory", "cta_group::2 in a cluster of 1"),
    ],
)
def test_what_cannot_be_done(program: str, kind: str, text: str) -> None:
    report = report_of(fill(512) + program, Policy.named("round_robin"), output=False)
    assert kinds(report) == {kind}
    assert text in message(report)


# ---------------------------------------------------------------- commits


@pytest.mark.parametrize("policy", SCHEDULES)
def test_commit_of_one_cta_of_a_pair(policy: Policy) -> None:
    """A commit without multicast reaches the CTA that the address names; the even CTA also waits, for an ordinary arrival."""
    idesc = instruction_descriptor(256, 32)
    program = fill(32, 2) + mma(A, B, idesc, group=2)
    program += "add.u32 %r9, %r1, 8; mapa.shared::cluster.u32 %r10, %r9, 1; mapa.shared::cluster.u32 %r11, %r9, 0;\n"
    program += "@%p1 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.b64 [%r10];\n"
    program += "@!%p2 bra $even;\nbra $both;\n$even:\n" + wait("$odd")
    program += "@%p0 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r11];\n$both:\n" + wait("$done")
    cells, report = TensorKernel(program, 2, 32, 2 * SIZE).run(image(2), policy=policy)
    assert not report.findings
    assert (cells[:, :, :16].view(np.float32) == 16).all()


@pytest.mark.parametrize("policy", SCHEDULES)
def test_commit_to_a_cta_that_has_gone(policy: Policy) -> None:
    """Found also where it comes in time."""
    idesc = instruction_descriptor(256, 32)
    program = fill(32, 2) + mma(A, B, idesc, group=2) + commit(2) + wait("$done") + PAIR + commit(2)
    report = report_of(program, policy, group=2, output=False)
    assert "may exit before this arrival" in message(report)
    assert not report_of(program + wait("$again", parity=1), policy, group=2, output=False).findings
    alone = fill(32) + GOOD + commit() + wait("$done") + "bar.sync 0;\n" + commit()
    assert not report_of(alone, policy, output=False).findings  # only the CTA itself could tell


def test_product_without_a_commit() -> None:
    report = report_of(fill(32) + GOOD, output=False, epilogue="bar.sync 0;\n")
    assert any("work that has not been committed" in finding.message for finding in report.findings)


@pytest.mark.parametrize("policy", SCHEDULES)
def test_commit_of_another_thread_covers_nothing(policy: Policy) -> None:
    other = commit().replace("%p0", "%p6")
    program = fill(32) + GOOD + "setp.eq.u32 %p6, %r0, 1;\n" + other + wait("$done")
    report = report_of(program, policy)
    assert kinds(report) == {"missing_wait"}


# ---------------------------------------------------------------- what is in use

SETTLE = "bar.sync 0;\n"


@pytest.mark.parametrize("policy", SCHEDULES)
@pytest.mark.parametrize(
    ("program", "text"),
    [
        (GOOD + commit() + LOAD, "a tcgen05.ld reads tensor memory that a tcgen05.mma"),
        (GOOD + commit() + STORE, "a tcgen05.st writes tensor memory that a tcgen05.mma"),
        (mma("256", B, IDESC) + commit() + STORE.replace("[%r5]", "[%r5+256]"), "a tcgen05.st writes tensor memory that a tcgen05.mma"),
        (GOOD + commit() + "@%p0 st.shared.u32 [%r1+1040], %r0;\n", "a store overwrites shared memory that a tcgen05.mma"),
        (
            GOOD + commit() + "bar.sync 0;\n@!%p3 bra $x;\ntcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 512;\n$x:\n",
            "dealloc of tensor",
        ),
        (STORE + SETTLE + mma("0", B, IDESC, d=64) + commit() + wait("$done"), "a tcgen05.mma reads tensor memory that a tcgen05.st"),
        (STORE + SETTLE + WAITED, "a tcgen05.mma writes tensor memory that a tcgen05.st"),
        (LOAD + SETTLE + WAITED, "a tcgen05.mma writes tensor memory that a tcgen05.ld"),
        (STORE + LOAD, "a tcgen05.ld reads tensor memory that a tcgen05.st"),
        (LOAD + STORE, "a tcgen05.st writes tensor memory that a tcgen05.ld"),
        (LOAD + SETTLE + "@!%p3 bra $x;\ntcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 512;\n$x:\n", "dealloc of tensor memory"),
        (STORE + SETTLE + "tcgen05.wait::st.sync.aligned;\n" + WAITED, "a tcgen05.mma writes tensor memory that a tcgen05.st"),
        (LOAD + SETTLE + "tcgen05.wait::ld.sync.aligned;\n" + WAITED, "a tcgen05.mma writes tensor memory that a tcgen05.ld"),
    ],
)
def test_in_use(program: str, text: str, policy: Policy) -> None:
    report = report_of(fill(512) + program, policy, output=False, epilogue="")
    assert any(text in finding.message for finding in report.findings if finding.kind == "missing_wait"), report.findings


@pytest.mark.parametrize("policy", SCHEDULES)
@pytest.mark.parametrize(
    "program",
    [
        STORE + "tcgen05.wait::st.sync.aligned;\n" + SETTLE + WAITED + LOAD,
        LOAD + "tcgen05.wait::ld.sync.aligned;\n" + SETTLE + WAITED,
        LOAD + "mov.b32 %r40, %r30;\nadd.u32 %r41, %r40, 1;\n" + SETTLE + WAITED,  # the use of a copy of the register is a wait too
        STORE + "tcgen05.wait::st.sync.aligned;\n" + LOAD + "tcgen05.wait::ld.sync.aligned;\n" + STORE + "tcgen05.wait::st.sync.aligned;\n",
        WAITED + "@%p0 st.shared.u32 [%r1+1040], %r0;\n",
    ],
)
def test_in_order(program: str, policy: Policy) -> None:
    assert not report_of(fill(512) + program, policy).findings


def test_moving_a_loaded_register_is_no_use() -> None:
    """Compilers copy registers of a load before they wait for it."""
    program = LOAD + "mov.b64 %rd20, {%r30, %r30};\nmov.b64 {%r41, %r42}, %rd20;\n" + SETTLE
    assert kinds(report_of(fill(512) + program + WAITED, output=False)) == {"missing_wait"}
    assert not report_of(fill(512) + program.replace(SETTLE, "add.u32 %r43, %r41, 1;\n" + SETTLE) + WAITED, output=False).findings


def test_product_on_bytes_that_a_copy_still_writes() -> None:
    early = """
@%p0 mbarrier.init.shared::cta.b64 [%r1+32], 1;
@%p0 fence.mbarrier_init.release.cluster;
ld.param.u64 %rd8, [p1]; add.u32 %r9, %r1, 1024; add.u32 %r10, %r1, 32;
@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+32], 4096;
@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r9], [%rd8], 4096, [%r10];
"""
    report = report_of(fill(32) + early + GOOD + commit() + wait("$done") + "bar.sync 0;\n" + wait("$copied", 32))
    assert "a tcgen05.mma reads shared memory at 0x800 that an asynchronous copy" in message(report)
    assert not report_of(fill(32) + early + "bar.sync 0;\n" + wait("$copied", 32) + GOOD + commit() + wait("$done")).findings


def test_copy_into_operands_of_a_pair() -> None:
    """The odd CTA's copy overwrites what the product that the even CTA has issued reads there."""
    idesc = instruction_descriptor(256, 32)
    copy = """
@%p0 mbarrier.init.shared::cta.b64 [%r1+32], 1;
@%p0 fence.mbarrier_init.release.cluster;
bar.sync 0;
ld.param.u64 %rd8, [p1]; add.u32 %r9, %r1, 1024; add.u32 %r10, %r1, 32; setp.ne.u32 %p6, %r4, 0; and.pred %p6, %p6, %p0;
@%p6 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+32], 4096;
@%p6 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r9], [%rd8], 4096, [%r10];
"""
    program = fill(32, 2) + mma(A, B, idesc, group=2) + commit(2) + PAIR
    report = report_of(program + copy + wait("$done"), group=2, output=False)
    assert any("overwrites shared memory that a tcgen05.mma" in finding.message for finding in report.findings)
    after = program + wait("$done") + copy + "@%p2 bra $no;\n" + wait("$copied", 32) + "$no:\n"
    assert not report_of(after, group=2, output=False).findings


# ---------------------------------------------------------------- the collector


def products(*usages: str, operands: tuple[int, ...] = (A, A, A)) -> str:
    """Return products on accumulators of their own, one for each usage of the collector."""
    items = zip(usages, operands, strict=False)
    return "".join(mma(a, B, IDESC, d=32 * i, collector=f".collector::a::{usage}") for i, (usage, a) in enumerate(items))


@pytest.mark.parametrize("policy", SCHEDULES)
@pytest.mark.parametrize(
    "usages", [("fill", "lastuse"), ("fill", "use", "lastuse"), ("fill", "fill", "use"), ("discard", "fill", "use"), ("fill", "discard")]
)
def test_an_operand_that_was_filled_may_be_used(usages: tuple[str, ...], policy: Policy) -> None:
    assert not report_of(products(*usages) + commit() + wait("$done"), policy, columns=128, output=False).findings


@pytest.mark.parametrize(
    ("usages", "text"),
    [
        (("use",), "collector::a::use, but the collector holds nothing"),
        (("lastuse",), "collector::a::lastuse, but the collector holds nothing"),
        (("use", "use", "use"), "holds nothing"),
        (("fill", "lastuse", "use"), "holds nothing"),
        (("fill", "discard", "lastuse"), "holds nothing"),
    ],
)
def test_an_operand_that_was_not_filled(usages: tuple[str, ...], text: str) -> None:
    report = report_of(products(*usages) + commit() + wait("$done"), columns=128, output=False)
    assert kinds(report) == {"collector"}
    assert text in report.findings[0].message


def test_another_operand_than_was_filled() -> None:
    other = smem_descriptor(SIZE // 2)
    report = report_of(products("fill", "use", operands=(A, other)) + commit() + wait("$done"), columns=128, output=False)
    assert kinds(report) == {"collector"}
    assert "holds another operand" in message(report)


# ---------------------------------------------------------------- machine code

MACHINE_CODE: dict[str, Evidence] = {
    "collector": (partial(test_an_operand_that_was_filled_may_be_used, ("fill", "use", "lastuse"), LAZY), "UTCHMMA"),
    "collector, not filled": (partial(test_an_operand_that_was_not_filled, ("use",), "holds nothing"), "UTCHMMA"),
    "commit to one CTA": (partial(test_commit_of_one_cta_of_a_pair, SCHEDULES[3]), "UTCBAR.2CTA"),
    "waiting for room": (partial(test_allocation_waits_for_room, SCHEDULES[3]), "UTCATOMSWS.AND NANOSLEEP"),
    "never any room": (test_allocation_that_never_gets_room_is_a_deadlock, "UTCATOMSWS.FIND_AND_SET.ALIGN"),
    "not freed": (test_not_freed_at_exit, "UTCATOMSWS.FIND_AND_SET.ALIGN"),
    "four allocations": (test_several_warps_allocate_one_after_the_other, "UVIRTCOUNT.DEALLOC.SMPOOL ATOMS.OR ATOMS.AND"),
    "pairs allocate": (partial(test_pair_allocates_together, SCHEDULES[3]), "STAS SYNCS.ARRIVE.TRANS64.RED"),
}


@pytest.mark.parametrize("name", MACHINE_CODE)
def test_as_machine_code(name: str) -> None:
    check_machine_code(*MACHINE_CODE[name])

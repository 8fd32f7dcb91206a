"""wgmma inside kernels: bulk copies bring the operands, four warps multiply, and each rule is broken once."""

from __future__ import annotations

import numpy as np
import pytest

from cute_mla.simulator import Policy
from tests.simulator.barrier_kernels import ALL, each_policy
from tests.simulator.small_kernels import LAZY, kinds, lines_of
from tests.simulator.wgmma_kernel import BODY, run

MMA = BODY[BODY.index("    wgmma.mma_async") : BODY.index("    wgmma.commit")]


@each_policy
def test_product(policy: Policy) -> None:
    report, d, expected = run(BODY, policy)
    assert report.ok, report.findings
    np.testing.assert_array_equal(d, expected)


@each_policy
def test_missing_wait(policy: Policy) -> None:
    report, _, _ = run(BODY.replace("wgmma.wait_group.sync.aligned 0;", ""), policy)
    assert "missing_wait" in kinds(report)


def test_wait_for_an_older_group_only() -> None:
    report, _, _ = run(BODY.replace("wait_group.sync.aligned 0;", "wait_group.sync.aligned 1;"), LAZY)
    assert "missing_wait" in kinds(report)


def test_missing_commit() -> None:
    report, _, _ = run(BODY.replace("wgmma.commit_group.sync.aligned;", ""), LAZY)
    assert not report.ok


@pytest.mark.parametrize("policy", [LAZY, Policy.named("adversarial")])
def test_operands_read_before_they_arrive(policy: Policy) -> None:
    begin, end = BODY.index("WAITING:"), BODY.index("    add.u32 %r101")
    report, _, _ = run(BODY[:begin] + BODY[end:], policy)
    assert {"poison", "missing_wait"} <= kinds(report)
    assert "asynchronous copy" in " ".join(finding.message for finding in report.findings if finding.kind == "missing_wait")


def test_accumulator_without_initial_value() -> None:
    report, d, _ = run(BODY.replace("%rd12, 0, 1, 1", "%rd12, 1, 1, 1"), ALL[0])
    assert np.isnan(d).all() or not report.ok


def test_divergent_descriptor() -> None:
    report, _, _ = run(BODY.replace("    wgmma.fence", "cvt.u64.u32 %rd20, %r0;\nadd.s64 %rd11, %rd11, %rd20;\n    wgmma.fence", 1), ALL[0])
    assert kinds(report) == {"divergence"}


def test_one_warp_missing() -> None:
    skip = "setp.ge.u32 %p5, %r0, 96;\n@%p5 bra OUT;\n    wgmma.fence"
    report, _, _ = run(BODY.replace("    wgmma.fence", skip, 1) + "OUT:\nbar.sync 1, 128;\n", ALL[0])
    assert kinds(report) == {"deadlock"}
    assert "warpgroup" in str(report.findings)


# ---------------------------------------------------------------- operands in use

each_order = pytest.mark.parametrize("policy", [Policy.named("round_robin"), LAZY, Policy.named("adversarial")])
WGMMA_WAIT = "    wgmma.wait_group.sync.aligned 0;\n"
BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
STORE_A = "@!%p20 st.shared.u32 [%r100+1024], 0x3C003C00;\n"
STORE_B = "@!%p20 st.shared.u32 [%r100+3324], 0;\n"
STORE_BEYOND = "@!%p20 st.shared.u32 [%r100+3328], 0;\n"
CP_ASYNC = "@!%p20 cp.async.cg.shared.global [%r100+1024], [%rd10], 16;\ncp.async.wait_all;\n"
COPY = f"""
    @%p20 bra COPIED;
    mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r100], 16;
    {BULK} [%r100+3056], [%rd10], 16, [%r100];
COPIED:
AGAIN:
    mbarrier.try_wait.parity.shared.b64 %p21, [%r100], 1, 10000000;
    @!%p21 bra AGAIN;
"""


@each_order
@pytest.mark.parametrize("access", [STORE_A, STORE_B, COPY, CP_ASYNC], ids=["store to A", "store to B", "copy to A", "cp.async to A"])
def test_operands_of_a_wgmma(access: str, policy: Policy) -> None:
    """Overwriting an operand before wgmma.wait_group is found; after it, and beside it, is fine."""
    early, d, expected = run(BODY.replace(WGMMA_WAIT, access + WGMMA_WAIT), policy)
    assert access != STORE_A or policy is not LAZY or not np.array_equal(d, expected)  # which computes as late as it may
    assert kinds(early) - {"barrier_lapped"} == {"missing_wait"}  # the copy does not wait for the other warps either
    assert "wgmma" in early.findings[0].message
    late, d, expected = run(BODY.replace(WGMMA_WAIT, WGMMA_WAIT + access), policy)
    assert late.ok, late.findings
    assert (d == expected).all()


@each_order
def test_bytes_beside_an_operand_are_free(policy: Policy) -> None:
    report, _, _ = run(BODY.replace(WGMMA_WAIT, STORE_BEYOND + WGMMA_WAIT), policy)
    assert report.ok, report.findings


@each_order
def test_an_older_group_stays_in_use(policy: Policy) -> None:
    """wait_group 1 frees the first of two groups only."""
    second = "    wgmma.commit_group.sync.aligned;\n    wgmma.wait_group.sync.aligned 1;\n" + STORE_A
    report, _, _ = run(BODY.replace(WGMMA_WAIT, WGMMA_WAIT.replace(" 0;", " 1;") + STORE_A + WGMMA_WAIT), policy)
    assert kinds(report) == {"missing_wait"}
    report, _, _ = run(BODY.replace(WGMMA_WAIT, second + WGMMA_WAIT), policy)
    assert report.ok, report.findings


# ---------------------------------------------------------------- wgmma.fence

FENCE = "    wgmma.fence.sync.aligned;\n"
AGAIN = (
    "    add.f32 %r11, %r11, %r11;\n%fence"
    + MMA.splitlines()[1]
    + "\n    wgmma.commit_group.sync.aligned;\n    wgmma.wait_group.sync.aligned 0;\n"
)
FROM_REGISTERS = """    cvt.rn.f16x2.f32 %r30, %r10, %r11;
%fence    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r10, %r11, %r12, %r13}, {%r30, %r30, %r30, %r30}, %rd12, 1, 1, 1, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
"""


def with_more(more: str, fence: str) -> str:
    """BODY with another product behind its own."""
    return BODY.replace("    mul.wide.u32 %rd3, %r0, 16;", more.replace("%fence", fence) + "    mul.wide.u32 %rd3, %r0, 16;")


@each_policy
def test_missing_fence(policy: Policy) -> None:
    report, d, expected = run(BODY.replace(FENCE, ""), policy)
    assert kinds(report) == {"missing_fence"}
    assert [finding.ptx_line for finding in report.findings] == lines_of(BODY.replace(FENCE, ""), "wgmma.mma_async", 2)
    np.testing.assert_array_equal(d, expected)
    for more in (AGAIN, FROM_REGISTERS):
        assert run(with_more(more, FENCE), policy)[0].ok
        assert kinds(run(with_more(more, ""), policy)[0]) == {"missing_fence"}


def test_a_fence_on_one_path_only() -> None:
    """The accumulator is doubled where nobody goes, but somebody could."""
    doubled = "setp.gt.u32 %p5, %r0, 200;\n@!%p5 bra KEEP;\nadd.f32 %r11, %r11, %r11;\n%fenceKEEP:\n" + AGAIN.split("%fence")[1]
    assert run(with_more(doubled, FENCE), LAZY)[0].ok
    assert kinds(run(with_more(doubled, ""), LAZY)[0]) == {"missing_fence"}


def test_reads_and_moves_need_no_fence() -> None:
    copied = AGAIN.replace("add.f32 %r11, %r11, %r11;", "add.f32 %r31, %r11, %r11;\nmov.b32 %r11, %r12;")
    assert run(with_more(copied, ""), LAZY)[0].ok

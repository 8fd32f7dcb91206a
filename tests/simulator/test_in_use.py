"""Shared memory that asynchronous work still uses: touching it is found at the access, also where no value comes out wrong."""

from __future__ import annotations

import pytest

from cute_mla.simulator import Policy
from tests.simulator import warp_wide_store as stores
from tests.simulator.small_kernels import LAZY, kinds
from tests.simulator.wgmma_kernel import BODY, run

ORDERED = [Policy.named("round_robin"), LAZY, Policy.named("adversarial")]
each_policy = pytest.mark.parametrize("policy", ORDERED)
WGMMA_WAIT = "    wgmma.wait_group.sync.aligned 0;\n"
BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
STORE_A = "@!%p20 st.shared.u32 [%r100+1024], 0;\n"
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


@each_policy
@pytest.mark.parametrize("access", [STORE_A, STORE_B, COPY, CP_ASYNC], ids=["store to A", "store to B", "copy to A", "cp.async to A"])
def test_operands_of_a_wgmma(access: str, policy: Policy) -> None:
    """Overwriting an operand before wgmma.wait_group is found; after it, and beside it, is fine."""
    early, _, _ = run(BODY.replace(WGMMA_WAIT, access + WGMMA_WAIT), policy)
    assert kinds(early) - {"barrier_lapped"} == {"missing_wait"}  # the copy does not wait for the other warps either
    assert "wgmma" in early.findings[0].message
    late, d, expected = run(BODY.replace(WGMMA_WAIT, WGMMA_WAIT + access), policy)
    assert late.ok, late.findings
    assert (d == expected).all()


@each_policy
def test_bytes_beside_an_operand_are_free(policy: Policy) -> None:
    report, _, _ = run(BODY.replace(WGMMA_WAIT, STORE_BEYOND + WGMMA_WAIT), policy)
    assert report.ok, report.findings


@each_policy
def test_an_older_group_stays_in_use(policy: Policy) -> None:
    """wait_group 1 frees the first of two groups only."""
    second = "    wgmma.commit_group.sync.aligned;\n    wgmma.wait_group.sync.aligned 1;\n" + STORE_A
    report, _, _ = run(BODY.replace(WGMMA_WAIT, WGMMA_WAIT.replace(" 0;", " 1;") + STORE_A + WGMMA_WAIT), policy)
    assert kinds(report) == {"missing_wait"}
    report, _, _ = run(BODY.replace(WGMMA_WAIT, second + WGMMA_WAIT), policy)
    assert report.ok, report.findings


@pytest.mark.parametrize("policy", [LAZY, Policy.named("adversarial")])
def test_operands_that_a_copy_still_writes(policy: Policy) -> None:
    begin, end = BODY.index("WAITING:"), BODY.index("    add.u32 %r101")
    report, _, _ = run(BODY[:begin] + BODY[end:], policy)
    assert "missing_wait" in kinds(report)
    assert "asynchronous copy" in " ".join(finding.message for finding in report.findings if finding.kind == "missing_wait")


@each_policy
def test_source_of_a_bulk_store(policy: Policy) -> None:
    """Writing to a box that a TMA store reads, before and after wait_group.read."""
    overwrite = "st.shared.b32 [%s1], %s2;\n"
    _, found = stores.store(stores.PLAIN, policy, overwrite + stores.WAIT)
    assert found == {"missing_wait"}
    _, found = stores.store(stores.PLAIN, policy, stores.WAIT + overwrite)
    assert not found

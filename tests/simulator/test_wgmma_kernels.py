"""wgmma inside kernels: bulk copies bring the operands, four warps multiply, and each rule is broken once."""

from __future__ import annotations

import numpy as np
import pytest

from cute_mla.simulator import Policy, Report
from tests.simulator.small_kernels import LAZY, Kernel, aligned, kinds, lines_of

ALL = [Policy.named("round_robin"), LAZY, *(Policy.named("random", seed) for seed in range(3)), Policy.named("adversarial")]
A_BYTES, B_BYTES = 64 * 16 * 2, 8 * 16 * 2

BODY = """
    mov.b32 %r100, smem;
    setp.ne.u32 %p20, %r0, 0;
    @%p20 bra INITIALISED;
    mbarrier.init.shared.b64 [%r100], 1;
INITIALISED:
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
    @%p20 bra LOADED;
    mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r100], 2304;
    ld.param.u64 %rd10, [p1];
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r100+1024], [%rd10], 2048, [%r100];
    add.s64 %rd10, %rd10, 2048;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r100+3072], [%rd10], 256, [%r100];
LOADED:
WAITING:
    mbarrier.try_wait.parity.shared.b64 %p21, [%r100], 0, 10000000;
    @!%p21 bra WAITING;
    add.u32 %r101, %r100, 1024;
    shr.u32 %r101, %r101, 4;
    cvt.u64.u32 %rd11, %r101;
    or.b64 %rd11, %rd11, 0x0000001000080000;
    add.s64 %rd12, %rd11, 128;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r10, %r11, %r12, %r13}, %rd11, %rd12, 0, 1, 1, 0, 0;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r10, %r11, %r12, %r13}, %rd11, %rd12, 1, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    mul.wide.u32 %rd3, %r0, 16;
    add.s64 %rd3, %rd0, %rd3;
    st.global.v4.b32 [%rd3], {%r10, %r11, %r12, %r13};
"""
MMA = BODY[BODY.index("    wgmma.mma_async") : BODY.index("    wgmma.commit")]


def cores(matrix: np.ndarray) -> np.ndarray:
    """A K-major operand without swizzle: 8x8 core matrices of 128 bytes, along k first."""
    rows = matrix.shape[0]
    return np.ascontiguousarray(matrix.reshape(rows // 8, 8, 2, 8).transpose(0, 2, 1, 3)).reshape(-1)


def run(body: str, policy: Policy) -> tuple[Report, np.ndarray, np.ndarray]:
    """Run on small random integers; returns the report, D and twice the product."""
    rng = np.random.default_rng(1)
    a = rng.integers(-4, 5, (64, 16)).astype(np.float16)
    b = rng.integers(-4, 5, (8, 16)).astype(np.float16)
    source = aligned((A_BYTES + B_BYTES) // 2, np.float16)
    source[:] = np.concatenate([cores(a), cores(b)])
    out = aligned(128 * 4, np.float32)
    report = Kernel(body, threads=128, smem=4096).run(out, source, policy=policy)
    thread = np.arange(128)[:, None]
    register = np.arange(4)[None, :]
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register // 2)
    column = 2 * (thread % 4) + register % 2
    d = np.zeros((64, 8), np.float32)
    d[row, column] = out.reshape(128, 4)
    return report, d, 2 * a.astype(np.float32) @ b.astype(np.float32).T


@pytest.mark.parametrize("policy", ALL)
def test_product(policy: Policy) -> None:
    report, d, expected = run(BODY, policy)
    assert report.ok, report.findings
    np.testing.assert_array_equal(d, expected)


@pytest.mark.parametrize("policy", ALL)
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
    assert "poison" in kinds(report)


def test_accumulator_without_initial_value() -> None:
    report, d, _ = run(BODY.replace("%rd12, 0, 1, 1", "%rd12, 1, 1, 1"), ALL[0])
    assert np.isnan(d).all() or not report.ok


def test_operand_overwritten_before_the_wait_shows_when_lazy() -> None:
    overwrite = "@!%p20 st.shared.u32 [%r100+1024], 0x3C003C00;\nwgmma.wait_group"
    changed = BODY.replace("wgmma.wait_group", overwrite)
    _, d, expected = run(changed, LAZY)
    assert not np.array_equal(d, expected)


def test_divergent_descriptor() -> None:
    report, _, _ = run(BODY.replace("    wgmma.fence", "cvt.u64.u32 %rd20, %r0;\nadd.s64 %rd11, %rd11, %rd20;\n    wgmma.fence", 1), ALL[0])
    assert kinds(report) == {"divergence"}


def test_one_warp_missing() -> None:
    skip = "setp.ge.u32 %p5, %r0, 96;\n@%p5 bra OUT;\n    wgmma.fence"
    report, _, _ = run(BODY.replace("    wgmma.fence", skip, 1) + "OUT:\nbar.sync 1, 128;\n", ALL[0])
    assert kinds(report) == {"deadlock"}
    assert "warpgroup" in str(report.findings)


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


@pytest.mark.parametrize("policy", ALL)
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

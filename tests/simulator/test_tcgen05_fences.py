"""tcgen05.fence: kernels that have any must have all that PTX wants; kernels that have none are left alone."""

from __future__ import annotations

import pytest

from cute_mla.simulator import Policy
from tests.simulator.small_kernels import kinds
from tests.simulator.tensor_kernels import PAIR, SCHEDULES, TensorKernel, commit, fill, instruction_descriptor, mma, smem_descriptor, wait

SIZE = 16 * 1024
BEFORE = "tcgen05.fence::before_thread_sync;\n"
AFTER = "tcgen05.fence::after_thread_sync;\n"
BAR = "bar.sync 0;\n"
FILLED = fill(128).replace(BAR, BEFORE + BAR + AFTER)
B = smem_descriptor(SIZE)
PRODUCT = mma(smem_descriptor(0), B, instruction_descriptor(128, 32)) + commit() + wait("$done")
FROM_CELLS = mma("64", B, instruction_descriptor(128, 32)) + commit() + wait("$done")
LOAD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r30}, [%r5];\ntcgen05.wait::ld.sync.aligned;\n"
STORE = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r5], {%r0};\ntcgen05.wait::st.sync.aligned;\n"
STORE_A = STORE.replace("[%r5]", "[%r5+64]")


def findings(program: str, policy: Policy, group: int = 1) -> list[str]:
    """Return messages of missing fences; other findings are not expected."""
    kernel = TensorKernel(program, group, image=2 * SIZE, output=False)
    report = kernel.run(policy=policy)[1]
    assert kinds(report) <= {"missing_fence"}, report.findings
    return [finding.message for finding in report.findings]


GOOD = [
    FILLED + PRODUCT + AFTER + LOAD,
    FILLED + PRODUCT + AFTER + STORE,
    FILLED + STORE_A + BEFORE + BAR + AFTER + FROM_CELLS,
    FILLED + LOAD + BEFORE + BAR + AFTER + PRODUCT,
    FILLED + PRODUCT + AFTER + LOAD + BEFORE + BAR + AFTER + PRODUCT.replace("$done", "$more").replace("+8], 0", "+8], 1") + AFTER + LOAD,
    FILLED + STORE + LOAD,  # the warp's own store
]


@pytest.mark.parametrize("policy", SCHEDULES)
@pytest.mark.parametrize("program", GOOD)
def test_complete(program: str, policy: Policy) -> None:
    assert findings(program, policy) == []


@pytest.mark.parametrize("policy", SCHEDULES)
@pytest.mark.parametrize(
    ("program", "text"),
    [
        (FILLED + PRODUCT + LOAD, "a tcgen05.ld reads tensor memory that a tcgen05.mma"),
        (FILLED + PRODUCT + STORE, "a tcgen05.st writes tensor memory that a tcgen05.mma"),
        (FILLED + PRODUCT.replace("$done_wait:", AFTER + "$done_wait:") + LOAD, "a tcgen05.ld reads"),  # too early
        (FILLED + FROM_CELLS + STORE_A, "a tcgen05.st writes tensor memory that a tcgen05.mma"),
        (FILLED + STORE_A + BAR + AFTER + FROM_CELLS, "before_thread_sync of warp"),
        (FILLED + BEFORE + STORE_A + BAR + AFTER + FROM_CELLS, "before_thread_sync of warp"),
        (FILLED + STORE_A + BEFORE + BAR + FROM_CELLS, "after_thread_sync of warp 0"),
        (FILLED + STORE_A + BEFORE + AFTER + BAR + FROM_CELLS, "after_thread_sync of warp 0"),
        (FILLED + LOAD + BAR + AFTER + PRODUCT, "a tcgen05.mma writes tensor memory that a tcgen05.ld"),
        (FILLED + LOAD + BEFORE + BAR + PRODUCT, "a tcgen05.mma writes tensor memory that a tcgen05.ld"),
    ],
)
def test_incomplete(program: str, text: str, policy: Policy) -> None:
    assert any(text in message for message in findings(program, policy))


@pytest.mark.parametrize("program", GOOD)
def test_kernels_without_fences(program: str) -> None:
    """NVIDIA's kernels have none, or those before dealloc; the machine code has nothing for them."""
    bare = program.replace(BEFORE, "").replace(AFTER, "")
    for policy in SCHEDULES:
        assert findings(bare, policy) == []
    assert findings(bare + BEFORE, SCHEDULES[0]) == []


@pytest.mark.parametrize("policy", SCHEDULES)
def test_pair(policy: Policy) -> None:
    """Both CTAs store what the even CTA's product reads in both."""
    product = mma("64", B, instruction_descriptor(256, 32), group=2) + commit(2) + wait("$done")
    store = FILLED.replace(BAR, PAIR) + STORE_A
    assert findings(store + BEFORE + PAIR + AFTER + product + AFTER + LOAD, policy, 2) == []
    assert any("before_thread_sync" in message for message in findings(store + PAIR + AFTER + product, policy, 2))
    assert findings(store + BEFORE + PAIR + product, policy, 2)
    assert findings(store + BEFORE + PAIR + AFTER + product + LOAD, policy, 2)

"""TMA stores that a whole warp issues without electing a lane, as CuTe-DSL's public kernels do."""

from __future__ import annotations

import numpy as np
import pytest

from cute_mla.simulator import Policy
from cute_mla.simulator.numerics import tma
from cute_mla.simulator.units import boxes
from cute_mla.spec.tensor_map import TensorMap
from tests.simulator.small_kernels import LAZY, Kernel, aligned, kinds

STORE = """
    .reg .b32 %s<4>;
    .reg .b64 %sd<4>;
    mov.b32 %s0, smem;
    shl.b32 %s1, %r0, 2;
    add.s32 %s1, %s1, %s0;
    add.s32 %s2, %r0, 1;
    st.shared.b32 [%s1], %s2;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    mov.b64 %sd0, p1;
    cvta.param.u64 %sd1, %sd0;
    mov.b32 %s3, 0;
    OPCODE [%sd1, {%s3, %s3}], [%s0];
    cp.async.bulk.commit_group;
    WAIT
"""
PLAIN = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
ADD = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"
WAIT = "cp.async.bulk.wait_group.read 0;"


def store(opcode: str, policy: Policy | None, wait: str = WAIT) -> tuple[np.ndarray, set[str]]:
    """Store 4 rows of 8 numbers from 32 threads; the output and the kinds of findings."""
    out = aligned(32, np.int32)
    described = TensorMap("i32", out.ctypes.data, (8, 4), (32,), (8, 4))
    report = Kernel(STORE.replace("OPCODE", opcode).replace("WAIT", wait), smem=1024).run(out, described, policy=policy)
    return out, kinds(report)


@pytest.mark.parametrize("policy", [None, LAZY, Policy.named("random", 1)])
def test_lanes_with_the_same_box_move_it_once(policy: Policy | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One read of shared memory for 32 lanes, and the right values."""
    reads: list[tma.Box] = []
    original = tma.read_shared

    def counting(box: tma.Box, smem: np.ndarray) -> np.ndarray:
        reads.append(box)
        return original(box, smem)

    monkeypatch.setattr(boxes.tma, "read_shared", counting)
    out, found = store(PLAIN, policy)
    assert not found
    assert out.tolist() == list(range(1, 33))
    assert len(reads) == 2  # data and shadow


def test_additions_count_for_every_lane() -> None:
    """A reduction is not idempotent: 32 lanes add 32 times."""
    out, found = store(ADD, None)
    assert not found
    assert out.tolist() == [32 * value for value in range(1, 33)]


@pytest.mark.parametrize("policy", [None, LAZY, Policy.named("random", 1), Policy.named("adversarial")])
def test_a_missing_wait_is_found_in_every_schedule(policy: Policy | None) -> None:
    """Neither a shared copy nor one that happens to complete early hides that nobody waits for it."""
    _, found = store(PLAIN, policy, "")
    assert found == {"unfinished"}

"""TMA stores that a whole warp issues without electing a lane, as CuTe-DSL's public kernels do."""

from __future__ import annotations

import numpy as np
import pytest

from cute_mla.simulator import Policy
from cute_mla.simulator.numerics import tma
from cute_mla.simulator.units import boxes
from tests.simulator.small_kernels import LAZY
from tests.simulator.warp_wide_store import ADD, PLAIN, WAIT, store


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


@pytest.mark.parametrize("policy", [None, LAZY, Policy.named("adversarial")])
def test_source_of_a_bulk_store(policy: Policy | None) -> None:
    """Writing to a box that a TMA store reads, before and after wait_group.read."""
    overwrite = "st.shared.b32 [%s1], %s2;\n"
    _, found = store(PLAIN, policy, overwrite + WAIT)
    assert found == {"missing_wait"}
    _, found = store(PLAIN, policy, WAIT + overwrite)
    assert not found

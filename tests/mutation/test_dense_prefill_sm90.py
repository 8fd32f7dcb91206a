"""Deliberately broken dense prefill kernels for Hopper: the cases must find each of them wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from cute_mla.spec.arch import SM90
from cute_mla.testing.cases.dense_prefill import DensePrefillCase
from tests.mutation.planted_bugs import Workshop

# One CTA walks items of two tiles, one and none; rows that see nothing, and a maximum that moves from tile to tile.
WALK = DensePrefillCase(
    lengths=((130, 129), (0, 40), (64, 257), (5, 0), (3, 65)), causal=True, values="falling", outputs="given", sm_count=1
)

WAITS = r"mbarrier\.try_wait\.parity\.shared\.b64 +P1, [^;]*;"
NO_WAIT = "setp.eq.u32 P1, 0, 0;"
# In the order of the PTX.
WAITED = (
    "key_free", "value_free", "value_landed", "query_free of warpgroup 0", "query_free of warpgroup 1", "query_ready",
    "key_ready of an item's first tile", "value_ready of the item before", "key_ready", "value_ready", "value_ready of the last item",
)  # fmt: skip
ARRIVALS = r"mbarrier\.arrive\.shared\.b64 [^;]*;"


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """Breaks kernels of SM90."""
    return Workshop.open(SM90, tmp_path, monkeypatch)


def test_the_unbroken_kernel_passes(workshop: Workshop) -> None:
    workshop.check_unbroken(WALK)


@pytest.mark.parametrize("name", WAITED)
def test_a_missing_wait(name: str, workshop: Workshop) -> None:
    waits = workshop.places(WALK, WAITS)
    assert len(waits) == len(WAITED), "the planted bugs are out of date"
    assert workshop.is_found(WALK, NO_WAIT, [waits[WAITED.index(name)]])


def test_a_missing_arrival(workshop: Workshop) -> None:
    """The last one frees values behind all items, which nobody waits for."""
    for arrival in workshop.places(WALK, ARRIVALS)[:-1]:
        assert workshop.is_found(WALK, "", [arrival]), arrival[0]


def test_turns_that_are_not_given(workshop: Workshop) -> None:
    assert workshop.survivors(WALK, r"bar\.arrive\s+%r\d+, 256;", "") == []


def test_turns_that_are_not_taken(workshop: Workshop) -> None:
    """One of the first products of an item alone would change nothing but the order in which the warpgroups issue."""
    for turn in workshop.places(WALK, r"bar\.sync\s+%r\d+, 256;")[1:]:
        assert workshop.is_found(WALK, "", [turn])


# The waits for all products; what the fifth waits for, the next one does, too.
COMPLETE = ("P V of the tile before", "P V of the item before", "P V of a tile", "P V of an item", None, "P V of the last item")


@pytest.mark.parametrize("name", [name for name in COMPLETE if name])
def test_products_that_are_not_waited_for(name: str, workshop: Workshop) -> None:
    waits = workshop.places(WALK, r"(wgmma\.wait_group\.sync\.aligned\s+)0;")
    assert len(waits) == len(COMPLETE), "the planted bugs are out of date"
    assert workshop.is_found(WALK, r"\g<1>1;", [waits[COMPLETE.index(name)]])


def test_scores_that_are_not_waited_for(workshop: Workshop) -> None:
    assert workshop.survivors(WALK, r"(wgmma\.wait_group\.sync\.aligned\s+)1;", r"\g<1>2;") == []


def test_a_missing_fence_before_products(workshop: Workshop) -> None:
    assert workshop.survivors(WALK, r"wgmma\.fence\.sync\.aligned;", "") == []


def test_values_behind_the_end_that_are_not_cleared(workshop: Workshop) -> None:
    """P is 0 there, and 0 times NaN is NaN."""
    assert workshop.is_found(WALK, "", workshop.places(WALK, r"st\.shared\.v4\.b32 .*\{0, 0, 0, 0\};"))


def test_cleared_values_that_are_not_published(workshop: Workshop) -> None:
    (fence,) = workshop.places(WALK, r"fence\.proxy\.async[^;]*;")
    assert workshop.is_found(WALK, "", [fence])


def test_too_few_bytes_waited_for(workshop: Workshop) -> None:
    assert workshop.survivors(WALK, r"(mbarrier\.arrive\.expect_tx[^;]*, )(?:%r\d+|\d+);", r"\g<1>512;") == []


def test_no_mask(workshop: Workshop) -> None:
    masks = workshop.places(WALK, r"selp\.f32 \t(%r\d+), \1, 0fFF800000, %p\d+;")
    assert workshop.is_found(WALK, "", masks)
    assert workshop.is_found(WALK, "", masks[:1])


def test_logarithms_in_base_2(workshop: Workshop) -> None:
    assert workshop.is_found(WALK, "0f3F800000", workshop.places(WALK, "0f3F317218"))

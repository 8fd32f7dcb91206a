"""Deliberately broken dense prefill kernels for Blackwell: the cases must find each of them wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cute_mla.spec.arch import SM100
from cute_mla.testing.cases.dense_prefill import DensePrefillCase
from tests.mutation.planted_bugs import Workshop

# One CTA walks items of three tiles, two, one and none, with one Q tile or both; rows that see nothing, and a maximum that moves
# from tile to tile.
WALK = DensePrefillCase(
    lengths=((130, 129), (0, 40), (3, 65), (64, 257), (5, 0), (150, 100), (200, 30)), causal=True, values="falling", outputs="given",
    sm_count=1,
)  # fmt: skip

WAITS = r"mbarrier\.try_wait\.parity\.shared\.b64 +P1, [^;]*;"
NO_WAIT = "setp.eq.u32 P1, 0, 0;"
# In the order of the PTX. None: slots that come free with others that are waited for; and the values that the softmax roles clear,
# which have landed long before under every schedule.
WAITED = (
    "item_ready of softmax", "scores_ready of softmax", None, None, "sums_free",
    "item_ready of output", "alpha_ready of tile 0", "alpha_ready of tile 1", "output_ready of tile 0", "sums_ready of tile 0",
    "output_ready of tile 1", "sums_ready of tile 1",
    "item_ready of mma", "kv_ready of values", "kv_ready of other values", "probs_ready of tile 0", "rest_ready of tile 0",
    "kv_ready of keys", "kv_ready of other keys", "kv_ready of the last keys", "query_ready of tile 0", "probs_ready of tile 1",
    "rest_ready of tile 1", "query_ready of tile 1",
    "item_free", None, "kv_free of keys", None, "query_free of tile 0", "query_free of tile 1", "kv_free of values", None, None,
)  # fmt: skip


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """Breaks kernels of SM100."""
    return Workshop.open(SM100, tmp_path, monkeypatch)


def test_the_unbroken_kernel_passes(workshop: Workshop) -> None:
    workshop.check_unbroken(WALK)


@pytest.mark.parametrize("name", [name for name in WAITED if name])
def test_a_missing_wait(name: str, workshop: Workshop) -> None:
    waits = workshop.places(WALK, WAITS)
    assert len(waits) == len(WAITED), "the planted bugs are out of date"
    assert workshop.is_found(WALK, NO_WAIT, [waits[WAITED.index(name)]])


def test_a_missing_arrival(workshop: Workshop) -> None:
    assert workshop.survivors(WALK, r"mbarrier\.arrive\.shared\.b64 [^;]*;", "") == []


def test_a_missing_commit(workshop: Workshop) -> None:
    assert workshop.survivors(WALK, r"tcgen05\.commit[^;]*;", "") == []


def test_no_wait_for_stores(workshop: Workshop) -> None:
    """Of P, in two parts, and of O that was rescaled."""
    assert workshop.survivors(WALK, r"tcgen05\.wait::st[^;]*;", "") == []


def test_values_behind_the_end_that_are_not_cleared(workshop: Workshop) -> None:
    """P is 0 there, and 0 times NaN is NaN."""
    assert workshop.is_found(WALK, "", workshop.places(WALK, r"st\.shared\.v4\.b32 .*\{0, 0, 0, 0\};"))


def test_cleared_values_that_are_not_published(workshop: Workshop) -> None:
    (fence,) = workshop.places(WALK, r"fence\.proxy\.async[^;]*;")
    assert workshop.is_found(WALK, "", [fence])


def test_too_few_bytes_waited_for(workshop: Workshop) -> None:
    sizes = workshop.places(WALK, r"(mbarrier\.arrive\.expect_tx[^;]*, )(?:%r\d+|\d+);")
    for size in (sizes[0], sizes[3], sizes[-1]):
        assert workshop.is_found(WALK, r"\g<1>512;", [size])


@pytest.mark.parametrize("word", range(5))
def test_no_mask(word: int, workshop: Workshop) -> None:
    """Of 32 of the 128 keys of a tile. The last 32 are masked twice, for the maximum, which fp16 can tell and bf16 cannot, and for
    the probabilities."""
    case = replace(WALK, dtype="fp16", values="rising")
    masks = workshop.places(case, r"(setp\.gt\.s32 \t%p\d+, %r\d+, 31;\s+)selp\.b32 \t(%r\d+), 0, %r\d+, %p\d+;")
    assert len(masks) == 5, "the planted bugs are out of date"
    assert workshop.is_found(case, r"\1mov.b32 \2, 0;", [masks[word]])


def test_logarithms_in_base_2(workshop: Workshop) -> None:
    assert workshop.is_found(WALK, "0f3F800000", workshop.places(WALK, "0f3F317218"))

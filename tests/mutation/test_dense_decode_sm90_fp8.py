"""Deliberately broken dense decode kernels for Hopper with e4m3 operands: the cases must find each of them wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cute_mla.spec.arch import SM90
from cute_mla.spec.dense_decode import FP8
from cute_mla.testing.cases.dense_decode import DenseDecodeCase
from tests.mutation.planted_bugs import Workshop

# One CTA walks three requests: enough tiles to go round every ring of buffers, keys past the end, masked rows.
WALK = DenseDecodeCase(batch=3, s_q=2, lengths=(500, 70, 300), h_q=9, causal=True, operands=FP8, sm_count=1)
PAIR = replace(WALK, h_q=64)  # two row tiles, a cluster of two CTAs
RISING = replace(WALK, values="rising")
SHORT = replace(WALK, batch=8, lengths=(60,) * 8)  # so short that a role may be several requests ahead of another

WAITS = r"mbarrier\.try_wait\.parity\.shared\.b64 +P1, [^;]*;"
NO_WAIT = "setp.eq.u32 P1, 0, 0;"
WAITED = (  # in the order of the PTX
    "keys_free",
    "kv_ready before it is transposed",
    "values_ready before the slot is written again",
    "values_free",
    "kv_ready[0]",
    "kv_ready[1]",
    "kv_ready[2]",
    "kv_ready[3]",
    "rope_ready",
    "probs_free",
    "values_ready of the first chunk",
    "values_ready of the second chunk",
    "probs_ready",
)


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """Breaks kernels of SM90."""
    return Workshop.open(SM90, tmp_path, monkeypatch)


@pytest.mark.parametrize("case", [WALK, PAIR, SHORT], ids=["alone", "cluster", "short"])
def test_the_unbroken_kernel_passes(case: DenseDecodeCase, workshop: Workshop) -> None:
    workshop.check_unbroken(case)


@pytest.mark.parametrize("case", [WALK, PAIR], ids=["alone", "cluster"])
def test_a_missing_arrival(case: DenseDecodeCase, workshop: Workshop) -> None:
    arrivals = r"mbarrier\.arrive\.(?:release\.cluster\.)?shared(?:::cluster)?\.b64 [^;]*;"
    assert workshop.survivors(case, arrivals, "") == []


@pytest.mark.parametrize("index", range(len(WAITED)), ids=WAITED)
def test_a_missing_wait(index: int, workshop: Workshop) -> None:
    waits = workshop.places(WALK, WAITS)
    assert len(waits) == len(WAITED), "the planted bugs are out of date"
    assert workshop.is_found(WALK, NO_WAIT, [waits[index]])


@pytest.mark.parametrize("case", [WALK, PAIR], ids=["alone", "cluster"])
def test_a_missing_copy(case: DenseDecodeCase, workshop: Workshop) -> None:
    assert workshop.survivors(case, r"cp\.async\.bulk\.tensor[^;]*;", "") == []


def test_a_wrong_count_of_bytes(workshop: Workshop) -> None:
    assert workshop.survivors(WALK, r"(mbarrier\.arrive\.expect_tx[^;]*, )%r\d+;", r"\g<1>4096;") == []


def test_a_wrong_count_of_arrivals(workshop: Workshop) -> None:
    counts = r"(mbarrier\.init\.shared\.b64 [^;]*, )%r\d+;"
    assert workshop.is_found(WALK, r"\g<1>3;", workshop.places(WALK, counts))


def test_no_wait_for_matrix_products(workshop: Workshop) -> None:
    assert workshop.survivors(WALK, r"wgmma\.wait_group\.sync\.aligned\s+\d;", "") == []


def test_masking_that_does_nothing(workshop: Workshop) -> None:
    masks = r"selp\.f32 (\s*%r\d+, (%r\d+)), 0fFF800000"
    assert workshop.is_found(WALK, r"selp.f32 \1, \2", workshop.places(WALK, masks))


KEPT_KEYS = (r"selp\.b32 (\s*%r\d+, (255|65280|16711680|-16777216)), 0,", r"selp.b32 \1, \2,")


def test_values_past_the_end_that_are_kept(workshop: Workshop) -> None:
    pattern, replacement = KEPT_KEYS
    assert workshop.survivors(WALK, pattern, replacement) == []


@pytest.mark.parametrize(("right", "wrong"), [("0x6420U", "0x6240U"), ("0x7531U", "0x7351U")], ids=["even columns", "odd columns"])
def test_keys_in_another_order_than_in_p(right: str, wrong: str, workshop: Workshop) -> None:
    assert workshop.is_found(WALK, wrong, workshop.places(WALK, right))


def test_columns_that_change_places(workshop: Workshop) -> None:
    assert workshop.is_found(WALK, "0x7531U", workshop.places(WALK, "0x6420U"))


def test_rows_of_ones_that_are_not_written(workshop: Workshop) -> None:
    assert workshop.survivors(WALK, r"st\.shared\.v4\.b32 \s*\[[^]]*\], \{943208504[^}]*\};", "") == []


def test_rows_of_twos(workshop: Workshop) -> None:
    assert workshop.is_found(WALK, "1077952576", workshop.places(WALK, "943208504"))


def test_lse_in_base_2(workshop: Workshop) -> None:
    assert workshop.survivors(WALK, "0f3F317218", "0f3F800000") == []


def test_probabilities_beyond_e4m3(workshop: Workshop) -> None:
    """The greatest of a tile at 2^12 for 2^8: cut off at 448, those of very different scores are alike."""
    assert workshop.is_found(RISING, "0fC1400000", workshop.places(RISING, "0fC1000000"))


@pytest.mark.parametrize("index", range(3), ids=["V^T", "P", "ones"])
def test_a_missing_proxy_fence(index: int, workshop: Workshop) -> None:
    fences = workshop.places(WALK, r"fence\.proxy\.async[^;]*;")
    assert len(fences) == 3, "the planted bugs are out of date"
    assert workshop.is_found(WALK, "", [fences[index]])


def test_a_missing_barrier_behind_the_ones(workshop: Workshop) -> None:
    assert workshop.is_found(WALK, "", workshop.places(WALK, r"bar\.sync\s+%r\d+, 128;"))

"""Deliberately broken dense decode kernels for Hopper: the cases must find each of them wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cute_mla.spec.arch import SM90
from cute_mla.testing.cases.dense_decode import DenseDecodeCase
from tests.mutation.planted_bugs import Workshop

# One CTA walks three requests: enough tiles to go round every ring of buffers, keys past the end, masked rows.
WALK = DenseDecodeCase(batch=3, s_q=2, lengths=(500, 70, 300), h_q=9, causal=True, sm_count=1)
PAIR = replace(WALK, h_q=64)  # two row tiles, a cluster of two CTAs
SHORT = replace(WALK, batch=8, lengths=(60,) * 8)  # so short that a role may be several requests ahead of another

WAITS = r"mbarrier\.try_wait\.parity\.shared\.b64 +P1, [^;]*;"
WAIT_COUNT = 12  # kv_free 4; kv_ready 4, rope_ready, stats_free; probs_ready, stats_ready
NO_WAIT = "setp.eq.u32 P1, 0, 0;"


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


@pytest.mark.parametrize(
    ("case", "first", "count"),
    [(WALK, 0, 4), (WALK, 4, 5), (SHORT, 9, 1), (WALK, 10, 1), (SHORT, 11, 1)],
    ids=["kv_free", "kv_ready and rope_ready", "stats_free", "probs_ready", "stats_ready"],
)
def test_missing_waits(case: DenseDecodeCase, first: int, count: int, workshop: Workshop) -> None:
    waits = workshop.places(case, WAITS)
    assert len(waits) == WAIT_COUNT, "the planted bugs are out of date"
    assert workshop.is_found(case, NO_WAIT, waits[first : first + count])


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


def test_unused_rows_that_are_not_cleared(workshop: Workshop) -> None:
    assert workshop.survivors(WALK, r"st\.shared\.v4\.b32 \s*\[[^]]*\], \{0, 0, 0, 0\};", "") == []


def test_lse_in_base_2(workshop: Workshop) -> None:
    assert workshop.survivors(WALK, "0f3F317218", "0f3F800000") == []


RACES = (r"fence\.proxy\.async[^;]*;", r"bar\.sync\s+(1|%r\d+), 128;")


@pytest.mark.parametrize("pattern", RACES, ids=["proxy fences", "named barriers"])
def test_missing_fences_and_barriers(pattern: str, workshop: Workshop) -> None:
    assert workshop.is_found(WALK, "", workshop.places(WALK, pattern))

"""Deliberately broken sparse decode kernels for Hopper: the cases must find each of them wrong. The roles that sparse and dense
decode share are broken in test_dense_decode_sm90.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cute_mla.spec.arch import SM90
from cute_mla.testing.cases.sparse_decode import Pool, SparseDecodeCase
from tests.mutation.planted_bugs import Workshop

# One CTA, tiles enough to go round the rings, indices of every kind, lengths that end inside a tile.
ALONE = SparseDecodeCase(batch=2, h_q=9, main=Pool(400, 390, 61, lengths=(390, 70)), indices="mixed", sinks="drawn", sm_count=1)
PAIR = replace(ALONE, h_q=128, sm_count=2)  # each CTA converts half of the keys for both
BOTH = pytest.mark.parametrize("case", [ALONE, PAIR], ids=["alone", "pair"])


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """Breaks kernels of SM90."""
    return Workshop.open(SM90, tmp_path, monkeypatch)


@BOTH
def test_the_unbroken_kernel_passes(case: SparseDecodeCase, workshop: Workshop) -> None:
    workshop.check_unbroken(case)


@BOTH
def test_a_missing_arrival(case: SparseDecodeCase, workshop: Workshop) -> None:
    arrivals = r"mbarrier\.arrive\.(?:release\.cluster\.)?shared(?:::cluster)?\.b64 [^;]*;"
    assert workshop.survivors(case, arrivals, "") == []


@BOTH
def test_no_proxy_fence(case: SparseDecodeCase, workshop: Workshop) -> None:
    assert workshop.is_found(case, "", workshop.places(case, r"fence\.proxy\.async[^;]*;"))


def test_a_missing_copy_to_the_peer(workshop: Workshop) -> None:
    assert workshop.survivors(PAIR, r"cp\.async\.bulk\.shared::cluster[^;]*;", "") == []


def test_a_wrong_count_of_bytes(workshop: Workshop) -> None:
    assert workshop.survivors(PAIR, r"(mbarrier\.arrive\.expect_tx[^;]*, )(?:%r\d+|\d+);", r"\g<1>512;") == []


def test_masking_that_does_nothing(workshop: Workshop) -> None:
    masks = r"selp\.f32 (\s*%r\d+), (?:(%r\d+), 0fFF800000|0fFF800000, (%r\d+)),"
    assert workshop.is_found(ALONE, r"selp.f32 \1, \2\3, \2\3,", workshop.places(ALONE, masks))


def test_a_sink_in_base_2(workshop: Workshop) -> None:
    assert workshop.is_found(ALONE, "0f3F800000", workshop.places(ALONE, "0f3FB8AA3B"))

"""Deliberately broken sparse decode kernels for Blackwell: the cases must find each of them wrong. The roles that sparse and
dense decode share are broken in test_dense_decode_sm100.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from cute_mla.spec.arch import SM100
from cute_mla.testing.cases.sparse_decode import Pool, SparseDecodeCase
from tests.mutation.planted_bugs import Workshop

# One pair of CTAs, tiles enough to go round the ring, indices of every kind, lengths that end inside a tile.
WALK = SparseDecodeCase(batch=2, h_q=9, main=Pool(400, 390, 61, lengths=(390, 70)), indices="mixed", sinks="drawn", sm_count=2)


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """Breaks kernels of SM100."""
    return Workshop.open(SM100, tmp_path, monkeypatch)


def test_the_unbroken_kernel_passes(workshop: Workshop) -> None:
    workshop.check_unbroken(WALK)


def test_masking_that_does_nothing(workshop: Workshop) -> None:
    masks = r"selp\.f32 (\s*%r\d+), (%r\d+), 0fFF800000,"
    assert workshop.is_found(WALK, r"selp.f32 \1, \2, \2,", workshop.places(WALK, masks))


def test_a_row_or_scales_of_another_key(workshop: Workshop) -> None:
    shuffles = workshop.places(WALK, r"shfl\.sync\.idx\.b32 (\s*%r\d+), (%r\d+), %r\d+, 31, -1;")
    for shuffle in (shuffles[0], shuffles[-1]):
        assert workshop.is_found(WALK, r"shfl.sync.idx.b32 \1, \2, 0, 31, -1;", [shuffle])


def test_a_sink_in_base_2(workshop: Workshop) -> None:
    assert workshop.is_found(WALK, "0f3F800000", workshop.places(WALK, "0f3FB8AA3B"))


def test_no_signal_of_the_gather_role(workshop: Workshop) -> None:
    signals = workshop.places(WALK, r"mbarrier\.arrive\.shared(?:::cluster)?\.b64 [^;]*;")
    for signal in signals[-2:]:
        assert workshop.is_found(WALK, "", [signal])


def test_no_proxy_fence(workshop: Workshop) -> None:
    assert workshop.is_found(WALK, "", workshop.places(WALK, r"fence\.proxy\.async[^;]*;"))

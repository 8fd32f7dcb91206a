"""Deliberately broken sparse prefill kernels for Hopper: the cases must find each of them wrong. What the kernel shares with
decode is broken in test_dense_decode_sm90.py and test_sparse_decode_sm90.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cute_mla.spec.arch import SM90
from cute_mla.testing.cases.sparse_prefill import SparsePrefillCase
from tests.mutation.planted_bugs import Workshop

# One CTA walks tokens of none, one and many tiles, some of which have no valid index: in front, in the middle, all.
ALONE = SparsePrefillCase(s_q=6, h_q=9, s_kv=250, topk=250, lengths=(130, 200, 200, 70, 250, 0), indices="mixed", sinks="drawn", sm_count=1)
PAIR = replace(ALONE, s_q=3, lengths=(130, 200, 70), h_q=128, sm_count=2)  # each CTA gathers half of the keys for both
BOTH = pytest.mark.parametrize("case", [ALONE, PAIR], ids=["alone", "pair"])
SPARSE = SparsePrefillCase(s_q=2, h_q=3, s_kv=3, topk=330, sm_count=1)  # most tiles with keys have one

WAITS = r"mbarrier\.try_wait\.parity\.shared\.b64 +P1, [^;]*;"
NO_WAIT = "setp.eq.u32 P1, 0, 0;"
# The first waits in the order of the PTX. None: found only by a rare schedule, or implied by another one.
WAITED = ("valid_ready of copy", None, None, "kv_free", None, None, *["landed"] * 5, "rope_free of scout")
OF_COURIER = 5  # arrivals and fences: four slots, RoPE columns
OF_SCOUT = 1


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """Breaks kernels of SM90."""
    return Workshop.open(SM90, tmp_path, monkeypatch)


@pytest.mark.parametrize("case", [ALONE, PAIR, SPARSE], ids=["alone", "pair", "sparse"])
def test_the_unbroken_kernel_passes(case: SparsePrefillCase, workshop: Workshop) -> None:
    workshop.check_unbroken(case)


@pytest.mark.parametrize("i", [i for i, name in enumerate(WAITED) if name])
def test_a_missing_wait(i: int, workshop: Workshop) -> None:
    assert workshop.is_found(ALONE, NO_WAIT, [workshop.places(ALONE, WAITS)[i]])


def test_copies_that_nobody_is_told_of(workshop: Workshop) -> None:
    assert workshop.survivors(ALONE, r"cp\.async\.mbarrier\.arrive[^;]*;", "") == []


def test_a_missing_arrival(workshop: Workshop) -> None:
    for arrival in workshop.places(ALONE, r"mbarrier\.arrive\.shared\.b64 [^;]*;")[: OF_COURIER + OF_SCOUT]:
        assert workshop.is_found(ALONE, "", [arrival])


@BOTH
def test_no_proxy_fence_of_the_courier(case: SparsePrefillCase, workshop: Workshop) -> None:
    fences = workshop.places(case, r"fence\.proxy\.async[^;]*;")[:OF_COURIER]
    for fence in (fences[0], fences[-1]):
        assert workshop.is_found(case, "", [fence])


def test_a_missing_copy_to_the_peer(workshop: Workshop) -> None:
    copies = workshop.places(PAIR, r"cp\.async\.bulk\.shared::cluster[^;]*;")
    for copy in (copies[0], copies[-1]):
        assert workshop.is_found(PAIR, "", [copy])


def test_a_wrong_count_of_bytes(workshop: Workshop) -> None:
    first, *_ = workshop.places(PAIR, r"(mbarrier\.arrive\.expect_tx[^;]*, )(?:%r\d+|\d+);")
    assert workshop.is_found(PAIR, r"\g<1>512;", [first])


def test_keys_that_are_not_there_are_read(workshop: Workshop) -> None:
    sizes = workshop.places(ALONE, r"selp\.b32 (\s*%r\d+), 0, 16, %p\d+;")
    for size in (sizes[0], sizes[-1]):
        assert workshop.is_found(ALONE, r"mov.b32 \1, 16;", [size])


def test_all_keys_taken_to_be_there(workshop: Workshop) -> None:
    assert workshop.survivors(ALONE, r"vote\.sync\.ballot\.b32 (\s*%r\d+), %p\d+, -1;", r"mov.b32 \1, -1;") == []


def test_keys_taken_to_be_missing(workshop: Workshop) -> None:
    for ballot in workshop.places(ALONE, r"vote\.sync\.ballot\.b32 (\s*%r\d+), %p\d+, -1;"):
        assert workshop.is_found(SPARSE, r"mov.b32 \1, 0;", [ballot])


def test_logarithms_in_base_2(workshop: Workshop) -> None:
    assert workshop.survivors(ALONE, "0f3F317218", "0f3F800000") == []


def test_a_sink_in_base_2(workshop: Workshop) -> None:
    assert workshop.is_found(ALONE, "0f3F800000", workshop.places(ALONE, "0f3FB8AA3B"))


def test_the_maximum_of_the_last_tile_for_that_of_all(workshop: Workshop) -> None:
    kept = workshop.places(ALONE, r"max\.f32 \s*(%r\d+), \1, (%r\d+);")
    assert workshop.is_found(ALONE, r"mov.f32 \1, \2;", kept)

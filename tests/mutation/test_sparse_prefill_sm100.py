"""Deliberately broken sparse prefill kernels for Blackwell: the cases must find each of them wrong. What the kernel shares with
decode is broken in test_dense_decode_sm100.py and test_sparse_decode_sm100.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from cute_mla.spec.arch import SM100
from cute_mla.testing.cases.sparse_prefill import SparsePrefillCase
from tests.mutation.planted_bugs import Workshop

# One pair of CTAs walks tokens of none, one and many tiles, some of which have no valid index: in front, in the middle, all.
WALK = SparsePrefillCase(s_q=6, h_q=9, s_kv=250, topk=250, lengths=(130, 200, 200, 70, 250, 0), indices="mixed", sinks="drawn", sm_count=2)
SPARSE = SparsePrefillCase(s_q=2, h_q=3, s_kv=3, topk=330, sm_count=2)  # most tiles with keys have one

WAITS = r"mbarrier\.try_wait\.parity\.shared\.b64 +P1, [^;]*;"
NO_WAIT = "setp.eq.u32 P1, 0, 0;"
# In the order of the PTX: which barrier, and whether the wait is this kernel's own, or is where the others have none.
WAITED = (
    ("seen_ready of score", True),
    ("scores_ready", False),
    ("scores_ready of a tile without keys", True),
    ("stats_free", False),
    ("seen_ready of output", True),
    ("alpha_ready", False),
    ("kv_free before O is scaled", False),
    ("alpha_ready of a tile without keys", True),
    ("kv_free before O is stored", False),
    ("stats_ready", False),
    ("kv_free", False),
    ("kv_free before the CTA ends", False),
    ("query_ready", True),
    ("kv_ready", True),
    ("scores_free", False),
    ("probs_ready", False),
    ("output_ready", False),
    ("scores_free before the CTA ends", False),
)


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """Breaks kernels of SM100."""
    return Workshop.open(SM100, tmp_path, monkeypatch)


@pytest.mark.parametrize("case", [WALK, SPARSE], ids=["walk", "sparse"])
def test_the_unbroken_kernel_passes(case: SparsePrefillCase, workshop: Workshop) -> None:
    workshop.check_unbroken(case)


@pytest.mark.parametrize("name", [name for name, own in WAITED if own])
def test_a_missing_wait(name: str, workshop: Workshop) -> None:
    waits = workshop.places(WALK, WAITS)
    assert len(waits) == len(WAITED), "the planted bugs are out of date"
    assert workshop.is_found(WALK, NO_WAIT, [waits[WAITED.index((name, True))]])


def test_a_missing_arrival(workshop: Workshop) -> None:
    assert workshop.survivors(WALK, r"mbarrier\.arrive\.shared(?:::cluster)?\.b64 [^;]*;", "") == []


def test_a_tile_taken_for_empty_by_the_gather_role(workshop: Workshop) -> None:
    ballots = workshop.places(WALK, r"vote\.sync\.ballot\.b32 (\s*%r\d+), %p\d+, -1;")
    for ballot in ballots[:2]:
        assert workshop.is_found(SPARSE, r"mov.b32 \1, 0;", [ballot])


def test_a_tile_taken_for_empty_by_other_roles(workshop: Workshop) -> None:
    both_words = r"(ld\.shared\.v2\.b32\s+\{(%r\d+), %r\d+\}, [^;]*;\s*)or\.b32 (\s*%r\d+), [^;]*;"
    places = workshop.places(WALK, both_words)
    assert len(places) == 3, "score, output, mma"
    for place in places:
        assert workshop.is_found(SPARSE, r"\1mov.b32 \3, \2;", [place])


def test_a_tile_without_keys_taken_for_a_full_one(workshop: Workshop) -> None:
    either_word = r"(ld\.shared\.v2\.b32\s+\{%r\d+, %r\d+\}, [^;]*;\s*)or\.b32 (\s*%r\d+), [^;]*;"
    _, *places = workshop.places(WALK, either_word)
    for place in places:  # output and mma; to the score role all keys of such a tile are masked
        assert workshop.is_found(WALK, r"\1mov.b32 \2, 1;", [place])


def test_products_added_to_another_token(workshop: Workshop) -> None:
    first = workshop.places(WALK, r"(tcgen05\.mma[^;]*collector::a::(?:fill|lastuse) [^;]*, %r\d+), %p\d+;")[:2]
    assert workshop.is_found(WALK, r"\1, 1;", first)


def test_no_wait_for_stores_of_queries(workshop: Workshop) -> None:
    first, _, following = workshop.places(WALK, r"tcgen05\.wait::st[^;]*;")
    for wait in (first, following):
        assert workshop.is_found(WALK, "", [wait])


def test_a_missing_fence_around_queries_loaded_ahead(workshop: Workshop) -> None:
    *_, stored = workshop.places(WALK, r"tcgen05\.wait::st[^;]*;")
    before = next(fence for fence in workshop.places(WALK, r"tcgen05\.fence::before[^;]*;") if fence.start() > stored.end())
    after = [fence for fence in workshop.places(WALK, r"tcgen05\.fence::after[^;]*;") if fence.end() < stored.start()][-1]
    for fence in (before, after):
        assert workshop.is_found(WALK, "", [fence])


def test_logarithms_in_base_2(workshop: Workshop) -> None:
    assert workshop.survivors(WALK, "0f3F317218", "0f3F800000") == []


def test_the_maximum_of_the_last_tile_for_that_of_all(workshop: Workshop) -> None:
    kept = workshop.places(WALK, r"max\.f32 \s*(%r\d+), \1, (%r\d+);")
    assert workshop.is_found(WALK, r"mov.f32 \1, \2;", kept)

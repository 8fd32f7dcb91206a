"""Deliberately broken dense decode kernels for Blackwell: the cases must find each of them wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cute_mla.spec.arch import SM100
from cute_mla.testing.cases.dense_decode import DenseDecodeCase
from tests.mutation.planted_bugs import Workshop

# One pair of CTAs walks three requests: enough tiles to go round every ring, keys past the end, masked rows.
WALK = DenseDecodeCase(batch=3, s_q=2, lengths=(500, 70, 300), h_q=9, causal=True, sm_count=2)
RISING = DenseDecodeCase(batch=2, lengths=(400, 200), h_q=64, values="rising", sm_count=2)  # O is rescaled again and again
GAPS = replace(WALK, batch=8, lengths=(60, 0, 60, 0, 0, 60, 0, 60))  # a role with nothing to do may run ahead

WAITS = r"mbarrier\.try_wait\.parity\.shared\.b64 +P1, [^;]*;"
NO_WAIT = "setp.eq.u32 P1, 0, 0;"
# In the order of the PTX: which barrier, and a case that notices when nobody waits for it. None: the wait only keeps a CTA
# alive for signals that nobody else waits for, and which, on the simulator, a cluster barrier is always late enough for.
WAITED = (
    ("scores_ready", WALK),
    ("stats_free", GAPS),
    ("alpha_ready", WALK),
    ("kv_free before O is scaled", RISING),
    ("kv_free before O is stored", WALK),
    ("stats_ready", GAPS),
    ("kv_free", WALK),
    ("kv_free before the CTA ends", None),
    ("query_ready", WALK),
    ("kv_ready", WALK),
    ("scores_free", WALK),
    ("probs_ready", WALK),
    ("output_ready", WALK),
    ("scores_free before the CTA ends", None),
)


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """Breaks kernels of SM100."""
    return Workshop.open(SM100, tmp_path, monkeypatch)


@pytest.mark.parametrize("case", [WALK, RISING, GAPS], ids=["walk", "rising", "gaps"])
def test_the_unbroken_kernel_passes(case: DenseDecodeCase, workshop: Workshop) -> None:
    workshop.check_unbroken(case)


@pytest.mark.parametrize(
    ("index", "case"), [(i, case) for i, (_, case) in enumerate(WAITED) if case], ids=[name for name, case in WAITED if case]
)
def test_a_missing_wait(index: int, case: DenseDecodeCase, workshop: Workshop) -> None:
    waits = workshop.places(WALK, WAITS)
    assert len(waits) == len(WAITED), "the planted bugs are out of date"
    assert workshop.is_found(case, NO_WAIT, [waits[index]])


@pytest.mark.parametrize(
    "pattern",
    [
        r"mbarrier\.arrive\.shared(?:::cluster)?\.b64 [^;]*;",
        r"tcgen05\.commit[^;]*;",
        r"cp\.async\.bulk\.tensor[^;]*;",
        r"tcgen05\.dealloc[^;]*;",
        r"barrier\.cluster\.(?:arrive|wait)[^;]*;",
        r"bar\.sync\s+%r\d+, 64;",
    ],
    ids=["arrivals", "commits", "copies", "dealloc", "cluster barriers", "barriers of score warps"],
)
def test_something_left_out(pattern: str, workshop: Workshop) -> None:
    assert workshop.survivors(WALK, pattern, "") == []


def test_a_wrong_count_of_bytes(workshop: Workshop) -> None:
    assert workshop.survivors(WALK, r"(mbarrier\.arrive\.expect_tx[^;]*, )%r\d+;", r"\g<1>4096;") == []


def test_a_wrong_count_of_arrivals(workshop: Workshop) -> None:
    assert workshop.survivors(WALK, r"(mbarrier\.init\.shared\.b64 [^;]*, )(?:%r\d+|\d+);", r"\g<1>3;") == []


def test_a_commit_to_one_cta(workshop: Workshop) -> None:
    assert workshop.survivors(WALK, r"(tcgen05\.commit[^;]*\], )%rs\d+;", r"\g<1>1;") == []


def test_no_wait_for_stores_to_tensor_memory(workshop: Workshop) -> None:
    queries, output = workshop.places(WALK, r"tcgen05\.wait::st[^;]*;")
    assert workshop.is_found(WALK, "", [queries])
    assert workshop.is_found(RISING, "", [output])


def test_matrix_products_left_out(workshop: Workshop) -> None:
    products = workshop.places(WALK, r"tcgen05\.mma[^;]*;")
    for first, count in ((0, 1), (17, 1), (18, 1), (25, 1)):
        assert workshop.is_found(WALK, "", products[first : first + count])


def test_masking_that_does_nothing(workshop: Workshop) -> None:
    masks = r"selp\.f32 (\s*%r\d+), 0fFF800000, (%r\d+),"
    assert workshop.is_found(WALK, r"selp.f32 \1, \2, \2,", workshop.places(WALK, masks))


def test_unused_rows_that_are_not_cleared(workshop: Workshop) -> None:
    assert workshop.is_found(WALK, "", workshop.places(WALK, r"st\.shared\.v4\.b32 \s*\[[^]]*\], \{0, 0, 0, 0\};"))


def test_lse_in_base_2(workshop: Workshop) -> None:
    assert workshop.survivors(WALK, "0f3F317218", "0f3F800000") == []


@pytest.mark.parametrize("kind", ["before", "after"])
def test_a_missing_fence_of_tensor_memory(kind: str, workshop: Workshop) -> None:
    *fences, around_dealloc = workshop.places(WALK, rf"tcgen05\.fence::{kind}_thread_sync;")
    assert workshop.shipped_ptx(WALK)[around_dealloc.end() :].count("tcgen05.dealloc") == 1
    for fence in fences:
        assert workshop.is_found(WALK, "", [fence]) or workshop.is_found(RISING, "", [fence])


@pytest.mark.parametrize("pattern", [r"fence\.proxy\.async[^;]*;", r"tcgen05\.wait::ld[^;]*;"], ids=["proxy fence", "waits for loads"])
def test_something_missing_everywhere(pattern: str, workshop: Workshop) -> None:
    assert workshop.is_found(WALK, "", workshop.places(WALK, pattern))

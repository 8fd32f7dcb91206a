"""Deliberately broken e4m3 kernels of dense decode for Blackwell: what they do otherwise than the 16-bit ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cute_mla.spec.arch import SM100
from cute_mla.spec.dense_decode import FP8
from cute_mla.testing.cases.dense_decode import DenseDecodeCase
from tests.mutation.planted_bugs import Workshop
from tests.mutation.test_dense_decode_sm100 import GAPS as GAPS_16_BITS
from tests.mutation.test_dense_decode_sm100 import NO_WAIT, WAITS
from tests.mutation.test_dense_decode_sm100 import RISING as RISING_16_BITS
from tests.mutation.test_dense_decode_sm100 import WALK as WALK_16_BITS

WALK, RISING, GAPS = (replace(case, operands=FP8) for case in (WALK_16_BITS, RISING_16_BITS, GAPS_16_BITS))
STEEP = DenseDecodeCase(lengths=(400,), h_q=64, values="falling", softmax_scale=2.0, sm_count=2, operands=FP8)  # by 1,000 octaves and more

# In the order of the PTX, as in the 16-bit kernel's test. None: the wait keeps a CTA alive for signals nobody else waits for.
WAITED = (
    ("scores_ready", WALK),
    ("reference_ready of the tile before", WALK),
    ("reference_ready of the last tile", WALK),
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
    ("scores_free of the other group before the CTA ends", None),
)


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """Breaks kernels of SM100."""
    return Workshop.open(SM100, tmp_path, monkeypatch)


@pytest.mark.parametrize("case", [WALK, RISING, GAPS, STEEP], ids=["walk", "rising", "gaps", "steep"])
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
    [r"mbarrier\.arrive\.shared(?:::cluster)?\.b64 [^;]*;", r"bar\.sync\s+%r\d+, (?:64|128);", r"cp\.async\.bulk\.tensor[^;]*;"],
    ids=["arrivals", "barriers of score warps", "copies"],
)
def test_something_left_out(pattern: str, workshop: Workshop) -> None:
    assert workshop.survivors(WALK, pattern, "") == []


def test_a_wrong_count_of_arrivals(workshop: Workshop) -> None:
    first, second, *_ = workshop.places(WALK, r"(mbarrier\.init\.shared\.b64 [^;]*, )(?:%r\d+|\d+);")
    for references in (first, second):
        assert workshop.is_found(WALK, r"\g<1>3;", [references])


def test_no_wait_for_stores_to_tensor_memory(workshop: Workshop) -> None:
    queries, output = workshop.places(WALK, r"tcgen05\.wait::st[^;]*;")
    assert workshop.is_found(WALK, "", [queries])
    assert workshop.is_found(RISING, "", [output])


def test_matrix_products_left_out(workshop: Workshop) -> None:
    products = workshop.places(WALK, r"tcgen05\.mma[^;]*;")
    assert len(products) == 15
    for product in (8, 9, 11, 14):  # 9 of S, then twice two of P V and one of the sum
        assert workshop.is_found(WALK, "", [products[product]])


def test_ones_that_are_not_written(workshop: Workshop) -> None:
    (ones,) = workshop.places(WALK, r"st\.shared\.v4\.b32 \s*\[[^]]*\], \{943208504, 943208504, 943208504, 943208504\};")
    assert workshop.is_found(WALK, "", [ones])


def test_a_sum_that_is_not_scaled_with_the_output(workshop: Workshop) -> None:
    (store,) = workshop.places(RISING, r"tcgen05\.st\.sync\.aligned\.32x32b\.x1\.b32[^;]*;")
    assert workshop.is_found(RISING, "", [store])


def test_a_reference_that_falls_without_end(workshop: Workshop) -> None:
    depths = workshop.places(STEEP, r"0fC2000000")
    assert workshop.is_found(STEEP, "0fD0000000", depths)


def test_masking_that_does_nothing(workshop: Workshop) -> None:
    masks = r"selp\.f32 (\s*%r\d+), 0fFF800000, (%r\d+),"
    assert workshop.is_found(WALK, r"selp.f32 \1, \2, \2,", workshop.places(WALK, masks))


def test_unused_rows_that_are_not_cleared(workshop: Workshop) -> None:
    assert workshop.is_found(WALK, "", workshop.places(WALK, r"st\.shared\.v4\.b32 \s*\[[^]]*\], \{0, 0, 0, 0\};"))


@pytest.mark.parametrize("kind", ["before", "after"])
def test_a_missing_fence_of_tensor_memory(kind: str, workshop: Workshop) -> None:
    *fences, _ = workshop.places(WALK, rf"tcgen05\.fence::{kind}_thread_sync;")  # the last one is around the deallocation
    for fence in fences:
        assert workshop.is_found(WALK, "", [fence]) or workshop.is_found(RISING, "", [fence])


@pytest.mark.parametrize("pattern", [r"fence\.proxy\.async[^;]*;", r"tcgen05\.wait::ld[^;]*;"], ids=["proxy fence", "waits for loads"])
def test_something_missing_everywhere(pattern: str, workshop: Workshop) -> None:
    assert workshop.is_found(WALK, "", workshop.places(WALK, pattern))

"""Deliberately broken dense decode kernels for Hopper over an e4m3 cache: the cases must find each of them wrong. The roles score
and output are the 16-bit kernel's, and are broken in test_dense_decode_sm90.py.

The wait on rope_free is not broken here, since the order of the others implies it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cute_mla.spec.arch import SM90
from cute_mla.spec.dense_decode import FP8_CACHE
from cute_mla.testing.cases.dense_decode import DenseDecodeCase
from tests.mutation.planted_bugs import Workshop

# One CTA, tiles enough to go round the rings, lengths that end inside a tile, in either half of it.
WALK = DenseDecodeCase(batch=3, s_q=2, lengths=(330, 70, 20), h_q=9, causal=True, operands=FP8_CACHE, sm_count=1)
HALF = replace(WALK, dtype="fp16")
SMALL_PAGES = replace(WALK, page_size=16)

SLOTS = 5  # of a tile, each with a wait, a fence and an arrival of the converting role, the first one in the kernel
WAITS = r"mbarrier\.try_wait\.parity\.shared\.b64 +P1, [^;]*;"
ARRIVALS = r"mbarrier\.arrive\.shared\.b64 [^;]*;"
FENCES = r"fence\.proxy\.async[^;]*;"


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """Breaks kernels of SM90."""
    return Workshop.open(SM90, tmp_path, monkeypatch)


@pytest.mark.parametrize("case", [WALK, HALF, SMALL_PAGES], ids=["bf16", "fp16", "small pages"])
def test_the_unbroken_kernel_passes(case: DenseDecodeCase, workshop: Workshop) -> None:
    workshop.check_unbroken(case)


@pytest.mark.parametrize("signal", [ARRIVALS, FENCES], ids=["arrival", "fence"])
@pytest.mark.parametrize("slot", range(SLOTS))
def test_a_slot_that_is_not_handed_over(signal: str, slot: int, workshop: Workshop) -> None:
    assert workshop.is_found(WALK, "", [workshop.places(WALK, signal)[slot]])


def test_slots_that_are_not_waited_for(workshop: Workshop) -> None:
    assert workshop.is_found(WALK, "setp.eq.u32 P1, 0, 0;", workshop.places(WALK, WAITS)[: SLOTS - 1])


@pytest.mark.parametrize("columns", range(0, 576, 64))
def test_columns_that_are_not_loaded(columns: int, workshop: Workshop) -> None:
    offset = rf"\+{columns}" if columns else ""
    loads = rf"ld\.global\.v4\.b32 [^;]*\[%rd\d+{offset}\];"
    assert workshop.is_found(WALK, "", workshop.places(WALK, loads))


@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("case", [WALK, HALF], ids=["bf16", "fp16"])
def test_a_pair_of_values_that_is_not_converted(case: DenseDecodeCase, which: int, workshop: Workshop) -> None:
    """The last ones are RoPE columns, which few keys must decide upon to matter."""
    case = replace(case, values="peaks")
    conversions = workshop.places(case, r"cvt\.rn\.f16x2\.e4m3x2 (\s*%r\d+), %rs\d+;")
    assert workshop.is_found(case, r"mov.b32 \1, 0;", [conversions[which]])


@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
def test_the_lower_halves_of_fp32_numbers(which: int, workshop: Workshop) -> None:
    selectors = workshop.places(WALK, r"mov\.b32 (\s*%r\d+), 30258;")
    assert workshop.is_found(WALK, r"mov.b32 \1, 0x5410;", [selectors[which]])


def test_a_wrong_swizzle(workshop: Workshop) -> None:
    assert workshop.survivors(WALK, r"xor\.b32 (\s*%r\d+, %r\d+), 16;", r"add.s32 \1, 16;") == []


def test_keys_behind_the_end(workshop: Workshop) -> None:
    """Of a thread's second key, half a tile behind the first, the page is looked up only if it is there."""
    assert workshop.survivors(WALK, r"setp\.lt\.s32 (\s*%p\d+, %r\d+), 33;", r"setp.lt.s32 \1, 1;") == []


def test_pages_that_there_are_not(workshop: Workshop) -> None:
    """A key that is not there counts as one of such a page."""
    bounds = r"setp\.lt\.u32 (\s*%p\d+), %r\d+, %r\d+;"
    assert workshop.survivors(WALK, bounds, r"setp.eq.u32 \1, 0, 0;") == []


def test_the_page_of_the_first_key_for_the_second(workshop: Workshop) -> None:
    """Pages of 16 keys: the table's entry two further, counted one by one."""
    assert workshop.survivors(SMALL_PAGES, r"selp\.b64 (\s*%rd\d+), 1, 0, ", r"selp.b64 \1, 0, 0, ") == []


def test_no_scale(workshop: Workshop) -> None:
    """Of the scores, and of the values."""
    assert workshop.survivors(WALK, r"ld\.param\.b64 (\s*%rd\d+), \[\w+_param_4\];", r"mov.b64 \1, 0;") == []

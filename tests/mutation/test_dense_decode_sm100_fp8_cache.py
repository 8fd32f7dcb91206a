"""Deliberately broken dense decode kernels for Blackwell over an e4m3 cache: the cases must find each of them wrong. The roles
score, output and mma are the 16-bit kernel's, and are broken in test_dense_decode_sm100.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cute_mla.spec.arch import SM100
from cute_mla.spec.dense_decode import FP8_CACHE
from cute_mla.testing.cases.dense_decode import DenseDecodeCase
from tests.mutation.planted_bugs import Workshop

# One pair of CTAs, tiles enough to go round the ring, lengths that end inside a tile.
WALK = DenseDecodeCase(batch=3, s_q=2, lengths=(500, 70, 20), h_q=9, causal=True, operands=FP8_CACHE, sm_count=2)
HALF = replace(WALK, dtype="fp16")
PEAKS = replace(WALK, values="peaks")  # RoPE columns matter only where few keys decide

PASSES = 9  # of the converting role, over a tile: eight of latent columns, one of RoPE columns
LOADS = r"ld\.global\.v4\.b32 [^;]*;"  # the converting role's are the last ones: of a piece's first tile, and of following ones


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """Breaks kernels of SM100."""
    return Workshop.open(SM100, tmp_path, monkeypatch)


@pytest.mark.parametrize("case", [WALK, HALF, replace(WALK, page_size=16)], ids=["bf16", "fp16", "small pages"])
def test_the_unbroken_kernel_passes(case: DenseDecodeCase, workshop: Workshop) -> None:
    workshop.check_unbroken(case)


@pytest.mark.parametrize("signal", [r"mbarrier\.arrive\.shared::cluster\.b64 [^;]*;", r"fence\.proxy\.async[^;]*;"])
def test_a_slot_that_is_not_handed_over(signal: str, workshop: Workshop) -> None:
    assert workshop.is_found(WALK, "", workshop.places(WALK, signal)[-1:])


def test_a_slot_that_is_not_waited_for(workshop: Workshop) -> None:
    first_tile, following = (workshop.places(WALK, LOADS)[load] for load in (-PASSES - 1, -PASSES))
    waits = workshop.places(WALK, r"mbarrier\.try_wait\.parity\.shared\.b64 +P1, [^;]*;")
    (wait,) = (wait for wait in waits if first_tile.end() < wait.start() < following.start())
    assert workshop.is_found(WALK, "setp.eq.u32 P1, 0, 0;", [wait])


@pytest.mark.parametrize("load", range(-2 * PASSES, 0))
def test_keys_that_are_not_loaded(load: int, workshop: Workshop) -> None:
    case = PEAKS if load % PASSES == PASSES - 1 else WALK  # the last pass has the RoPE columns of all keys, others all columns of few
    assert workshop.is_found(case, "", [workshop.places(case, LOADS)[load]])


@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("case", [WALK, HALF], ids=["bf16", "fp16"])
def test_a_pair_of_values_that_is_not_converted(case: DenseDecodeCase, which: int, workshop: Workshop) -> None:
    """The last ones are RoPE columns."""
    case = replace(case, values="peaks")
    conversions = workshop.places(case, r"cvt\.rn\.b?f16x2\.e4m3x2 (\s*%r\d+), %rs\d+;")
    assert workshop.is_found(case, r"mov.b32 \1, 0;", [conversions[which]])


@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
def test_a_row_of_another_key(which: int, workshop: Workshop) -> None:
    shuffles = workshop.places(WALK, r"shfl\.sync\.idx\.b32 (\s*%r\d+), (%r\d+), %r\d+, 31, -1;")
    assert workshop.is_found(WALK, r"shfl.sync.idx.b32 \1, \2, 0, 31, -1;", [shuffles[which]])


def test_keys_behind_the_end(workshop: Workshop) -> None:
    ends = r"setp\.ge\.s32 (\s*%p\d+), %r\d+, %r\d+;(\s*mov\.b(?:32|64) \s*%rd?\d+, 0;\s*mov\.b32 \s*%r\d+, -2147483648;)"
    assert workshop.survivors(WALK, ends, r"setp.eq.u32 \1, 0, 1;\2") == []


def test_pages_that_there_are_not(workshop: Workshop) -> None:
    """A key that is not there counts as one of such a page."""
    bounds = r"setp\.lt\.u32 (\s*%p\d+), %r\d+, %r\d+;(\s*selp\.b64)"
    assert workshop.survivors(WALK, bounds, r"setp.eq.u32 \1, 0, 0;\2") == []


def test_no_scale(workshop: Workshop) -> None:
    """Neither of the scores nor of the values."""
    assert workshop.is_found(WALK, r"mov.b64 \1, 0;", workshop.places(WALK, r"ld\.param\.b64 (\s*%rd\d+), \[\w+_param_4\];"))

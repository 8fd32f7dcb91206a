"""Edits of numbers and indices: what they write, which are drawn, and a sample that smoke cases must notice."""

from __future__ import annotations

from collections import Counter

import pytest

from cute_mla.runtime.artifacts import load_artifacts
from tests.mutation import numeric
from tests.mutation.campaign import one_of_each_structure
from tests.mutation.smoke import SmokeSubject

SNIPPET = """\
	.param .u64 .ptr .global .align 4 k_param_0,
	.param .u32 k_param_1,
	.param .u32 k_param_2
	mul.f32 	%r1, %r2, 0f3FB8AA3B; // mul.f32 %r1, %r2, 0f3FB8AA3B;
	add.s32 	%r1, %r2, -1;
	shl.b32 	%r1, %r2, 3;
	and.b32 	%r1, %r2, 31;
$L__BB0_1:
	setp.lt.s32 	%p1, %r1, %r2;
	@%p1 bra 	$L__BB0_1;
	selp.b32 	%r1, %r2, %r3, %p1;
	min.s32 	%r1, %r2, %r3;
	ld.param.b32 	%r1, [k_param_1];
	mul.wide.s32 	%rd1, %r2, %r3;
	mul.lo.s64 	%rd1, %rd2, %rd3;
	mad.lo.s64 	%rd1, %rd2, %rd3, %rd4;
	shl.b64 	%rd1, %rd2, 2;
	cvt.s64.s32 	%rd1, %r2;
	shfl.sync.bfly.b32 	%r1, %r2, 16, 31, -1;
	ld.global.b32 	%r1, [%rd1+4];
	sub.f32 	%r1, %r2, %r3;
	fma.rn.f32 	%r1, %r2, %r3, %r4;
	and.pred 	%p1, %p2, %p3;
	or.pred 	%p1, %p2, %p3;
	ld.param.b64 	%rd1, [k_param_0];
	mov.b32 	%r1, 0fFF800000;
	setp.ge.s32 	%p1, %r1, %r2;
	@%p1 bra 	$L__BB0_2;
$L__BB0_2:
"""
CUT = "shl.b64 %mutant, %mutant, 32; shr.s64 %mutant, %mutant, 32;"


def test_what_is_broken_and_how() -> None:
    """Loops end at branches backwards only; infinities and lone parameters of a width are left alone."""
    broken = {(item.kind, item.line): " ".join(item.apply(SNIPPET).splitlines()[item.line - 1].split()) for item in numeric.find(SNIPPET)}
    assert broken == {
        ("float constant doubled", 4): "mul.f32 %r1, %r2, 0f4038AA3B; // mul.f32 %r1, %r2, 0f3FB8AA3B;",
        ("scale left out", 4): "mov.b32 %r1, %r2; // mul.f32 %r1, %r2, 0f3FB8AA3B;",
        ("integer constant 1 more", 5): "add.s32 %r1, %r2, 0;",
        ("shift 1 more", 6): "shl.b32 %r1, %r2, 4;",
        ("mask halved", 7): "and.b32 %r1, %r2, 15;",
        ("comparison 1 off", 9): "setp.le.s32 %p1, %r1, %r2;",
        ("comparison inverted", 9): "setp.ge.s32 %p1, %r1, %r2;",
        ("loop bound 1 less", 9): "{ .reg .b32 %mutant; sub.s32 %mutant, %r2, 1; setp.lt.s32 %p1, %r1, %mutant; }",
        ("loop bound 1 more", 9): "{ .reg .b32 %mutant; add.s32 %mutant, %r2, 1; setp.lt.s32 %p1, %r1, %mutant; }",
        ("selp swapped", 11): "selp.b32 %r1, %r3, %r2, %p1;",
        ("bound left out", 12): "mov.b32 %r1, %r2;",
        ("parameter 0", 13): "mov.b32 %r1, 0;",
        ("another parameter", 13): "ld.param.b32 %r1, [k_param_2];",
        ("wide product cut", 14): "{ .reg .b32 %mutant; mul.lo.s32 %mutant, %r2, %r3; cvt.s64.s32 %rd1, %mutant; }",
        ("64-bit product cut", 15): f"{{ .reg .b64 %mutant; mul.lo.s64 %mutant, %rd2, %rd3; {CUT} mov.b64 %rd1, %mutant; }}",
        ("64-bit index cut", 16): f"{{ .reg .b64 %mutant; mul.lo.s64 %mutant, %rd2, %rd3; {CUT} add.s64 %rd1, %mutant, %rd4; }}",
        ("index left out", 16): "mov.b64 %rd1, %rd4;",
        ("64-bit shift cut", 17): f"{{ .reg .b64 %mutant; shl.b64 %mutant, %rd2, 2; {CUT} mov.b64 %rd1, %mutant; }}",
        ("shift 1 more", 17): "shl.b64 %rd1, %rd2, 3;",
        ("sign lost", 18): "cvt.u64.u32 %rd1, %r2;",
        ("lanes not exchanged", 19): "mov.b32 %r1, %r2;",
        ("other lanes", 19): "shfl.sync.bfly.b32 %r1, %r2, 8, 31, -1;",
        ("address without offset", 20): "ld.global.b32 %r1, [%rd1];",
        ("sum turned", 21): "add.f32 %r1, %r2, %r3;",
        ("addend left out", 22): "mul.f32 %r1, %r2, %r3;",
        ("predicates joined the other way", 23): "or.pred %p1, %p2, %p3;",
        ("predicates met the other way", 24): "and.pred %p1, %p2, %p3;",
        ("parameter 0", 25): "mov.b64 %rd1, 0;",
        ("comparison 1 off", 27): "setp.gt.s32 %p1, %r1, %r2;",
        ("comparison inverted", 27): "setp.lt.s32 %p1, %r1, %r2;",
    }


def test_every_kind_is_about_some_kernel() -> None:
    """Else a pattern is out of date."""
    artifacts = load_artifacts()
    missing = {kind.name for kind in numeric.KINDS}
    for entry in artifacts.manifest.kernels.values():
        missing -= {item.kind for item in numeric.find(artifacts.ptx(entry))} if missing else set()
    assert missing == set()


def test_mutations_are_drawn_over_all_kinds() -> None:
    """Equal for equal seeds; a kind with few sites is drawn whole."""
    artifacts = load_artifacts()
    found = numeric.find(artifacts.ptx(artifacts.manifest.kernels["dense_decode_sm90_bf16_cluster1"]))
    drawn = numeric.drawn("a", found, 100, 0)
    assert drawn == numeric.drawn("a", found, 100, 0) != numeric.drawn("a", found, 100, 1)
    assert len(set(drawn)) == 100
    every, chosen = Counter(item.kind for item in found), Counter(item.kind for item in drawn)
    fewest = min(chosen[kind] for kind in every if chosen[kind] < every[kind])
    assert all(chosen[kind] >= min(every[kind], fewest) for kind in every)


@pytest.mark.slow
def test_a_structure_has_one_kernel() -> None:
    artifacts = load_artifacts()
    names = [entry.name for entry in one_of_each_structure(artifacts, 0)]
    assert len(set(names)) == len(names) < len(artifacts.manifest.kernels)
    assert {entry.op for entry in artifacts.manifest.kernels.values()} == {artifacts.manifest.kernels[name].op for name in names}


@pytest.mark.parametrize("kernel", ["cache_gather_sm90_b16_latent", "cache_write_sm100_bf16_fp8_656"])
def test_smoke_cases_notice_most_broken_numbers(kernel: str) -> None:
    """The score of the whole campaign is that of `python -m tests.mutation report numbers`."""
    subject = SmokeSubject(load_artifacts().manifest.kernels[kernel])
    drawn = numeric.drawn(kernel, numeric.find(subject.text), 12, 0)
    assert sum(bool(subject.judge(mutation).noticed) for mutation in drawn) >= 6

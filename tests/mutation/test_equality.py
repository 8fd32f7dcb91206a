"""Proofs that mutations change nothing: the ranges behind them, and runs of mutations that are proved equal."""

from __future__ import annotations

import random

import pytest

from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.simulator.frontend.ptx import parse_ptx
from tests.mutation import numeric
from tests.mutation.bench import Subject, first_notice
from tests.mutation.equality import Proof, is_equal
from tests.mutation.intervals import Analysis
from tests.mutation.ranges import arithmetic, every
from tests.mutation.smoke import ROUND_ROBIN

HEAD = ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 p, .param .u32 n)\n.reqntid 128, 1, 1\n{\n"
REGISTERS = "\t.reg .pred %p<9>;\n\t.reg .b32 %r<19>;\n\t.reg .b64 %rd<19>;\n\tld.param.b64 %rd1, [p];\n\tld.param.b32 %r1, [n];\n"
BOUNDS = {"n": (0, 1000), "%tid.x": (0, 127)}


def analysed(body: str) -> tuple[Analysis, str]:
    """Return the analysis of a kernel with this body, and its text."""
    ptx = HEAD + REGISTERS + body + "\n\tret;\n}\n"
    return Analysis(parse_ptx(ptx)["k"], BOUNDS), ptx


def proved(body: str, kind: str) -> list[bool]:
    """Return which mutations of a kind are proved equal in a body, in the order of the text."""
    analysis, ptx = analysed(body)
    edit = next(edit for edit in numeric.KINDS if edit.name == kind)
    items = {item.line: item for item in reversed(analysis.entry.instructions)}
    return [Proof(analysis, items[site.line]).holds(kind) for site in edit.sites(ptx)]


def test_ranges_follow_arithmetic_and_branches() -> None:
    analysis, _ = analysed(
        "\tmov.u32 %r2, %tid.x;\n\tshl.b32 %r3, %r2, 2;\n\tand.b32 %r4, %r3, 60;\n\tsub.s32 %r5, %r1, %r2;\n\tmax.s32 %r6, %r5, 0;\n"
        "\tmul.wide.s32 %rd2, %r6, 4;\n\tadd.s32 %r7, %r1, 2147483647;\n\tshr.u32 %r8, %r7, 4;"
    )
    top = every(32)
    found = {name: analysis.everywhere[name] for name in ("%r3", "%r4", "%r5", "%r6", "%rd2", "%r7", "%r8")}
    assert found == {
        "%r3": (0, 508), "%r4": (0, 60), "%r5": (-127, 1000), "%r6": (0, 1000), "%rd2": (0, 4000), "%r7": top, "%r8": (0, (1 << 28) - 1)
    }  # fmt: skip


def test_a_loop_counter_is_bounded_by_its_loop() -> None:
    loop = (
        "\tmov.b32 %r2, 0;\n$L:\n\tcvt.s64.s32 %rd2, %r2;\n\tst.global.b64 [%rd1], %rd2;\n"
        "\tadd.s32 %r2, %r2, {};\n\tsetp.{} %p1, %r2, %r1;\n\t@%p1 bra $L;"
    )
    assert proved(loop.format("32", "lt.s32"), "sign lost") == [True]
    assert proved(loop.format("-32", "lt.s32"), "sign lost") == [False]
    assert proved(loop.format("32", "ne.s32"), "sign lost") == [False]


STORE = "\tst.global.b64 [%rd1], %rd2;"
LOAD = "\tld.global.b32 %r2, [%rd1];\n"


@pytest.mark.parametrize(
    ("body", "kind", "expected"),
    [
        ("\tmul.wide.s32 %rd2, %r1, 4;\n" + STORE, "wide product cut", True),
        ("\tmul.wide.s32 %rd2, %r1, 4000000;\n" + STORE, "wide product cut", False),
        (LOAD + "\tmul.wide.s32 %rd2, %r2, 1;\n" + STORE, "wide product cut", True),
        (LOAD + "\tmul.wide.u32 %rd2, %r2, 1;\n" + STORE, "wide product cut", True),
        (LOAD + "\tmul.wide.u32 %rd2, %r2, 2;\n" + STORE, "wide product cut", False),
        ("\tcvt.s64.s32 %rd2, %r1;\n" + STORE, "sign lost", True),
        (LOAD + "\tcvt.s64.s32 %rd2, %r2;\n" + STORE, "sign lost", False),
        (LOAD + "\tmin.s32 %r3, %r2, 5;\n\tcvt.s64.s32 %rd2, %r3;\n" + STORE, "bound left out", False),
        ("\tmin.s32 %r3, %r1, 1000;\n\tcvt.s64.s32 %rd2, %r3;\n" + STORE, "bound left out", True),
        ("\tmin.s32 %r3, %r1, 999;\n\tcvt.s64.s32 %rd2, %r3;\n" + STORE, "bound left out", False),
        ("\tand.b32 %r3, %r1, 4095;\n\tcvt.s64.s32 %rd2, %r3;\n" + STORE, "mask halved", True),
        ("\tand.b32 %r3, %r1, 2047;\n\tcvt.s64.s32 %rd2, %r3;\n" + STORE, "mask halved", True),
        ("\tand.b32 %r3, %r1, 1023;\n\tcvt.s64.s32 %rd2, %r3;\n" + STORE, "mask halved", False),
        ("\tand.b32 %r3, %r1, 4094;\n\tcvt.s64.s32 %rd2, %r3;\n" + STORE, "mask halved", False),
        ("\tsetp.lt.s32 %p1, %r1, 0;\n\tselp.b64 %rd2, 1, 2, %p1;\n" + STORE, "comparison 1 off", False),
        ("\tsetp.lt.s32 %p1, %r1, -1;\n\tselp.b64 %rd2, 1, 2, %p1;\n" + STORE, "comparison 1 off", True),
        ("\tsetp.lt.s32 %p1, %r1, 1000;\n\tselp.b64 %rd2, 1, 2, %p1;\n" + STORE, "comparison 1 off", False),
        ("\tshl.b64 %rd2, %rd1, 1;\n" + STORE, "64-bit shift cut", False),
        ("\tshr.u32 %r3, %r1, 10;\n\tcvt.s64.s32 %rd2, %r3;\n" + STORE, "shift 1 more", True),
        ("\tshr.u32 %r3, %r1, 9;\n\tcvt.s64.s32 %rd2, %r3;\n" + STORE, "shift 1 more", False),
        (LOAD + "\tshr.s32 %r3, %r2, 31;\n\tcvt.s64.s32 %rd2, %r3;\n" + STORE, "shift 1 more", False),
        ("\tmin.s32 %r3, %r1, 1000;\n\tcvt.s64.s32 %rd2, %r3;\n" + STORE, "integer constant 1 more", True),
        ("\tmin.s32 %r3, %r1, 999;\n\tcvt.s64.s32 %rd2, %r3;\n" + STORE, "integer constant 1 more", False),
        ("\tmax.s32 %r3, %r1, 0;\n\tcvt.s64.s32 %rd2, %r3;\n" + STORE, "integer constant 1 more", False),
        ("\tmax.s32 %r3, %r1, -1;\n\tcvt.s64.s32 %rd2, %r3;\n" + STORE, "integer constant 1 more", True),
        ("\tshfl.sync.idx.b32 %r3, %r1, 0, 31, -1;\n\tcvt.s64.s32 %rd2, %r3;\n" + STORE, "sign lost", True),
        (LOAD + "\tshfl.sync.idx.b32 %r3, %r2, 0, 31, -1;\n\tcvt.s64.s32 %rd2, %r3;\n" + STORE, "sign lost", False),
        ("\tcvt.s64.s32 %rd3, %r1;\n\tshl.b64 %rd2, %rd3, 21;\n" + STORE, "64-bit shift cut", True),
        ("\tcvt.s64.s32 %rd3, %r1;\n\tshl.b64 %rd2, %rd3, 22;\n" + STORE, "64-bit shift cut", False),
    ],
)  # fmt: skip
def test_only_equal_mutations_are_proved(body: str, kind: str, expected: bool) -> None:
    assert proved(body, kind) == [expected]


QUOTIENT = "\tmov.u32 %r2, %tid.x;\n\tld.param.b32 %r3, [d];\n\tdiv.u32 %r4, %r2, %r3;\n"


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ("mul.lo.s32 %r5, %r4, %r3;\n\tsub.s32 %r6, %r2, %r5;", (0, 8)),
        ("mul.lo.s32 %r5, %r4, %r3;\n\tmul.lo.s32 %r7, %r3, %r1;\n\tadd.s32 %r8, %r2, %r7;\n\tsub.s32 %r6, %r8, %r5;", (0, 9008)),
        ("sub.s32 %r5, %r1, %r4;\n\tmad.lo.s32 %r6, %r5, %r3, %r2;", (0, 9008)),
        ("sub.s32 %r5, %r1, %r4;\n\tmad.lo.s32 %r6, %r5, %r3, %r1;", (-1143, 10000)),  # another number than is divided
        ("mul.lo.s32 %r5, %r4, %r4;\n\tsub.s32 %r6, %r2, %r5;", (-16129, 127)),  # another divisor
    ],
)
def test_what_a_quotient_leaves_is_not_negative(rest: str, expected: tuple[int, int]) -> None:
    ptx = HEAD.replace(".param .u32 n", ".param .u32 n, .param .u32 d") + REGISTERS + QUOTIENT + "\t" + rest + "\n\tret;\n}\n"
    analysis = Analysis(parse_ptx(ptx)["k"], {**BOUNDS, "d": (1, 9)})
    assert analysis.everywhere["%r6"] == expected


@pytest.mark.parametrize(("a", "b", "expected"), [((0, 8), (0, 8), (0, 15)), ((0, 64), (0, 63), (0, 127)), ((-8, 3), (0, 7), (-8, 10))])
def test_a_union_of_bits_is_at_most_the_sum(a: tuple[int, int], b: tuple[int, int], expected: tuple[int, int]) -> None:
    _, ptx = analysed("\tor.b32 %r2, %r1, %r1;")
    (item,) = (item for item in parse_ptx(ptx)["k"].instructions if item.opcode == "or.b32")
    assert arithmetic(item, [a, b]) == expected


GUARDED = (
    "\tld.global.b32 %r2, [%rd1];\n\tsetp.{} %p1, %r2, 0;\n\tcvt.s64.s32 %rd2, %r2;\n"
    "\tadd.s64 %rd3, %rd2, %rd1;\n\t@%p1 bra $L;\n\tst.global.b64 [%rd3], %rd1;\n$L:"
)


def test_a_result_that_nobody_reads_may_change() -> None:
    assert proved(GUARDED.format("lt.s32"), "sign lost") == [True]
    assert proved(GUARDED.format("gt.s32"), "sign lost") == [False]


@pytest.mark.parametrize(
    "use", ["setp.lt.s64 %p2, %rd2, 5;\n\t@%p2 bra $L;", "shfl.sync.idx.b32 %r5, %r4, 0, 31, -1;", "st.global.b32 [%rd1], %r4;"]
)
def test_branches_other_lanes_and_memory_notice(use: str) -> None:
    body = "\tld.global.b32 %r2, [%rd1];\n\tcvt.s64.s32 %rd2, %r2;\n\tcvt.u32.u64 %r3, %rd2;\n\tmov.b32 %r4, %r3;\n\t" + use + "\n$L:"
    assert proved(body, "sign lost") == [False]


KERNELS = (
    "cache_gather_sm100_b16_latent",
    "cache_write_sm90_bf16_fp8_584",
    "merge_states_sm90_fp16_d128",
    pytest.param("split_plan_sm100_i32", marks=pytest.mark.slow),
)


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_that_are_proved_equal_give_equal_bits(kernel: str) -> None:
    """Four of those that are proved, of all kinds, drawn by chance."""
    entry = load_artifacts().manifest.kernels[kernel]
    ptx = load_artifacts().ptx(entry)
    equal = [item for item in numeric.find(ptx) if is_equal(entry, item)]
    assert equal
    trials = Subject(entry).trials
    for mutation in random.Random(0).sample(equal, min(len(equal), 4)):
        outcome = first_notice(trials, mutation.apply(ptx), [ROUND_ROBIN])
        assert not outcome.noticed, (mutation, outcome)

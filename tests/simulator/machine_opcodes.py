"""Small PTX kernels whose machine code is evidence for the meaning of its opcodes: inputs, results, and the opcodes they must become."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cute_mla.spec.arch import ARCHS

THREADS = 128
ROW = 4 * THREADS
SOURCES = 4  # words of each thread: %r1 to %r4, as floats %f1 to %f4, in pairs %rd4 and %rd5
FIRST_RESULT = 100  # results are %r100, %r101, ..

_LOADS = "\n".join(f"ld.global.u32 %r{index + 1}, [%rd2+{ROW * index}]; mov.b32 %f{index + 1}, %r{index + 1};" for index in range(SOURCES))
_PAIRS = "mov.b64 %rd4, {%r1, %r2}; mov.b64 %rd5, {%r3, %r4};"


@dataclass(frozen=True)
class Evidence:
    """A kernel body. results: words that each thread stores. opcodes: beginnings of opcodes, all of which its machine code has.

    floats: the words are floats of all kinds, else integers of all kinds. cluster: CTAs, one cluster. extra: words for each thread that the
    body itself stores, from %rd8 on. archs: the architectures that have its instructions. registers: the most that ptxas may use, 0 for
    any number.
    """

    name: str
    body: str
    results: int
    opcodes: str
    floats: bool = False
    cluster: int = 1
    extra: int = 0
    archs: tuple[str, ...] = tuple(ARCHS)
    registers: int = 0

    def text(self) -> str:
        """Return the body with its loads and stores. Each CTA has results of its own."""
        stores = "\n".join(f"st.global.u32 [%rd6+{ROW * index}], %r{FIRST_RESULT + index};" for index in range(self.results))
        own = f"mov.u32 %r5, %ctaid.x; mul.wide.u32 %rd60, %r5, {ROW * (self.results + self.extra)}; add.s64 %rd6, %rd6, %rd60;"
        if self.cluster == 1:
            own = ""
        start = f"ld.param.u64 %rd6, [p1]; {own} add.s64 %rd8, %rd6, {ROW * self.results}; add.s64 %rd6, %rd6, %rd1;"
        return f"{start}\n{_LOADS}\n{_PAIRS}\n{self.body}\n{stores}\n"


def words(floats: bool) -> np.ndarray:
    """Return the sources of all threads: random words, and every pair of special ones in some thread."""
    rng = np.random.default_rng(7)
    if floats:
        values = (
            (rng.standard_normal((SOURCES, THREADS)) * 2.0 ** rng.integers(-40, 40, (SOURCES, THREADS))).astype(np.float32).view(np.uint32)
        )
        special = np.array([0, -0.0, 1, -1, np.inf, -np.inf, 1e-40, 3e38, 448, 1e-3], np.float32).view(np.uint32)
    else:
        values = rng.integers(0, 1 << 32, (SOURCES, THREADS), dtype=np.uint64).astype(np.uint32)
        values[:, ::3] >>= rng.integers(0, 32, values[:, ::3].shape).astype(np.uint32)
        special = np.array([0, 1, 0xFFFFFFFF, 0x80000000, 0x7FFFFFFF, 31, 32, 33, 0x10000, 0xFFFF8000], np.uint32)
    count = len(special)
    values[0, : count * count] = np.repeat(special, count)
    values[1, : count * count] = np.tile(special, count)
    return values.copy()


def numbered(lines: list[str], start: int = FIRST_RESULT) -> tuple[str, int]:
    """Return lines whose $ stands for the next result, and their number."""
    return "\n".join(line.replace("$", f"%r{start + index}") for index, line in enumerate(lines)), len(lines)


def predicate(line: str) -> str:
    """Return a line that sets %p1, and the selection of a result by it."""
    return f"{line} selp.u32 $, 1, 0, %p1;"


def wide(line: str) -> list[str]:
    """Return a line that sets %rd7, and the lines of its two words."""
    return [f"{line} mov.b64 {{$, %r90}}, %rd7;", f"{line} mov.b64 {{%r90, $}}, %rd7;"]


_INTEGERS = [
    "add.u32 $, %r1, %r2;", "sub.u32 $, %r1, %r2;", "add.u32 %r50, %r1, %r2; sub.u32 $, %r50, %r3;", "neg.s32 $, %r1;",
    "mad.lo.u32 $, %r1, %r2, %r3;", "mul.lo.u32 $, %r1, %r2;", "mul.hi.u32 $, %r1, %r2;", "mul.hi.s32 $, %r1, %r2;",
    "mul.lo.u32 $, %r1, 24; ", "mad.lo.u32 $, %r1, 5, %r2;", "shl.b32 %r50, %r1, 3; add.u32 $, %r50, %r2;",
    "shl.b32 $, %r1, %r2;", "shr.u32 $, %r1, %r2;", "shr.s32 $, %r1, %r2;", "shl.b32 $, %r1, 7;", "shr.s32 $, %r1, 31;",
    "and.b32 $, %r1, %r2;", "or.b32 $, %r1, %r2;", "xor.b32 $, %r1, %r2;", "not.b32 $, %r1;",
    *(f"lop3.b32 $, %r1, %r2, %r3, {table};" for table in (0x1B, 0xE8, 0x96, 0xCA, 0x2A, 0xF8, 0x0C, 0x30)),
    "min.s32 $, %r1, %r2;", "max.s32 $, %r1, %r2;", "min.u32 $, %r1, %r2;", "max.u32 $, %r1, %r2;", "abs.s32 $, %r1;",
    "add.s32 %r50, %r1, %r2; min.s32 $, %r50, %r3;", "add.u32 %r50, %r1, %r2; max.u32 $, %r50, %r3;",
    "max.u32 %r50, %r1, %r2; max.u32 $, %r50, %r3;", "max.s32 %r50, %r1, %r2; max.s32 $, %r50, %r3;",
    "min.s32 %r50, %r1, %r2; min.s32 $, %r50, %r3;", "popc.b32 $, %r1;", "min.s32 %r50, %r1, %r2; max.s32 $, %r50, 0;",
    *(f"prmt.b32 $, %r1, %r2, {selector};" for selector in (0x5410, 0x7632, 0x3210, 0x0123, 0x6543, 0x9180)), "prmt.b32 $, %r1, %r2, %r3;",
    *(predicate(f"setp.{c}.{t} %p1, %r1, %r2;") for c in ("eq", "ne", "lt", "le", "gt", "ge") for t in ("s32", "u32")),
    *(predicate(f"setp.lt.s32 %p2, %r1, %r3; setp.ge.{b}.u32 %p1, %r2, %r4, %p2;") for b in ("and", "or", "xor")),
    "setp.lt.s32 %p2, %r1, %r3; selp.b32 $, %r2, %r4, %p2;", "setp.lt.s32 %p2, %r1, %r3; @%p2 add.u32 %r2, %r2, 9; mov.u32 $, %r2;",
]  # fmt: skip

_WIDE = [
    *wide("add.u64 %rd7, %rd4, %rd5;"), *wide("sub.u64 %rd7, %rd4, %rd5;"), *wide("mul.lo.u64 %rd7, %rd4, %rd5;"),
    *wide("mul.wide.u32 %rd7, %r1, %r2;"), *wide("mul.wide.s32 %rd7, %r1, %r2;"), *wide("mad.wide.u32 %rd7, %r1, %r2, %rd5;"),
    *wide("mad.wide.s32 %rd7, %r1, %r2, %rd5;"), *wide("shl.b64 %rd7, %rd4, 9;"), *wide("neg.s64 %rd7, %rd4;"),
    *wide("cvt.s64.s32 %rd8, %r1; shl.b64 %rd8, %rd8, 2; add.s64 %rd7, %rd8, %rd5;"), *wide("min.s64 %rd7, %rd4, %rd5;"),
    *wide("add.u64 %rd8, %rd4, %rd5; mov.b64 %rd9, {%r2, %r3}; add.u64 %rd7, %rd8, %rd9;"), *wide("mul.hi.u64 %rd7, %rd4, %rd5;"),
    *(predicate(f"setp.{c}.{t} %p1, %rd4, %rd5;") for c in ("eq", "ne", "lt", "le", "gt", "ge") for t in ("s64", "u64")),
]  # fmt: skip

_DIVISIONS = [
    "div.u32 $, %r1, %r2;", "div.s32 $, %r1, %r2;", "rem.u32 $, %r1, %r2;",
    "rem.s32 $, %r1, %r2;", "div.u32 $, %r1, 24;",
    *wide("div.s64 %rd7, %rd4, %rd5;"), *wide("div.u64 %rd7, %rd4, %rd5;"), *wide("cvt.u64.u32 %rd8, %r2; rem.u64 %rd7, %rd4, %rd8;"),
    *wide("cvt.s64.s32 %rd8, %r2; rem.s64 %rd7, %rd4, %rd8;"),
]  # fmt: skip


def floating(line: str) -> str:
    """Return a line that sets %f9, and the move of its bits."""
    return f"{line} mov.b32 $, %f9;"


_FLOATS = [
    *(floating(f"{f}.{r}.f32 %f9, %f1, %f2;") for f in ("add", "sub", "mul") for r in ("rn", "rz", "rm", "rp", "rn.ftz")),
    *(floating(f"fma.{r}.f32 %f9, %f1, %f2, %f3;") for r in ("rn", "rz", "rm", "rp", "rn.ftz")),
    *(floating(f"{f}.f32 %f9, %f1, %f2;") for f in ("min", "max", "max.NaN", "min.NaN", "max.ftz")), floating("neg.f32 %f9, %f1;"),
    floating("abs.f32 %f8, %f1; add.rn.f32 %f9, %f8, %f2;"), floating("fma.rn.f32 %f9, %f1, 0f40200000, 0fBF800000;"),
    *(predicate(f"setp.{c}.f32 %p1, %f1, %f2;") for c in
      ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "nan", "lt.ftz")),
    floating("setp.lt.f32 %p1, %f1, %f2; selp.f32 %f9, %f3, %f4, %p1;"),
    floating("setp.gt.f32 %p1, %f1, %f2; selp.f32 %f9, %f3, 0f7FFFFFFF, %p1;"),
    floating("div.rn.f32 %f9, %f1, %f2;"), floating("rcp.rn.f32 %f9, %f1;"), floating("rcp.approx.ftz.f32 %f9, %f1;"),
    floating("ex2.approx.ftz.f32 %f9, %f1;"), floating("abs.f32 %f8, %f1; lg2.approx.ftz.f32 %f9, %f8;"),
    floating("abs.f32 %f8, %f1; rsqrt.approx.ftz.f32 %f9, %f8;"),
    "cvt.rn.bf16x2.f32 $, %f1, %f2;", "cvt.rn.f16x2.f32 $, %f1, %f2;", "cvt.rzi.u32.f32 $, %f1;", "cvt.rzi.s32.f32 $, %f1;",
    "cvt.rn.satfinite.e4m3x2.f32 %h1, %f1, %f2; cvt.rn.satfinite.e4m3x2.f32 %h2, %f3, %f4; mov.b32 $, {%h1, %h2};",
    "cvt.rn.bf16.f32 %h1, %f1; cvt.u32.u16 $, %h1;", "cvt.rn.f16.f32 %h1, %f1; cvt.u32.u16 $, %h1;",
    floating("cvt.rn.f32.s32 %f9, %r1;"), floating("cvt.rn.f32.u32 %f9, %r1;"),
]  # fmt: skip

_BYTES = [
    "mov.b32 {%h1, %h2}, %r1; cvt.rn.f16x2.e4m3x2 $, %h1;", "mov.b32 {%h1, %h2}, %r1; cvt.rn.f16x2.e4m3x2 $, %h2;",
    "mov.b32 {%h1, %h2}, %r1; cvt.f32.f16 %f9, %h1; mov.b32 $, %f9;", "mov.b32 {%h1, %h2}, %r1; cvt.f32.f16 %f9, %h2; mov.b32 $, %f9;",
]  # fmt: skip

_WARPS = [
    *(f"shfl.sync.{m}.b32 $, %r1, {b}, 0x1f, -1;" for m, b in (("bfly", 5), ("idx", 3), ("down", 2))), "shfl.sync.up.b32 $, %r1, 4, 0, -1;",
    "shfl.sync.idx.b32 $, %r1, %r2, 0x1f, -1;", predicate("shfl.sync.down.b32 %r50|%p1, %r1, 7, 0x1f, -1;"),
    predicate("setp.lt.s32 %p2, %r1, %r2; vote.sync.any.pred %p1, %p2, -1;"),
    predicate("setp.lt.s32 %p2, %r1, -9; vote.sync.all.pred %p1, %p2, -1;"),
    "setp.lt.s32 %p2, %r1, %r2; vote.sync.ballot.b32 $, %p2, -1;", predicate("elect.sync _|%p1, -1;"), "mov.u32 $, %laneid;",
    "mov.u32 $, %tid.x;",
]  # fmt: skip

_MEMORY = """
mul.wide.u32 %rd7, %r0, 16; mov.u64 %rd8, smem; mov.u32 %r60, smem; shl.b32 %r61, %r0, 4; add.u32 %r60, %r60, %r61;
st.shared.v4.u32 [%r60], {%r1, %r2, %r3, %r4}; bar.sync 0;
xor.b32 %r62, %r61, 496; mov.u32 %r63, smem; add.u32 %r63, %r63, %r62;
ld.shared.u32 %r100, [%r63]; ld.shared.v2.u32 {%r101, %r102}, [%r63+8]; ld.shared.v4.u32 {%r103, %r104, %r105, %r106}, [%r63];
ld.shared.u8 %r107, [%r63+1]; ld.shared.u16 %r108, [%r63+2]; ld.shared.s8 %r109, [%r63+3]; ld.shared.s16 %r110, [%r63+6];
bar.sync 1, 128; cvt.u16.u32 %h3, %r3; st.shared.u16 [%r60+2], %h3; cvt.u16.u32 %h4, %r2; st.shared.u8 [%r60+5], %h4;
st.shared.v2.u32 [%r60+8], {%r3, %r1};
bar.sync 0; ld.shared.v2.u32 {%r124, %r125}, [%r60+8]; ld.shared.v4.u32 {%r111, %r112, %r113, %r114}, [%r63];
mul.wide.u32 %rd9, %r0, 12; add.s64 %rd9, %rd2, %rd9; ld.global.v4.u32 {%r115, %r116, %r117, %r118}, [%rd9];
ld.global.u8 %r119, [%rd9+5]; ld.global.s16 %r120, [%rd9+6]; ld.global.u16 %r121, [%rd9+10]; ld.global.v2.u32 {%r122, %r123}, [%rd9+8];
"""

_HALVES = [
    "mul.bf16x2 $, %r1, %r2;", "mov.b32 {%h1, %h2}, %r2; mov.b32 %r50, {%h1, %h1}; mul.bf16x2 $, %r1, %r50;",
    "mov.b32 {%h1, %h2}, %r2; mov.b32 %r50, {%h2, %h2}; mul.bf16x2 $, %r1, %r50;", "add.bf16x2 $, %r1, %r2;", "sub.bf16x2 $, %r1, %r2;",
    "fma.rn.bf16x2 $, %r1, %r2, %r3;", "mul.f16x2 $, %r1, %r2;", "add.f16x2 $, %r1, %r2;", "fma.rn.f16x2 $, %r1, %r2, %r3;",
    "mov.b32 %r50, 0x40804280; mul.bf16x2 $, %r1, %r50;", "mov.b32 %r50, 0x4c003c00; mul.f16x2 $, %r1, %r50;",
]  # fmt: skip

_PACKED = [
    *(line for f in ("add.rn", "add.rm", "add.rn.ftz", "sub.rn", "mul.rn") for line in wide(f"{f}.f32x2 %rd7, %rd4, %rd5;")),
    *wide("fma.rn.f32x2 %rd7, %rd4, %rd5, %rd4;"), *wide("fma.rn.ftz.f32x2 %rd7, %rd4, %rd4, %rd5;"),
]  # fmt: skip

_WORDS = [
    *wide("shr.u64 %rd7, %rd4, %r3;"), *wide("shr.u64 %rd7, %rd4, 3;"), "clz.b32 $, %r1;", "mov.u32 $, %lanemask_lt;",
]  # fmt: skip

_GLOBAL = """
mov.u32 %r60, 0; st.global.u32 [%rd6+4608], %r60; st.global.u32 [%rd6+5120], %r60;
bar.sync 0; sub.s64 %rd9, %rd6, %rd1; xor.b32 %r61, %r0, 37; mul.wide.u32 %rd10, %r61, 4; add.s64 %rd10, %rd9, %rd10;
red.global.add.u32 [%rd10+4608], %r1; atom.global.add.u32 %r100, [%rd10+4608], %r2; atom.global.xor.b32 %r101, [%rd10+4608], %r3;
atom.global.exch.b32 %r102, [%rd10+4608], %r4; st.u32 [%rd10+5120], %r2; mov.u32 %r103, %r1;
ld.global.nc.u32 %r104, [%rd2]; ld.global.nc.v4.u32 {%r105, %r106, %r107, %r108}, [%rd0+16]; bar.sync 0;
ld.global.u32 %r109, [%rd6+4608]; ld.u32 %r110, [%rd6+5120]; mul.wide.u32 %rd11, %r61, 8; add.s64 %rd11, %rd0, %rd11;
ld.v2.u32 {%r111, %r112}, [%rd11];
"""

_SUMS = """
mul.wide.u32 %rd9, %r0, 16; add.s64 %rd9, %rd9, %rd8; st.global.v4.u32 [%rd9], {%r1, %r2, %r3, %r4};
red.global.add.f32 [%rd9+4], %f1; red.global.add.v2.f32 [%rd9+8], {%f2, %f1}; red.global.add.v4.f32 [%rd9], {%f2, %f3, %f4, %f2};
red.relaxed.sys.global.add.f32 [%rd9], %f4;
"""

_LARGEST = """
mov.u32 %r60, smem; mad.lo.u32 %r60, %r0, 4, %r60; st.shared.u32 [%r60], %r1; st.global.u32 [%rd6+4608], %r1;
atom.shared.max.s32 %r100, [%r60], %r2; atom.shared.max.u32 %r101, [%r60], %r3; atom.shared.min.s32 %r102, [%r60], %r4;
atom.shared.min.u32 %r103, [%r60], %r1; atom.shared.exch.b32 %r104, [%r60], %r2; ld.shared.u32 %r105, [%r60];
atom.global.max.s32 %r106, [%rd6+4608], %r2; atom.global.min.u32 %r107, [%rd6+4608], %r3;
red.global.min.s32 [%rd6+4608], %r4; red.global.max.u32 [%rd6+4608], %r1; ld.global.u32 %r108, [%rd6+4608];
"""

_VECTORS = """
mul.wide.u32 %rd9, %r0, 32; and.b64 %rd9, %rd9, 2047; xor.b64 %rd9, %rd9, 64; add.s64 %rd9, %rd0, %rd9;
ld.global.v8.b32 {%r10, %r11, %r12, %r13, %r14, %r15, %r16, %r17}, [%rd9];
ld.global.nc.L1::evict_first.L2::evict_first.v8.b32 {%r20, %r21, %r22, %r23, %r24, %r25, %r26, %r27}, [%rd9];
ld.global.nc.L1::no_allocate.L2::evict_last.L2::256B.v8.b32 {%r30, %r31, %r32, %r33, %r34, %r35, %r36, %r37}, [%rd9];
sub.s64 %rd10, %rd8, %rd1; mul.wide.u32 %rd11, %r0, 32; add.s64 %rd10, %rd8, %rd11; xor.b32 %r20, %r20, %r31; xor.b32 %r27, %r27, %r30;
st.global.v8.b32 [%rd10], {%r17, %r10, %r11, %r12, %r13, %r14, %r15, %r16};
st.global.L1::no_allocate.L2::evict_first.v8.b32 [%rd10+4096], {%r20, %r21, %r22, %r23, %r24, %r25, %r26, %r27};
st.global.L1::no_allocate.v4.b32 [%rd10+8192], {%r34, %r35, %r36, %r37}; mov.u32 %r38, 0;
st.global.L1::no_allocate.b32 [%rd10+8208], %r32; st.global.L1::no_allocate.v2.b32 [%rd10+8216], {%r33, %r38};
st.global.b32 [%rd10+8212], %r0; st.global.v8.b32 [%rd10+12288], {%r38, %r38, %r38, %r38, %r38, %r38, %r38, %r38};
"""

_EXTENSIONS = [
    "shf.l.wrap.b32 $, %r1, %r2, %r3;", "shf.l.wrap.b32 $, %r1, %r1, 7;", "shf.l.wrap.b32 $, %r1, %r2, 0;",
    *(f"szext.{m}.{t} $, %r1, {n};" for m in ("clamp", "wrap") for t in ("s32", "u32") for n in ("%r2", "11", "1")),
    "and.b32 %r50, %r2, 63; szext.clamp.s32 $, %r1, %r50;", "and.b32 %r50, %r2, 63; szext.wrap.s32 $, %r1, %r50;",
]  # fmt: skip

_MATCHES = [
    "and.b32 %r50, %r1, 3; match.any.sync.b32 $, %r50, -1;", "match.any.sync.b32 $, %r1, -1;", "match.any.sync.b64 $, %rd4, -1;",
    "shr.u32 %r50, %r0, 5; match.all.sync.b32 $|%p1, %r50, -1;", "shr.u32 %r50, %r0, 4; match.all.sync.b32 $|%p1, %r50, -1;",
    predicate("match.all.sync.b32 %r51|%p1, %r0, -1;"), predicate("shr.u32 %r50, %r0, 6; match.all.sync.b32 %r51|%p1, %r50, -1;"),
    "cvt.u64.u32 %rd8, %r0; match.all.sync.b64 $|%p1, %rd8, -1;",
]  # fmt: skip

_COUNTED = """
mov.u32 %r60, smem; mad.lo.u32 %r61, %r0, 4, %r60; st.shared.u32 [%r61], %r1; bar.sync 0; and.b32 %r62, %r2, 28; add.u32 %r62, %r62, %r60;
red.shared.add.u32 [%r62], 1; setp.gt.u32 %p1, %r3, 0x40000000; @%p1 red.shared.add.u32 [%r62+32], 1; bar.sync 0;
ld.shared.u32 %r100, [%r61];
"""

_DOTS = [
    *(f"dp4a.{a}.{b} $, %r1, %r2, %r3;" for a in ("s32", "u32") for b in ("s32", "u32")),
    *(f"dp2a.{h}.{a}.{b} $, %r1, %r2, %r3;" for h in ("lo", "hi") for a in ("s32", "u32") for b in ("s32", "u32")),
    "brev.b32 $, %r1;", *(f"bfind{s}.{t} $, %r1;" for s in ("", ".shiftamt") for t in ("s32", "u32")),
]  # fmt: skip

_ORDERS = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
_HALF_COMPARISONS = [
    *(f"set.{c}.u32.{t} $, %r1, %r2;" for c in _ORDERS for t in ("bf16x2", "f16x2")),
    *(f"setp.{c}.{t} %p1|%p2, %r1, %r2; selp.u32 %r50, 1, 2, %p1; selp.u32 %r51, 4, 8, %p2; add.u32 $, %r50, %r51;"
      for c in _ORDERS for t in ("bf16x2", "f16x2")),
    "set.lt.bf16x2.bf16x2 $, %r1, %r2;", "set.geu.f16x2.f16x2 $, %r1, %r2;", "set.lt.ftz.f16x2.f16x2 $, %r1, %r2;",
    *(f"setp.lt.s32 %p3, %r3, %r4; set.ge.{b}.u32.bf16x2 $, %r1, %r2, %p3;" for b in ("and", "or", "xor")),
    "setp.lt.s32 %p3, %r3, %r4; setp.ge.or.ftz.f16x2 %p1|%p2, %r1, %r2, %p3; selp.u32 %r50, 1, 2, %p1; selp.u32 $, %r50, 8, %p2;",
    "abs.bf16x2 %r50, %r1; neg.bf16x2 %r51, %r2; set.gt.u32.bf16x2 $, %r50, %r51;",
    "mov.b32 {%h1, %h2}, %r2; mov.b32 %r50, {%h2, %h2}; set.lt.u32.bf16x2 $, %r1, %r50;",
    "mov.b32 %r50, 0x3F804000; set.gt.u32.bf16x2 $, %r1, %r50;",
]  # fmt: skip

_MIXED = [
    *(f"mov.b32 {{%h1, %h2}}, %r4; {floating(line)}" for t in ("bf16", "f16") for line in (
        f"add.rn.f32.{t} %f9, %h1, %f2;", f"sub.rn.f32.{t} %f9, %h2, %f2;", f"fma.rn.f32.{t} %f9, %h1, %h2, %f3;",
        f"fma.rn.f32.{t} %f9, %h2, %h2, %f1;")),
    "cvt.rn.satfinite.bf16x2.f32 $, %f1, %f2;", "cvt.rn.satfinite.f16x2.f32 $, %f1, %f2;",
    "mul.f32 %f8, %f1, 0f7E000000; mul.f32 %f9, %f2, 0f7E000000; cvt.rn.satfinite.bf16x2.f32 $, %f8, %f9;",
]  # fmt: skip

_PRODUCT = "mma.sync.aligned.m16n8k16.row.col.f32.{t}.{t}.f32 {{%f10, %f11, %f12, %f13}}, {{%r10, %r11, %r12, %r13}}, {{{b}}}, {{{c}}};"
_HALF_WORDS = "".join(f"and.b32 %r{10 + i}, %r{1 + i}, 0xBFFFBFFF; or.b32 %r{10 + i}, %r{10 + i}, 0x30003000;" for i in range(4))
_PRODUCTS = (
    "mov.f32 %f20, 0f3F000000;"
    + _HALF_WORDS
    + "".join(
        _PRODUCT.format(t=t, b=b, c=c) + "".join(f"mov.b32 %r{100 + 4 * index + i}, %f{10 + i};" for i in range(4))
        for index, (t, b, c) in enumerate(
            (
                ("bf16", "%r12, %r10", "%f20, %f20, %f20, %f20"),
                ("bf16", "%r11, %r13", "%f10, %f11, %f12, %f13"),
                ("f16", "%r12, %r11", "%f13, %f10, %f11, %f12"),
            )
        )
    )
)

# Codes of numbers below 2: none is NaN.
_BYTE_WORDS = "".join(f"and.b32 %r{10 + i}, %r{1 + i}, 0xBFBFBFBF;" for i in range(4))
_BYTE_PRODUCT = _PRODUCT.replace("k16", "k32")
_BYTE_PRODUCTS = (
    "mov.f32 %f20, 0f3F000000;"
    + _BYTE_WORDS
    + "".join(
        _BYTE_PRODUCT.format(t="e4m3", b=b, c=c) + "".join(f"mov.b32 %r{100 + 4 * index + i}, %f{10 + i};" for i in range(4))
        for index, (b, c) in enumerate((("%r12, %r10", "%f20, %f20, %f20, %f20"), ("%r11, %r13", "%f10, %f11, %f12, %f13")))
    )
)

_SCALED_PRODUCT = _BYTE_PRODUCT.replace("m16n8", "kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8").replace(".f32 {", ".f32.ue8m0 {")
_SCALED_PRODUCTS = (
    "mov.f32 %f20, 0f3F000000; and.b32 %r20, %r1, 0x3F; add.u32 %r20, %r20, 96; mov.u32 %r21, 0x7F7F7F7F;"
    + _BYTE_WORDS
    + "".join(
        _SCALED_PRODUCT.replace(";", scales).format(t="e4m3", b=b, c=c)
        + "".join(f"mov.b32 %r{100 + 4 * index + i}, %f{10 + i};" for i in range(4))
        for index, (b, c, scales) in enumerate(
            (
                ("%r12, %r10", "%f20, %f20, %f20, %f20", ", %r20, {{0, 0}}, %r21, {{0, 0}};"),
                ("%r11, %r13", "%f10, %f11, %f12, %f13", ", %r21, {{0, 0}}, %r20, {{0, 0}};"),
            )
        )
    )
)

_BYTE_MATRICES = """
mov.u32 %r60, smem; and.b32 %r61, %r0, 31; shr.u32 %r62, %r0, 5; mad.lo.u32 %r60, %r62, 2048, %r60; mad.lo.u32 %r63, %r61, 16, %r60;
xor.b32 %r64, %r61, 5; mad.lo.u32 %r64, %r64, 32, %r60; mov.u32 %r65, 0;
st.shared.v4.u32 [%r63], {%r65, %r65, %r65, %r65}; st.shared.v4.u32 [%r63+512], {%r65, %r65, %r65, %r65};
st.shared.v4.u32 [%r63+1024], {%r65, %r65, %r65, %r65}; st.shared.v4.u32 [%r63+1536], {%r65, %r65, %r65, %r65}; bar.warp.sync -1;
stmatrix.sync.aligned.m16n8.x4.trans.shared.b8 [%r64], {%r1, %r2, %r3, %r4}; bar.warp.sync -1;
ld.shared.v4.u32 {%r100, %r101, %r102, %r103}, [%r63]; ld.shared.v4.u32 {%r104, %r105, %r106, %r107}, [%r63+512]; bar.warp.sync -1;
stmatrix.sync.aligned.m16n8.x2.trans.shared.b8 [%r64], {%r3, %r1}; bar.warp.sync -1;
stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r64+16], {%r2}; bar.warp.sync -1;
ld.shared.v4.u32 {%r108, %r109, %r110, %r111}, [%r63]; ld.shared.v4.u32 {%r112, %r113, %r114, %r115}, [%r63+512];
"""

_BULK = """
sub.s64 %rd9, %rd6, %rd1; mov.u32 %r60, smem; shl.b32 %r61, %r0, 2; add.u32 %r62, %r60, %r61; st.shared.u32 [%r62], %r1;
fence.proxy.async; bar.sync 0; setp.ne.u32 %p1, %r0, 0; @%p1 bra FIRST;
cp.async.bulk.global.shared::cta.bulk_group [%rd9], [%r60], 512; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
FIRST: setp.gt.u32 %p1, %r0, 3; @%p1 bra SECOND;
shl.b32 %r63, %r0, 7; add.u32 %r64, %r60, %r63; xor.b32 %r65, %r63, 128; cvt.u64.u32 %rd10, %r65; add.s64 %rd10, %rd9, %rd10;
cp.async.bulk.global.shared::cta.bulk_group [%rd10+512], [%r64], 128; cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0; cp.async.bulk.wait_group 0;
SECOND: bar.sync 0; ld.global.u32 %r100, [%rd6]; ld.global.u32 %r101, [%rd6+512];
"""

_MANY = 40  # values that live at once, more than the limit of registers leaves room for
_SPILLED = "\n".join((
    *(f"ld.volatile.global.u32 %r{200 + index}, [%rd2+{ROW * (index % 4)}];" for index in range(_MANY)), "bar.sync 0;",
    *(f"mad.lo.u32 %r{200 + index}, %r{200 + index}, {2 * index + 3}, %r{200 + (7 * index + 3) % _MANY};" for index in range(_MANY)),
    "bar.sync 0;",
    *(f"xor.b32 %r{100 + index}, %r{200 + index}, %r{200 + (11 * index + 5) % _MANY};" for index in range(_MANY)),
))  # fmt: skip

_CONTROL = """
mov.u32 %r100, 0; and.b32 %r50, %r1, 15;
LOOP: setp.eq.u32 %p1, %r50, 0; @%p1 bra DONE; add.u32 %r100, %r100, %r2; sub.u32 %r50, %r50, 1; xor.b32 %r100, %r100, %r50; bra LOOP;
DONE: bar.warp.sync -1; shfl.sync.bfly.b32 %r101, %r100, 3, 0x1f, -1;
setp.lt.s32 %p2, %r1, %r2; mov.u32 %r102, 7; @!%p2 bra ELSE;
and.b32 %r51, %r3, 7; INNER: add.u32 %r102, %r102, %r51; setp.gt.u32 %p3, %r51, 3; @%p3 bra OUT; add.u32 %r51, %r51, 1; bra INNER;
OUT: mad.lo.u32 %r102, %r102, %r102, %r4; bra JOIN;
ELSE: div.u32 %r102, %r3, %r4; JOIN: bar.warp.sync -1; shfl.sync.down.b32 %r103, %r102, 1, 0x1f, -1;
"""

_UNIFORM = """
mov.u32 %r70, %ctaid.x; add.u32 %r70, %r70, 5; mov.u32 %r71, %nctaid.x; ld.param.u32 %r72, [p2]; ld.param.u32 %r73, [p2+4];
mad.lo.u32 %r100, %r70, %r72, %r73; add.u32 %r100, %r100, %r0; shl.b32 %r74, %r72, 5; xor.b32 %r74, %r74, %r73; add.u32 %r101, %r74, %r0;
setp.lt.s32 %p1, %r72, %r73; selp.b32 %r75, %r72, %r73, %p1; add.u32 %r102, %r75, %r0; div.u32 %r76, %r72, %r70; add.u32 %r103, %r76, %r0;
ld.param.u64 %rd11, [p2]; add.s64 %rd11, %rd11, 77; mul.lo.u64 %rd11, %rd11, 3; mov.b64 {%r104, %r105}, %rd11;
setp.gt.u64 %p2, %rd11, 12345678; selp.b32 %r106, %r74, %r72, %p2; shr.s32 %r77, %r72, 3; min.s32 %r77, %r77, %r73;
sub.u32 %r107, %r77, %r0;
"""


_ATOMICS = """
mov.u32 %r60, smem; shl.b32 %r61, %r0, 2; add.u32 %r62, %r60, %r61; st.shared.u32 [%r62], %r1; bar.sync 0;
atom.shared.or.b32 %r100, [%r62], %r2; atom.shared.and.b32 %r101, [%r62], %r3; atom.shared.xor.b32 %r102, [%r62], %r4;
bar.sync 0; and.b32 %r63, %r0, 7; shl.b32 %r63, %r63, 2; add.u32 %r64, %r60, %r63;
red.shared.or.b32 [%r64], %r1; red.shared.and.b32 [%r64+32], %r2; red.shared.xor.b32 [%r64+64], %r3;
red.shared.add.u32 [%r64+96], %r4; bar.sync 0;
ld.shared.u32 %r103, [%r62];
"""


def gathered(name: str, lines: list[str], opcodes: str, before: str = "", **options: Any) -> Evidence:
    """Return the evidence of lines with one result each. before: what the lines share."""
    body, results = numbered(lines)
    return Evidence(name, before + body, results, opcodes, **options)


PLAIN = (
    gathered("integers", _INTEGERS, "IADD3 IMAD IMAD.HI SHF.R.U32.HI SHF.R.S32.HI LOP3.LUT VIMNMX VIADDMNMX IABS POPC PRMT ISETP.GE SEL"),
    gathered("wide", _WIDE, "IADD3.X IMAD.WIDE.U32 IMAD.WIDE IMAD.X SHF.L.U64.HI ISETP.GE.U32.AND.EX ISETP.GE.AND.EX LEA"),
    gathered("divisions", _DIVISIONS, "I2F.U32.RP F2I.FTZ.U32.TRUNC.NTZ CALL.REL.NOINC RET.REL.NODEC I2F.U64.RP MUFU.RCP"),
    gathered("floats", _FLOATS, "FADD FADD.RM FADD.RP FADD.RZ FADD.FTZ FMUL FMUL.RM FFMA FFMA.RZ FFMA.RM FMNMX FMNMX.NAN FSETP.NEU "
        "FSETP.GTU FSETP.NAN FSEL FCHK MUFU.EX2 MUFU.LG2 MUFU.RSQ F2FP.BF16.F32.PACK_AB F2FP.F16.F32.PACK_AB "
        "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C F2F.BF16.F32 F2F.F16.F32 F2I I2FP",
        floats=True),
    gathered("bytes", _BYTES, "F2FP.F16.E4M3.UNPACK_B HADD2.F32"),
    gathered("warps", _WARPS, "SHFL.BFLY SHFL.IDX SHFL.UP SHFL.DOWN VOTE.ANY VOTE.ALL ELECT S2R"),
    Evidence("memory", _MEMORY, 26, "LDS.128 LDS.64 LDS.U8 LDS.S8 LDS.U16 LDS.S16 STS.128 STS.64 STS.U8 STS.U16 BAR.SYNC "
        "LDG.E.128 LDG.E.U8 LDG.E.S16"),
    Evidence("atomics", _ATOMICS, 4, "ATOMS.OR ATOMS.AND ATOMS.XOR ATOMS.ADD"),
    gathered("halves", _HALVES, "HMUL2.BF16_V2 HADD2.BF16_V2 HFMA2 HMUL2 HADD2", floats=True),
    gathered("packed", _PACKED, "FADD2 FADD2.RM FADD2.FTZ FMUL2 FFMA2 FFMA2.FTZ", floats=True, archs=("sm100",)),
    gathered("words", _WORDS, "SHF.R.U64 FLO.U32"),
    Evidence("global", _GLOBAL, 13, "ATOMG.E.ADD ATOMG.E.XOR ATOMG.E.EXCH REDG.E.ADD LDG.E.CONSTANT ST.E LD.E LD.E.64"),
    Evidence("sums", _SUMS, 0, "REDG.E.ADD.F32.FTZ.RN REDG.E.ADD.F32x2.FTZ.RN REDG.E.ADD.F32x4.FTZ.RN", floats=True, extra=4),
    Evidence("largest", _LARGEST, 9, "ATOMS.MAX ATOMS.MAX.S32 ATOMS.MIN ATOMS.MIN.S32 ATOMS.EXCH ATOMG.E.MAX.S32 ATOMG.E.MIN "
        "REDG.E.MIN.S32 REDG.E.MAX", extra=1),
    Evidence("vectors", _VECTORS, 0, "LDG.E.ENL2.256 LDG.E.EF.EFL2.256.CONSTANT LDG.E.NA.ELL2.LTC256B.256.CONSTANT STG.E.ENL2.256 "
        "STG.E.NA.EFL2.256 STG.E.NA.128 STG.E.NA", extra=32, archs=("sm100",)),
    gathered("extensions", _EXTENSIONS, "SGXT SGXT.U32 SGXT.W SGXT.W.U32 SHF.L.W.U32.HI"),
    gathered("matches", _MATCHES, "MATCH.ANY MATCH.ALL MATCH.ANY.U64 MATCH.ALL.U64"),
    Evidence("counted", _COUNTED, 1, "ATOMS.POPC.INC.32"),
    gathered("dots", _DOTS, "IDP.4A.S8.S8 IDP.4A.S8.U8 IDP.4A.U8.S8 IDP.4A.U8.U8 IDP.2A.LO.S16.S8 IDP.2A.HI.S16.U8 IDP.2A.LO.U16.S8 "
        "IDP.2A.HI.U16.U8 BREV FLO FLO.SH FLO.U32.SH FLO.U32"),
    gathered("comparisons of halves", _HALF_COMPARISONS, " ".join(
        [f"HSET2.BF16_V2.{c.upper()}.AND HSET2.{c.upper()}.AND HSETP2.BF16_V2.{c.upper()}.AND HSETP2.{c.upper()}.AND" for c in _ORDERS]
        + ["HSET2.BF16_V2.BF.LT.AND HSET2.BF.GEU.AND HSET2.BF.LT.FTZ.AND HSET2.BF16_V2.GE.OR HSET2.BF16_V2.GE.XOR HSETP2.GE.FTZ.OR"]),
        floats=True),
    gathered("mixed", _MIXED, "FHADD FHADD.BF16 FHFMA FHFMA.BF16 F2FP.SATFINITE.BF16.F32.PACK_AB F2FP.SATFINITE.F16.F32.PACK_AB",
        floats=True, archs=("sm100",)),
    Evidence("warp products", _PRODUCTS, 12, "HMMA.16816.F32.BF16 HMMA.16816.F32"),
    Evidence("warp products of bytes", _BYTE_PRODUCTS, 8, "QMMA.16832.F32.E4M3.E4M3", archs=("sm120",)),
    Evidence("scaled warp products of bytes", _SCALED_PRODUCTS, 8, "QMMA.SF.16832.F32.E4M3.E4M3.E8", archs=("sm120",)),
    Evidence("byte matrices", _BYTE_MATRICES, 16, "STSM.8.MT168 STSM.8.MT168.2 STSM.8.MT168.4", archs=("sm100",)),
    Evidence("bulk", _BULK, 2, "UBLKCP.G.S UTMACMDFLUSH DEPBAR.LE R2UR R2UR.OR BRA.U.ANY CCTL.IVALL"),
    Evidence("spilled", _SPILLED, _MANY, "STL LDL", registers=32),
    Evidence("control", _CONTROL, 4, "BSSY BSYNC BRA"),
    Evidence("uniform", _UNIFORM, 8, "UIADD3"),
)  # fmt: skip

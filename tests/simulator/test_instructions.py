"""One instruction at a time, against plain Python."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest

from cute_mla.simulator import Policy
from tests.simulator.small_kernels import Kernel

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
NASTY = (
    0,
    1,
    2,
    3,
    5,
    31,
    32,
    33,
    63,
    64,
    127,
    128,
    255,
    256,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x10000,
    0x7FFFFFFF,
    0x80000000,
    0x80000001,
    0xFFFFFFFE,
)
VALUES = np.array([*NASTY, M32, 0x12345678, 0x9ABCDEF0, 0xDEADBEEF, 7, 1000, 99999, 0xFFFFFF80, 0x00FF00FF, 4], np.uint32)


def signed(value: int, bits: int = 32) -> int:
    """Two's complement."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def on_values(code: str, second: np.ndarray | None = None, third: np.ndarray | None = None) -> list[int]:
    """Run code with %r1, %r2, %r3 = elements of the inputs; the result is %r4."""
    inputs = [VALUES, np.roll(VALUES, 7) if second is None else second, np.roll(VALUES, 13) if third is None else third]
    arrays = [np.ascontiguousarray(array, np.uint32) for array in inputs]
    loads = "".join(
        f"ld.param.u64 %rd{3 + index}, [p{index}];\nadd.s64 %rd{3 + index}, %rd{3 + index}, %rd1;\n"
        f"ld.global.u32 %r{1 + index}, [%rd{3 + index}];\n"
        for index in range(3)
    )
    out = np.zeros(32, np.uint32)
    body = f"{loads}{code}\nld.param.u64 %rd7, [p3];\nadd.s64 %rd7, %rd7, %rd1;\nst.global.u32 [%rd7], %r4;"
    report = Kernel(body).run(*arrays, out)
    assert report.ok, report.findings
    return [int(value) for value in out]


def expected(function: object, second: np.ndarray | None = None, third: np.ndarray | None = None) -> list[int]:
    """The same from a Python function of three unsigned ints."""
    b = np.roll(VALUES, 7) if second is None else second
    c = np.roll(VALUES, 13) if third is None else third
    return [function(int(x), int(y), int(z)) & M32 for x, y, z in zip(VALUES, b, c, strict=True)]  # type: ignore[operator]


def truncated(a: int, b: int) -> int:
    """Quotient towards zero; all ones for a division by zero."""
    if b == 0:
        return -1
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def prmt(a: int, b: int, selector: int) -> int:
    """Byte permutation with sign replication."""
    source = (b << 32 | a).to_bytes(8, "little")
    result = 0
    for place in range(4):
        nibble = selector >> 4 * place & 15
        byte = source[nibble & 7]
        result |= ((255 if byte & 128 else 0) if nibble & 8 else byte) << 8 * place
    return result


INTEGER = {
    "add.s32 %r4, %r1, %r2;": lambda a, b, c: a + b,
    "sub.u32 %r4, %r1, %r2;": lambda a, b, c: a - b,
    "add.s32 %r4, %r1, -5;": lambda a, b, c: a - 5,
    "mul.lo.s32 %r4, %r1, %r2;": lambda a, b, c: a * b,
    "mul.hi.u32 %r4, %r1, %r2;": lambda a, b, c: a * b >> 32,
    "mul.hi.s32 %r4, %r1, %r2;": lambda a, b, c: signed(a) * signed(b) >> 32,
    "mul.wide.s32 %rd9, %r1, %r2;\nmov.b64 {%r5, %r4}, %rd9;": lambda a, b, c: signed(a) * signed(b) >> 32,
    "mul.wide.u32 %rd9, %r1, %r2;\nshr.u64 %rd9, %rd9, 16;\ncvt.u32.u64 %r4, %rd9;": lambda a, b, c: a * b >> 16,
    "mad.lo.s32 %r4, %r1, %r2, %r3;": lambda a, b, c: a * b + c,
    "mad.hi.u32 %r4, %r1, %r2, %r3;": lambda a, b, c: (a * b >> 32) + c,
    "div.s32 %r4, %r1, %r2;": lambda a, b, c: truncated(signed(a), signed(b)),
    "div.u32 %r4, %r1, %r2;": lambda a, b, c: a // b if b else M32,
    "rem.u32 %r4, %r1, %r2;": lambda a, b, c: a % b if b else a,
    "rem.s32 %r4, %r1, %r2;": lambda a, b, c: signed(a) - truncated(signed(a), signed(b)) * signed(b) if b else a,
    "neg.s32 %r4, %r1;": lambda a, b, c: -a,
    "abs.s32 %r4, %r1;": lambda a, b, c: abs(signed(a)),
    "min.s32 %r4, %r1, %r2;": lambda a, b, c: min(signed(a), signed(b)),
    "max.u32 %r4, %r1, %r2;": lambda a, b, c: max(a, b),
    "min.relu.s32 %r4, %r1, %r2;": lambda a, b, c: max(min(signed(a), signed(b)), 0),
    "and.b32 %r4, %r1, %r2;": lambda a, b, c: a & b,
    "or.b32 %r4, %r1, %r2;": lambda a, b, c: a | b,
    "xor.b32 %r4, %r1, %r2;": lambda a, b, c: a ^ b,
    "not.b32 %r4, %r1;": lambda a, b, c: ~a,
    "shl.b32 %r4, %r1, %r2;": lambda a, b, c: a << b if b < 32 else 0,
    "shr.u32 %r4, %r1, %r2;": lambda a, b, c: a >> b if b < 32 else 0,
    "shr.s32 %r4, %r1, %r2;": lambda a, b, c: signed(a) >> min(b, 32),
    "shl.b32 %r4, %r1, 40;": lambda a, b, c: 0,
    "shf.l.wrap.b32 %r4, %r1, %r2, %r3;": lambda a, b, c: (b << 32 | a) << (c & 31) >> 32,
    "shf.r.clamp.b32 %r4, %r1, %r2, %r3;": lambda a, b, c: (b << 32 | a) >> min(c, 32),
    "popc.b32 %r4, %r1;": lambda a, b, c: bin(a).count("1"),
    "clz.b32 %r4, %r1;": lambda a, b, c: 32 - a.bit_length(),
    "brev.b32 %r4, %r1;": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "bfind.u32 %r4, %r1;": lambda a, b, c: a.bit_length() - 1,
    "lop3.b32 %r4, %r1, %r2, %r3, 0xE8;": lambda a, b, c: (a & b) | (a & c) | (b & c),
    "lop3.b32 %r4, %r1, %r2, %r3, 0x96;": lambda a, b, c: a ^ b ^ c,
    "prmt.b32 %r4, %r1, %r2, %r3;": lambda a, b, c: prmt(a, b, c),
    "prmt.b32 %r4, %r1, %r2, 0x5410;": lambda a, b, c: prmt(a, b, 0x5410),
    "prmt.b32 %r4, %r1, %r2, 0x9876;": lambda a, b, c: prmt(a, b, 0x9876),
    "setp.lt.s32 %p1, %r1, %r2;\nselp.b32 %r4, %r1, %r2, %p1;": lambda a, b, c: a if signed(a) < signed(b) else b,
    "setp.hs.u32 %p1, %r1, %r2;\nselp.b32 %r4, 1, 0, %p1;": lambda a, b, c: a >= b,
    "cvt.s32.s8 %r4, %r1;": lambda a, b, c: signed(a, 8),
    "mov.b32 {%h1, %h2}, %r1;\nmov.b32 %r4, {%h2, %h1};": lambda a, b, c: a >> 16 | a << 16,
    "cvt.u16.u32 %h1, %r1;\nmul.wide.u16 %r4, %h1, %h1;": lambda a, b, c: (a & 0xFFFF) ** 2,
    "cvt.u16.u32 %h1, %r1;\ncvt.u16.u32 %h2, %r2;\nmul.hi.u16 %h3, %h1, %h2;\n"
    "cvt.u32.u16 %r4, %h3;": lambda a, b, c: (a & 0xFFFF) * (b & 0xFFFF) >> 16,
    "mov.u32 %r4, 0;\nsetp.eq.s32 %p1, %r1, %r2;\n@!%p1 mov.u32 %r4, %r1;": lambda a, b, c: 0 if a == b else a,
    "bfe.u32 %r4, %r1, 4, 8;": lambda a, b, c: a >> 4 & 255,
    "bfe.s32 %r4, %r1, 4, 8;": lambda a, b, c: signed(a >> 4, 8),
    "bfi.b32 %r4, %r1, %r2, 8, 12;": lambda a, b, c: (b & ~0xFFF00) | (a & 0xFFF) << 8,
}  # fmt: skip


@pytest.mark.parametrize("code", INTEGER)
def test_integer(code: str) -> None:
    assert on_values(code) == expected(INTEGER[code])


def test_setp_second_destination_is_the_opposite_combined() -> None:
    code = "setp.ne.u32 %p3, %r3, 0;\nsetp.gt.and.u32 %p1|%p2, %r1, %r2, %p3;\nselp.b32 %r4, 1, 0, %p2;"
    assert on_values(code) == expected(lambda a, b, c: int(not a > b and c != 0))


FLOATS = np.array(
    [0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, math.nan, 3e38, -3e38, 1e-40, 1.1754944e-38, 0.1, 7.25, -2.5, 65504.0, 2.0**-149],
    np.float32,
)


def float_cases(code: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Run code with floats in %r1, %r2, %r3; returns inputs and the result as f32."""
    pairs = np.tile(FLOATS, 2)
    arrays = [pairs, np.roll(np.repeat(FLOATS, 2), 3), np.roll(pairs, 5)]
    loads = "".join(
        f"ld.param.u64 %rd{3 + index}, [p{index}];\nadd.s64 %rd{3 + index}, %rd{3 + index}, %rd1;\n"
        f"ld.global.f32 %f{1 + index}, [%rd{3 + index}];\n"
        for index in range(3)
    )
    out = np.zeros(32, np.float32)
    report = Kernel(f"{loads}{code}\nld.param.u64 %rd7, [p3];\nadd.s64 %rd7, %rd7, %rd1;\nst.global.f32 [%rd7], %f4;").run(*arrays, out)
    assert report.ok, report.findings
    return (*arrays, out)  # type: ignore[return-value]


def flushed(x: np.ndarray) -> np.ndarray:
    """Subnormals as zeros."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


FLOAT = {
    "add.f32 %f4, %f1, %f2;": lambda a, b, c: a + b,
    "sub.f32 %f4, %f1, %f2;": lambda a, b, c: a - b,
    "mul.f32 %f4, %f1, %f2;": lambda a, b, c: a * b,
    "mul.ftz.f32 %f4, %f1, %f2;": lambda a, b, c: flushed(flushed(a) * flushed(b)),
    "fma.rn.f32 %f4, %f1, %f2, %f3;": lambda a, b, c: (a.astype(np.longdouble) * b + c).astype(np.float32),
    "max.f32 %f4, %f1, %f2;": lambda a, b, c: np.fmax(a, b),
    "min.NaN.f32 %f4, %f1, %f2;": lambda a, b, c: np.minimum(a, b),
    "neg.f32 %f4, %f1;": lambda a, b, c: -a,
    "copysign.f32 %f4, %f1, %f2;": lambda a, b, c: np.copysign(b, a),
    "ex2.approx.ftz.f32 %f4, %f1;": lambda a, b, c: flushed(np.exp2(flushed(a).astype(np.float64)).astype(np.float32)),
    "lg2.approx.f32 %f4, %f1;": lambda a, b, c: np.log2(a.astype(np.float64)).astype(np.float32),
    "rcp.approx.ftz.f32 %f4, %f1;": lambda a, b, c: flushed((1 / flushed(a).astype(np.float64)).astype(np.float32)),
    "setp.lt.f32 %p1, %f1, %f2;\nselp.f32 %f4, 0f3F800000, 0f00000000, %p1;": lambda a, b, c: (a < b).astype(np.float32),
    "setp.leu.f32 %p1, %f1, %f2;\nselp.f32 %f4, 0f3F800000, 0f00000000, %p1;": lambda a, b, c: (~(a > b)).astype(np.float32),
    "setp.ne.f32 %p1, %f1, %f2;\nselp.f32 %f4, 0f3F800000, 0f00000000, %p1;": lambda a, b, c: ((a < b) | (a > b)).astype(np.float32),
    "setp.neu.f32 %p1, %f1, %f2;\nselp.f32 %f4, 0f3F800000, 0f00000000, %p1;": lambda a, b, c: (a != b).astype(np.float32),
    "setp.nan.f32 %p1, %f1, %f2;\nselp.f32 %f4, 0f3F800000, 0f00000000, %p1;": lambda a, b, c: (np.isnan(a) | np.isnan(b)).astype(
        np.float32
    ),
    "cvt.rzi.s32.f32 %r4, %f1;\ncvt.rn.f32.s32 %f4, %r4;": lambda a, b, c: np.where(
        np.isnan(a), 0, np.clip(np.trunc(a.astype(np.float64)), -(2.0**31), 2.0**31 - 1)
    ).astype(np.float32),
}


@pytest.mark.parametrize("code", FLOAT)
def test_float(code: str) -> None:
    with np.errstate(all="ignore"):
        a, b, c, out = float_cases(code)
        np.testing.assert_array_equal(out, FLOAT[code](a, b, c))  # type: ignore[no-untyped-call]


def test_bf16_pack_has_the_first_source_on_top() -> None:
    def bits(value: float) -> int:
        return struct.unpack("<I", struct.pack("<f", value))[0] >> 16

    out = np.zeros(32, np.uint32)
    report = Kernel("mov.f32 %f1, 0f3F800000;\nmov.f32 %f2, 0fC0000000;\ncvt.rn.bf16x2.f32 %r1, %f1, %f2;\nst.global.u32 [%rd2], %r1;").run(
        out
    )
    assert report.ok
    assert int(out[3]) == bits(1.0) << 16 | bits(-2.0)


# ---------------------------------------------------------------- lanes


def lanes(code: str, threads: int = 32, policy: Policy | None = None) -> list[int]:
    """Run code that leaves a result in %r4."""
    out = np.zeros(threads, np.uint32)
    report = Kernel(f"{code}\nst.global.u32 [%rd2], %r4;", threads=threads).run(out, policy=policy)
    assert report.ok, report.findings
    return [int(value) for value in out]


def test_shuffles() -> None:
    every = range(64)
    assert lanes("shfl.sync.bfly.b32 %r4, %r0, 2, 31, -1;", 64) == [lane ^ 2 for lane in every]
    assert lanes("shfl.sync.idx.b32 %r4, %r0, 5, 31, -1;", 64) == [lane // 32 * 32 + 5 for lane in every]
    assert lanes("shfl.sync.up.b32 %r4, %r0, 3, 0, -1;", 64) == [lane - 3 if lane % 32 >= 3 else lane for lane in every]
    assert lanes("shfl.sync.down.b32 %r4|%p1, %r0, 1, 31, -1;\n@!%p1 mov.u32 %r4, 99;", 64) == [
        lane + 1 if lane % 32 < 31 else 99 for lane in every
    ]
    assert lanes("and.b32 %r1, %r0, 7;\nshfl.sync.idx.b32 %r4, %r0, %r1, 31, -1;") == [lane & 7 for lane in range(32)]
    assert lanes("shfl.sync.idx.b32 %r4, %r0, 1, 0x181f, -1;") == [lane // 8 * 8 + 1 for lane in range(32)]  # segments of 8


def test_votes_and_election() -> None:
    assert lanes("setp.eq.u32 %p1, %r0, 33;\nvote.sync.any.pred %p2, %p1, -1;\nselp.b32 %r4, 1, 0, %p2;", 64) == [0] * 32 + [1] * 32
    assert lanes("setp.lt.u32 %p1, %r0, 4;\nvote.sync.ballot.b32 %r4, %p1, -1;") == [15] * 32
    assert lanes("elect.sync %r1|%p1, -1;\nselp.b32 %r4, 1, 0, %p1;", 64) == ([1] + [0] * 31) * 2
    assert lanes("redux.sync.max.s32 %r4, %r0, -1;") == [31] * 32
    assert lanes("and.b32 %r1, %r0, 1;\nmatch.any.sync.b32 %r4, %r1, -1;") == [0x55555555, 0xAAAAAAAA] * 16


# ---------------------------------------------------------------- control flow


@pytest.mark.parametrize("schedule", ["round_robin", "random", "adversarial"])
def test_divergent_loop_reconverges(schedule: str) -> None:
    code = """
        mov.u32 %r4, 0;
        mov.u32 %r1, 0;
    LOOP:
        add.s32 %r1, %r1, 1;
        and.b32 %r2, %r1, 1;
        setp.eq.u32 %p1, %r2, 0;
        @%p1 bra EVEN;
        add.s32 %r4, %r4, %r1;
        bra NEXT;
    EVEN:
        add.s32 %r4, %r4, 1000;
    NEXT:
        setp.le.u32 %p2, %r1, %r0;
        @%p2 bra LOOP;
        shfl.sync.idx.b32 %r5, %r4, 31, 31, -1;
        add.s32 %r4, %r4, %r5;
    """

    def one(lane: int) -> int:
        return sum(1000 if turn % 2 == 0 else turn for turn in range(1, lane + 2))

    assert lanes(code, 64, Policy.named(schedule, 3)) == [one(lane) + one(lane // 32 * 32 + 31) for lane in range(64)]


def test_scoped_labels_and_registers() -> None:
    loop = "{ .reg .pred q; AGAIN: add.u32 %r4, %r4, 1; setp.lt.u32 q, %r4, %d; @q bra AGAIN; }"
    assert lanes(f"mov.u32 %r4, 0;\n{loop.replace('%d', '5')}\n{loop.replace('%d', '9')}") == [9] * 32


def test_special_registers() -> None:
    out = np.zeros(128, np.uint32)
    body = """
        mov.u32 %r1, %ctaid.x;
        mov.u32 %r2, %cluster_ctarank;
        mov.u32 %r3, %clusterid.x;
        mov.u32 %r5, %laneid;
        mad.lo.u32 %r6, %r1, 32, %r0;
        mul.wide.u32 %rd3, %r6, 4;
        add.s64 %rd3, %rd0, %rd3;
        mad.lo.u32 %r4, %r1, 1000, %r5;
        mad.lo.u32 %r4, %r2, 100000, %r4;
        mad.lo.u32 %r4, %r3, 1000000, %r4;
        st.global.u32 [%rd3], %r4;
    """
    assert Kernel(body, grid=4, cluster=2).run(out).ok
    assert out.tolist() == [c * 1000 + lane + c % 2 * 100000 + c // 2 * 1000000 for c in range(4) for lane in range(32)]


# ---------------------------------------------------------------- memory


def test_vector_and_narrow_accesses() -> None:
    data = np.arange(256, dtype=np.uint8)
    out = np.zeros(64, np.uint32)
    body = """
        ld.param.u64 %rd3, [p1];
        and.b32 %r1, %r0, 7;
        mul.wide.u32 %rd4, %r1, 16;
        add.s64 %rd4, %rd4, %rd3;
        ld.global.v4.u32 {%r2, %r3, _, %r5}, [%rd4+16];
        add.u32 %r6, %r2, %r5;
        add.s64 %rd5, %rd3, 200;
        cvt.u64.u32 %rd6, %r1;
        add.s64 %rd5, %rd5, %rd6;
        ld.global.s8 %r7, [%rd5];
        ld.global.u8 %h1, [%rd5];
        cvt.u32.u16 %r8, %h1;
        add.u32 %r7, %r7, %r8;
        shl.b32 %r9, %r0, 3;
        cvt.u64.u32 %rd7, %r9;
        add.s64 %rd7, %rd0, %rd7;
        st.global.v2.b32 [%rd7], {%r6, %r7};
    """
    assert Kernel(body).run(out, data).ok
    words = data.view(np.uint32)
    for lane in range(32):
        k = lane & 7
        byte = 200 + k
        assert out[2 * lane] == (int(words[4 * k + 4]) + int(words[4 * k + 7])) & M32
        assert out[2 * lane + 1] == (signed(byte, 8) + byte) & M32


def test_atomics_return_the_old_value() -> None:
    counter = np.zeros(1, np.uint32)
    out = np.zeros(32, np.uint32)
    body = "ld.param.u64 %rd3, [p1];\natom.global.add.u32 %r1, [%rd3], 2;\nst.global.u32 [%rd2], %r1;"
    assert Kernel(body).run(out, counter).ok
    assert counter[0] == 64
    assert sorted(out.tolist()) == list(range(0, 64, 2))


def test_generic_and_shared_addresses() -> None:
    body = """
        mov.b32 %r1, smem;
        shl.b32 %r2, %r0, 2;
        add.u32 %r1, %r1, %r2;
        st.shared.u32 [%r1], %r0;
        cvt.u64.u32 %rd3, %r1;
        cvta.shared.u64 %rd4, %rd3;
        ld.u32 %r4, [%rd4];
    """
    out = np.zeros(32, np.uint32)
    assert Kernel(body + "st.global.u32 [%rd2], %r4;", smem=128).run(out).ok
    assert out.tolist() == list(range(32))

"""Blackwell's instructions on registers: pairs of f32, mixed precision, three-operand min and max, 8-bit floats and their scales."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial

import numpy as np
import pytest

from tests.simulator import exact
from tests.simulator.exact import M32, decode, encode, signed
from tests.simulator.small_kernels import Kernel, aligned
from tests.simulator.vectors import MODES, Function, Vector, check, float_inputs, half_inputs, real


def each_word(function: Function) -> Function:
    """A function of 32-bit patterns on both halves."""
    return lambda *words: function(*(word & M32 for word in words)) | function(*(word >> 32 for word in words)) << 32


def pair_vectors() -> Iterator[Vector]:
    for z, r in itertools.product(("", ".ftz"), ("", ".rn", ".rz", ".rm", ".rp")):
        rounding = r[1:] or "rn"
        names: dict[str, Callable[..., float]] = {
            "add": partial(exact.total, form="f32", rounding=rounding),
            "sub": lambda a, b, rounding=rounding: exact.total(a, -b, "f32", rounding),
            "mul": partial(exact.product, form="f32", rounding=rounding),
        }
        for name, function in names.items():
            yield Vector(f"{name}{r}{z}.f32x2 {{o}}, {{a}}, {{b}};", "ddd", each_word(real(function, bool(z))))
        if r:
            fused = partial(lambda a, b, c, rounding: exact.total(0.0, c, "f32", rounding, (a, b)), rounding=rounding)
            yield Vector(f"fma{r}{z}.f32x2 {{o}}, {{a}}, {{b}}, {{c}};", "dddd", each_word(real(fused, bool(z))))
    yield Vector("add.rm.f32x2 {o}, {a}, 0x4B4000004B400000;", "dd", each_word(real(lambda a: exact.total(a, 12582912.0, "f32", "rm"))))


def single_vectors() -> Iterator[Vector]:
    for z, n, name in itertools.product(("", ".ftz"), ("", ".NaN"), ("min", "max")):
        one = partial(exact.extreme, largest=name == "max", nan=bool(n))
        chosen = partial(lambda a, b, c, one: one(one(a, b), c), one=one)
        yield Vector(f"{name}{z}{n}.f32 {{o}}, {{a}}, {{b}}, {{c}};", "rrrr", real(chosen, bool(z)))
    yield Vector("mov.b128 {{ _, {o} }}, {{ {a}, {b} }};", "ddd", lambda a, b: b)
    yield Vector("mov.b128 {{ {o}, _ }}, {{ {a}, {b} }};", "ddd", lambda a, b: a)
    for r, satfinite in itertools.product(("rz", "rp"), ("", ".satfinite")):
        code = partial(scale_code, rounding=r, satfinite=bool(satfinite))
        both = partial(lambda a, b, code: code(a) << 8 | code(b), code=code)
        yield Vector(f"cvt.{r}{satfinite}.ue8m0x2.f32 {{o}}, {{a}}, {{b}};", "hrr", both)


def scale_code(bits: int, rounding: str, satfinite: bool) -> int:
    """The code of the power of two next to |x|, below or above."""
    value = abs(decode(bits, "f32"))
    if math.isnan(value):
        return 0xFF
    largest = 0xFE if satfinite else 0xFF
    if math.isinf(value):
        return largest
    below = max((code for code in range(0xFF) if 2.0 ** (code - 127) <= value), default=0)
    if rounding == "rz" or 2.0 ** (below - 127) >= value:
        return below
    return min(below + 1, largest)


def narrow_vectors() -> Iterator[Vector]:
    """Of 16-bit inputs."""
    for form in ("f16", "bf16"):
        for r in ("", ".rn"):
            summed = partial(lambda a, b, form: encode(exact.total(decode(a, form), decode(b, "f32"), "f32"), "f32"), form=form)
            yield Vector(f"add{r}.f32.{form} {{o}}, {{a}}, {{b}};", "rhr", summed)

        def fused(a: int, b: int, c: int, form: str = form) -> int:
            return encode(exact.total(0.0, decode(c, "f32"), "f32", product=(decode(a, form), decode(b, form))), "f32")

        yield Vector(f"fma.rn.f32.{form} {{o}}, {{a}}, {{b}}, {{c}};", "rhhr", fused)


def eight_bit_vectors() -> Iterator[Vector]:
    def spread(a: int) -> int:
        return encode(exact.decode_fp8(a & 255, "e4m3"), "bf16") | encode(exact.decode_fp8(a >> 8, "e4m3"), "bf16") << 16

    def packed(a: int) -> int:
        return exact.encode_fp8(decode(a, "bf16"), "e4m3") | exact.encode_fp8(decode(a >> 16, "bf16"), "e4m3") << 8

    def scale(code: int) -> int:
        return encode(math.nan if code == 0xFF else 2.0 ** (code - 127), "bf16")

    def fixed(code: int, scale: int) -> int:
        if scale == 0xFF:
            return 0x7FFF
        exact_value = Fraction(signed(code, 8), 64) * Fraction(2) ** (scale - 127)
        value = exact.exact_round(exact_value, "bf16")
        return encode(value, "bf16") if math.isfinite(value) else 0xFF7F if value < 0 else 0x7F7F

    def both_fixed(a: int, b: int) -> int:
        return fixed(a & 255, b & 255) | fixed(a >> 8, b >> 8) << 16

    yield Vector("cvt.rn.satfinite.scaled::n2::ue8m0.bf16x2.s2f6x2 {o}, {a}, {b};", "rhh", both_fixed)
    yield Vector("cvt.rn.f16.s16 {o}, {a};", "hh", lambda a: encode(exact.exact_round(Fraction(signed(a, 16)), "f16"), "f16"))
    yield Vector("cvt.rn.bf16x2.e4m3x2 {o}, {a};", "rh", spread)
    yield Vector("cvt.rn.satfinite.bf16x2.e4m3x2 {o}, {a};", "rh", spread)
    yield Vector("cvt.rn.satfinite.e4m3x2.bf16x2 {o}, {a};", "hr", packed)
    yield Vector("cvt.rn.bf16x2.ue8m0x2 {o}, {a};", "rh", lambda a: scale(a & 255) | scale(a >> 8) << 16)


PAIRS = list(pair_vectors())
SINGLES = list(single_vectors())
MIXED = list(narrow_vectors())
EIGHT = list(eight_bit_vectors())
PACKED = [*PAIRS, *SINGLES, *MIXED, *EIGHT]


def pair_inputs(seed: int) -> list[np.ndarray]:
    """Two f32 in every word."""
    low, high = float_inputs(seed), float_inputs(seed + 10)
    return [a | b << np.uint64(32) for a, b in zip(low, (high[2], high[3], high[0], high[1]), strict=True)]


def same_pair(actual: int, wanted: int) -> bool:
    """Equal, or a NaN where a NaN is wanted, in both halves."""
    pairs = ((actual >> shift & M32, wanted >> shift & M32) for shift in (0, 32))
    return all(a == b or (math.isnan(decode(a, "f32")) and math.isnan(decode(b, "f32"))) for a, b in pairs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [1, 2])
def test_pairs(mode: str, seed: int) -> None:
    check(PAIRS, pair_inputs(seed), mode, same=same_pair)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [1, 2])
def test_singles(mode: str, seed: int) -> None:
    floats = {vector for vector in SINGLES if vector.banks[0] == "r"}
    check(SINGLES, float_inputs(seed), mode, lambda vector: "f32" if vector in floats else "")
    inputs = [half_inputs(seed)[0], *float_inputs(seed)[1:]]
    check(MIXED, inputs, mode, lambda _: "f32")
    check(EIGHT, half_inputs(seed), mode)


def test_every_code() -> None:
    """All pairs of equal 8-bit codes, and every code beside its complement."""
    for start in range(0, 256, 64):
        codes = np.arange(start, start + 64, dtype=np.uint64)
        for word in (codes | codes << np.uint64(8), codes | (codes ^ np.uint64(255)) << np.uint64(8)):
            vectors = [vector for vector in EIGHT if vector.banks in ("rh", "rhh")]
            check(vectors, [word.copy(), word[::-1].copy(), word.copy(), word.copy()], "plain")


def test_a_128_bit_register_is_a_pair() -> None:
    """Loads, moves that swap the halves through one register, and stores, with an undefined half that stays one."""
    body = """
        .reg .b128 %quad<3>, %single;
        ld.param.u64 %rd3, [p1];
        ld.global.b128 %quad1, [%rd3];
        mov.b128 %quad2, %quad1;
        mov.b128 {%rd4, %rd5}, %quad2;
        mov.b128 %single, {%rd5, %rd4};
        mov.b128 {%rd4, %rd5}, {%rd5, %rd4};
        mov.b32 %r1, smem;
        st.shared.b128 [%r1], %single;
        ld.shared.v2.b64 {%rd6, %rd7}, [%r1];
        st.global.v2.b64 [%rd0], {%rd6, %rd7};
        st.global.v2.b64 [%rd0+16], {%rd4, %rd5};
        ld.shared.u64 %rd8, [%r1+16];
        mov.b128 %quad0, {%rd8, %rd4};
        mov.b128 {%rd9, %rd10}, %quad0;
        st.global.b64 [%rd0+32], %rd10;
    """
    source, out = aligned(2, np.uint64), aligned(6, np.uint64)
    source[:] = [0x1111222233334444, 0x5555666677778888]
    assert Kernel(body, smem=64, threads=1).run(out, source).ok
    assert out.tolist() == [int(source[1]), int(source[0])] * 2 + [int(source[1]), 0]
    poisoned = Kernel(body.replace("[%rd0+32], %rd10", "[%rd0+32], %rd9"), smem=64, threads=1).run(out, source)
    assert [finding.kind for finding in poisoned.findings] == ["poison"]

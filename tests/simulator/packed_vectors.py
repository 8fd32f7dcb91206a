"""Vectors of Blackwell's instructions on registers, each with a function that says what it computes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from functools import partial

from tests.simulator import exact
from tests.simulator.exact import M32, decode, encode, signed
from tests.simulator.vectors import Function, Vector, real, rounded_vectors


def each_word(function: Function) -> Function:
    """Return a function of 32-bit patterns on both halves."""
    return lambda *words: function(*(word & M32 for word in words)) | function(*(word >> 32 for word in words)) << 32


def pair_vectors() -> Iterator[Vector]:
    yield from rounded_vectors("f32x2", "d", each_word)
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
    """Return the code of the power of two next to |x|, below or above."""
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
    """Yield the vectors of 16-bit inputs."""
    for form in ("f16", "bf16"):
        for r in ("", ".rn"):
            summed = partial(lambda a, b, form: encode(exact.total(decode(a, form), decode(b, "f32"), "f32"), "f32"), form=form)
            yield Vector(f"add{r}.f32.{form} {{o}}, {{a}}, {{b}};", "rhr", summed)
            less = partial(lambda a, b, form: encode(exact.total(decode(a, form), -decode(b, "f32"), "f32"), "f32"), form=form)
            yield Vector(f"sub{r}.f32.{form} {{o}}, {{a}}, {{b}};", "rhr", less)

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

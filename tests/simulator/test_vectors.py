"""Every accepted spelling of an instruction on registers, against Python integers and fractions, in all kinds of generated code."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest

from cute_mla.simulator.isa import table
from tests.simulator import exact
from tests.simulator.exact import M16, M32, decode, encode, flush, signed
from tests.simulator.packed_vectors import EIGHT, MIXED, PACKED, PAIRS, SINGLES
from tests.simulator.vectors import (
    BANK,
    MODES,
    Function,
    Vector,
    check,
    each_half,
    float_inputs,
    half_inputs,
    integer_inputs,
    number,
    real,
    rounded_vectors,
)

# ---------------------------------------------------------------- integers


def of_numbers(kind: str, function: Function) -> Function:
    """Return a function of operands of an integer type."""
    read = number(kind)
    return lambda *values: function(*map(read, values))


TWO: dict[str, Callable[..., int]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul.lo": lambda a, b: a * b, "min": min, "max": max,
    "div": exact.truncated, "rem": lambda a, b: a - exact.truncated(a, b) * b if b else -1,
}  # fmt: skip
BITS = {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b}


def low_bits(a: int, bits: int, is_signed: bool) -> int:
    """Return the low bits of a word, extended by their sign or by zeros."""
    low = a & (1 << bits) - 1
    return signed(low, bits) & M32 if is_signed and bits else low


def integer_vectors() -> Iterator[Vector]:
    for bits, bank in BANK.items():
        wide = {"h": "r", "r": "d"}.get(bank)
        for kind in (f"s{bits}", f"u{bits}"):
            for name, function in TWO.items():
                yield Vector(f"{name}.{kind} {{o}}, {{a}}, {{b}};", bank * 3, of_numbers(kind, function))
            high = partial(lambda a, b, width: a * b >> width, width=int(bits))
            yield Vector(f"mul.hi.{kind} {{o}}, {{a}}, {{b}};", bank * 3, of_numbers(kind, high))
            yield Vector(f"mad.lo.{kind} {{o}}, {{a}}, {{b}}, {{c}};", bank * 4, of_numbers(kind, lambda a, b, c: a * b + c))
            if bank != "h":
                high = partial(lambda a, b, c, width: (a * b >> width) + c, width=int(bits))
                yield Vector(f"mad.hi.{kind} {{o}}, {{a}}, {{b}}, {{c}};", bank * 4, of_numbers(kind, high))
            if wide:
                read = number(kind)
                yield Vector(f"mul.wide.{kind} {{o}}, {{a}}, {{b}};", wide + bank * 2, of_numbers(kind, lambda a, b: a * b))
                summed = partial(lambda a, b, c, read: read(a) * read(b) + c, read=read)
                yield Vector(f"mad.wide.{kind} {{o}}, {{a}}, {{b}}, {{c}};", wide + bank * 2 + wide, summed)
        yield Vector(f"neg.s{bits} {{o}}, {{a}};", bank * 2, lambda a: -a)
        yield Vector(f"abs.s{bits} {{o}}, {{a}};", bank * 2, of_numbers(f"s{bits}", abs))
        for name, function in BITS.items():
            yield Vector(f"{name}.b{bits} {{o}}, {{a}}, {{b}};", bank * 3, function)
        yield Vector(f"not.b{bits} {{o}}, {{a}};", bank * 2, lambda a: ~a)
        yield Vector(f"shl.b{bits} {{o}}, {{a}}, {{b}};", bank * 2 + "r", lambda a, b: a << b if b < 64 else 0)
        for sign in "sub":
            read = number(f"{sign}{bits}")
            moved = partial(lambda a, b, read: read(a) >> min(b, 64), read=read)
            yield Vector(f"shr.{sign}{bits} {{o}}, {{a}}, {{b}};", bank * 2 + "r", moved)
            for amount in (0, 3, int(bits) - 1, int(bits), 77):
                moved = partial(lambda a, read, amount: read(a) >> amount, read=read, amount=amount)
                yield Vector(f"shr.{sign}{bits} {{o}}, {{a}}, {amount};", bank * 2, moved)
    for name in ("min", "max"):
        clamp = partial(lambda a, b, function: max(function(a, b), 0), function=TWO[name])
        yield Vector(f"{name}.relu.s32 {{o}}, {{a}}, {{b}};", "rrr", of_numbers("s32", clamp))


def bit_vectors() -> Iterator[Vector]:
    for name, function in BITS.items():
        yield Vector(f"{name}.pred {{o}}, {{a}}, {{b}};", "ppp", function)
        yield Vector(f"{name}.pred {{o}}, {{a}}, !{{b}};", "ppp", partial(lambda a, b, function: function(a, 1 - b), function=function))
    yield Vector("not.pred {o}, {a};", "pp", lambda a: 1 - a)
    for mode, limit in (("wrap", lambda c: c & 31), ("clamp", lambda c: min(c, 32))):
        left = partial(lambda a, b, c, limit: (b << 32 | a) << limit(c) >> 32, limit=limit)
        yield Vector(f"shf.l.{mode}.b32 {{o}}, {{a}}, {{b}}, {{c}};", "rrrr", left)
        right = partial(lambda a, b, c, limit: (b << 32 | a) >> limit(c), limit=limit)
        yield Vector(f"shf.r.{mode}.b32 {{o}}, {{a}}, {{b}}, {{c}};", "rrrr", right)
        for kind in ("s32", "u32"):
            extended = partial(lambda a, b, limit, kind: low_bits(a, limit(b), kind == "s32"), limit=limit, kind=kind)
            yield Vector(f"szext.{mode}.{kind} {{o}}, {{a}}, {{b}};", "rrr", extended)
    for width in (32, 64):
        yield Vector(f"popc.b{width} {{o}}, {{a}};", "r" + BANK[str(width)], lambda a: a.bit_count())
        yield Vector(f"clz.b{width} {{o}}, {{a}};", "r" + BANK[str(width)], partial(lambda a, width: width - a.bit_length(), width=width))
    yield Vector("brev.b32 {o}, {a};", "rr", lambda a: int(f"{a:032b}"[::-1], 2))
    for kind, read in (("u32", lambda a: a), ("s32", lambda a: ~a & M32 if a >> 31 else a)):
        yield Vector(f"bfind.{kind} {{o}}, {{a}};", "rr", partial(lambda a, read: read(a).bit_length() - 1, read=read))
        place = partial(lambda a, read: 32 - read(a).bit_length() if read(a) else -1, read=read)
        yield Vector(f"bfind.shiftamt.{kind} {{o}}, {{a}};", "rr", place)
    for first, second in itertools.product("su", "su"):
        dot = partial(dot_product, first=first, second=second)
        yield Vector(f"dp4a.{first}32.{second}32 {{o}}, {{a}}, {{b}}, {{c}};", "rrrr", partial(dot, width=8, start=0))
        for half, start in (("lo", 0), ("hi", 2)):
            yield Vector(f"dp2a.{half}.{first}32.{second}32 {{o}}, {{a}}, {{b}}, {{c}};", "rrrr", partial(dot, width=16, start=start))
    for lut in (0xE8, 0x96, 0xCA, 0x01, 0xFE, 0x35):
        yield Vector(f"lop3.b32 {{o}}, {{a}}, {{b}}, {{c}}, {lut:#x};", "rrrr", partial(truth, lut=lut))
    yield Vector("prmt.b32 {o}, {a}, {b}, {c};", "rrrr", exact.prmt)
    for selector in (0x5410, 0x7632, 0x9876, 0x0123, 0xFB73):
        yield Vector(f"prmt.b32 {{o}}, {{a}}, {{b}}, {selector:#x};", "rrr", partial(exact.prmt, selector=selector))
    for bits, bank in BANK.items():
        for kind in (*(f"{sign}{bits}" for sign in "bus"), *(("f32",) if bits == "32" else ())):
            yield Vector(f"selp.{kind} {{o}}, {{a}}, {{b}}, {{c}};", bank * 3 + "p", lambda a, b, p: a if p else b)
            yield Vector(f"mov.{kind} {{o}}, {{a}};", bank * 2, lambda a: a)
    yield Vector("mov.pred {o}, {a};", "pp", lambda a: a)
    yield Vector("mov.b64 {o}, {{ {a}, {b} }};", "drr", lambda a, b: b << 32 | a)
    yield Vector("mov.b64 {o}, {{ {a}, {b}, {c}, {e} }};", "dhhhh", lambda a, b, c, e: e << 48 | c << 32 | b << 16 | a)
    yield Vector("mov.b32 {o}, {{ {a}, {b} }};", "rhh", lambda a, b: b << 16 | a)
    yield Vector("mov.b64 {{ _, {o} }}, {a};", "rd", lambda a: a >> 32)
    yield Vector("mov.b32 {{ {o}, _ }}, {a};", "hr", lambda a: a)


def dot_product(a: int, b: int, c: int, first: str, second: str, width: int, start: int) -> int:
    """Return c plus the products of the bytes or halves of a and bytes of b."""
    left, right = number(f"{first}{width}"), number(f"{second}8")
    return c + sum(left(a >> width * index) * right(b >> 8 * (start + index)) for index in range(32 // width))


def truth(a: int, b: int, c: int, lut: int) -> int:
    """lop3, bit by bit."""
    return sum((lut >> ((a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1) & 1) << bit for bit in range(32))


COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
COMBINE: dict[str, Callable[[int, int], int]] = {"": lambda t, c: t, **{f".{name}": function for name, function in BITS.items()}}


def comparison(
    kind: str, name: str, combine: str, bank: str, read: Callable[[int], Any], test: Callable[[Any, Any], bool]
) -> Iterator[Vector]:
    """Yield a comparison, and its second destination."""

    def first(a: int, b: int, c: int = 0) -> int:
        return COMBINE[combine](int(test(read(a), read(b))), c)

    def second(a: int, b: int, c: int = 0) -> int:
        return COMBINE[combine](int(not test(read(a), read(b))), c)

    third, banks = (", {c}", "p" + bank * 2 + "p") if combine else ("", "p" + bank * 2)
    yield Vector(f"setp.{name}{combine}.{kind} {{o}}, {{a}}, {{b}}{third};", banks, first)
    yield Vector(f"setp.{name}{combine}.{kind} _|{{o}}, {{a}}, {{b}}{third};", banks, second)


def setp_vectors() -> Iterator[Vector]:
    for combine, bits in itertools.product(COMBINE, BANK):
        for sign in "sub":
            kind = f"{sign}{bits}"
            for name, test in COMPARISONS.items():
                if sign != "b" or name in ("eq", "ne"):
                    yield from comparison(kind, name, combine, BANK[bits], number(kind), test)
            if sign == "u":
                for name, same in UNSIGNED.items():
                    yield from comparison(kind, name, combine, BANK[bits], number(kind), COMPARISONS[same])


def conversion_vectors() -> Iterator[Vector]:
    kinds = [f"{sign}{bits}" for sign in "su" for bits in (8, 16, 32, 64)]
    for source, target in itertools.product(kinds, kinds):
        bank = {"8": "h", **BANK}[source[1:]]
        for result in ("h", "r", "d") if target[1:] == "8" else (BANK[target[1:]],):
            moved = partial(lambda a, read, write: write(read(a)), read=number(source), write=number(target))
            yield Vector(f"cvt.{target}.{source} {{o}}, {{a}};", result + bank, moved)
    yield Vector("cvt.s32.s8 {o}, {a};", "rr", partial(signed, bits=8))  # from a wider register
    for source in kinds:
        bank = {"8": "r", **BANK}[source[1:]]
        rounded = partial(lambda a, read: encode(exact.exact_round(Fraction(read(a)), "f32"), "f32"), read=number(source))
        yield Vector(f"cvt.rn.f32.{source} {{o}}, {{a}};", "r" + bank, rounded)


INTEGERS = [*integer_vectors(), *bit_vectors(), *conversion_vectors()]
COMPARED = list(setp_vectors())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [1, 2])
def test_integers(mode: str, seed: int) -> None:
    floats = {vector for vector in INTEGERS if ".f32." in vector.code}
    check(INTEGERS, integer_inputs(seed), mode, lambda vector: "f32" if vector in floats else "")


@pytest.mark.parametrize("mode", MODES)
def test_integer_comparisons(mode: str) -> None:
    check(COMPARED, integer_inputs(3), mode)


# ---------------------------------------------------------------- f32


def to_f32(value: float) -> float:
    """Round a double to f32, to nearest."""
    return exact.exact_round(Fraction(value), "f32") if math.isfinite(value) and value else value


def square_root(a: float) -> float:
    """Return the square root in f32."""
    if math.isnan(a) or a < 0 or a in (0.0, math.inf):
        return math.nan if a < 0 or math.isnan(a) else a
    with localcontext() as context:
        context.prec = 80
        return exact.exact_round(Fraction(Decimal(a).sqrt()), "f32")


def inverse_root(a: float) -> float:
    """1 / sqrt(a) to about f32."""
    if a == 0:
        return math.copysign(math.inf, a)
    return math.nan if math.isnan(a) or a < 0 else to_f32(1 / math.sqrt(a))


def power(a: float) -> float:
    """2 ** a to about f32."""
    return math.nan if math.isnan(a) else 0.0 if a < -200 else math.inf if a >= 128 else to_f32(2.0**a)


def logarithm(a: float) -> float:
    """log2(a) to about f32."""
    if a == 0:
        return -math.inf
    return math.nan if math.isnan(a) or a < 0 else a if a == math.inf else to_f32(math.log2(a))


SPECIAL: dict[str, Callable[[float], float]] = {
    "ex2.approx": power, "lg2.approx": logarithm, "rsqrt.approx": inverse_root, "tanh.approx": lambda a: to_f32(math.tanh(a)),
    "rcp.approx": partial(exact.quotient, 1.0), "rcp.rn": partial(exact.quotient, 1.0), "sqrt.approx": square_root, "sqrt.rn": square_root,
}  # fmt: skip


def float_vectors() -> Iterator[Vector]:
    yield from rounded_vectors("f32", "r")
    for z in ("", ".ftz"):
        for name, n in itertools.product(("min", "max"), ("", ".NaN")):
            chosen = partial(exact.extreme, largest=name == "max", nan=bool(n))
            yield Vector(f"{name}{z}{n}.f32 {{o}}, {{a}}, {{b}};", "rrr", real(chosen, bool(z)))
        yield Vector(f"neg{z}.f32 {{o}}, {{a}};", "rr", real(lambda a: -a, bool(z)))
        yield Vector(f"abs{z}.f32 {{o}}, {{a}};", "rr", real(abs, bool(z)))
        for form in ("rn", "full", "approx"):
            yield Vector(f"div.{form}{z}.f32 {{o}}, {{a}}, {{b}};", "rrr", real(exact.quotient, bool(z)))
        for name, special in SPECIAL.items():
            if not (z and name == "tanh.approx"):
                tolerance = 0 if name[:3] in ("rcp", "sqr") else 1
                yield Vector(f"{name}{z}.f32 {{o}}, {{a}};", "rr", real(special, bool(z)), tolerance)
        for rounding in ("rni", "rzi", "rmi", "rpi"):
            yield Vector(f"cvt.{rounding}{z}.f32.f32 {{o}}, {{a}};", "rr", real(partial(exact.to_integral, rounding=rounding), bool(z)))
    yield Vector("copysign.f32 {o}, {a}, {b};", "rrr", lambda a, b: a & 1 << 31 | b & ~(1 << 31))


def float_to_integer_vectors() -> Iterator[Vector]:
    for z, rounding, sign, bits in itertools.product(("", ".ftz"), ("rni", "rzi", "rmi", "rpi"), "su", ("32", "64")):

        def converted(a: int, z: str = z, rounding: str = rounding, sign: str = sign, bits: str = bits) -> int:
            value = decode(a, "f32")
            return exact.to_integer(flush(value) if z else value, rounding, int(bits), sign == "s")

        yield Vector(f"cvt.{rounding}{z}.{sign}{bits}.f32 {{o}}, {{a}};", BANK[bits] + "r", converted)


def ordered(test: Callable[[float, float], bool]) -> Callable[[float, float], bool]:
    """Compare; False for NaN."""
    return lambda a, b: not (math.isnan(a) or math.isnan(b)) and test(a, b)


def unordered(test: Callable[[float, float], bool]) -> Callable[[float, float], bool]:
    """Compare; True for NaN."""
    return lambda a, b: math.isnan(a) or math.isnan(b) or test(a, b)


FLOAT_TESTS = {
    **{name: ordered(test) for name, test in COMPARISONS.items()},
    **{f"{name}u": unordered(test) for name, test in COMPARISONS.items()},
    "num": ordered(lambda a, b: True),
    "nan": unordered(lambda a, b: False),
}


def float_comparisons() -> Iterator[Vector]:
    for name, test in FLOAT_TESTS.items():
        for combine, z in itertools.product(COMBINE, ("", ".ftz")):
            read = (lambda a: flush(decode(a, "f32"))) if z else (lambda a: decode(a, "f32"))
            for vector in comparison("f32", name, combine, "r", read, test):
                yield Vector(vector.code.replace(".f32", f"{z}.f32"), vector.banks, vector.function)


FLOATS = list(float_vectors())
TO_INTEGERS = [*float_to_integer_vectors(), *float_comparisons()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [1, 2])
def test_floats(mode: str, seed: int) -> None:
    check(FLOATS, float_inputs(seed), mode, lambda _: "f32")
    check(TO_INTEGERS, float_inputs(seed), mode)


# ---------------------------------------------------------------- 16 and 8 bits


def half(form: str, function: Callable[..., float]) -> Function:
    """Return a function of 16-bit patterns from one of floats."""
    return lambda *bits: encode(function(*(decode(b, form) for b in bits)), form)


def half_comparisons() -> Iterator[Vector]:
    """Yield comparisons of pairs of 16-bit floats, to words and to two predicates."""
    for (name, test), combine, form, z in itertools.product(FLOAT_TESTS.items(), COMBINE, ("f16", "bf16"), ("", ".ftz")):
        if z and form == "bf16":
            continue

        def read(a: int, form: str = form, z: str = z) -> float:
            value = decode(a & M16, form)
            return 0.0 if z and abs(value) < 2.0**-14 else value

        def one(a: int, b: int, c: int = 0, test: Any = test, combine: str = combine, read: Any = read) -> int:
            return COMBINE[combine](int(test(read(a), read(b))), c)

        def both(a: int, b: int, c: int = 0, one: Any = one, bits: int = 0) -> int:
            return bits * (one(a, b, c) | one(a >> 16, b >> 16, c) << 16)

        third, last = (", {c}", "p") if combine else ("", "")
        for kind, bits in (("u32", M16), ("s32", M16), (f"{form}x2", encode(1.0, form))):
            code = f"set.{name}{combine}{z}.{kind}.{form}x2 {{o}}, {{a}}, {{b}}{third};"
            yield Vector(code, "rrr" + last, partial(both, bits=bits))
        code = f"setp.{name}{combine}{z}.{form}x2"
        yield Vector(f"{code} {{o}}|_, {{a}}, {{b}}{third};", "prr" + last, one)
        yield Vector(f"{code} _|{{o}}, {{a}}, {{b}}{third};", "prr" + last, partial(lambda a, b, c=0, one=one: one(a >> 16, b >> 16, c)))


def half_vectors() -> Iterator[Vector]:
    for form in ("f16", "bf16"):
        functions: dict[str, Callable[..., float]] = {}
        for r in ("", ".rn"):
            functions |= {
                f"add{r}": lambda a, b, form=form: exact.total(a, b, form),
                f"sub{r}": lambda a, b, form=form: exact.total(a, -b, form),
                f"mul{r}": lambda a, b, form=form: exact.product(a, b, form),
            }
        functions["fma.rn"] = lambda a, b, c, form=form: exact.total(0.0, c, form, product=(a, b))
        for name, n in itertools.product(("min", "max"), ("", ".NaN")):
            functions[name + n] = partial(exact.extreme, largest=name == "max", nan=bool(n))
        for name, function in functions.items():
            third = ", {c}" if name == "fma.rn" else ""
            one = half(form, function)
            yield Vector(f"{name}.{form} {{o}}, {{a}}, {{b}}{third};", "hhhh"[: 4 if third else 3], one)
            yield Vector(f"{name}.{form}x2 {{o}}, {{a}}, {{b}}{third};", "rrrr"[: 4 if third else 3], each_half(one))
        signs: dict[str, Function] = {"neg": lambda a: a ^ 0x8000, "abs": lambda a: a & 0x7FFF}
        for name, sign in signs.items():
            yield Vector(f"{name}.{form} {{o}}, {{a}};", "hh", sign)
            yield Vector(f"{name}.{form}x2 {{o}}, {{a}};", "rr", each_half(sign))


def narrow(a: int, form: str, rounding: str) -> int:
    """f32 to a 16-bit float."""
    value = decode(a, "f32")
    if not math.isfinite(value) or value == 0:
        return encode(value, form)
    return encode(exact.exact_round(Fraction(value), form, rounding), form)


def finite(bits: int, form: str) -> int:
    """Return the pattern of the largest finite value in place of an infinity."""
    return bits - 1 if math.isinf(decode(bits, form)) else bits


def narrow_vectors() -> Iterator[Vector]:
    for form, rounding in itertools.product(("f16", "bf16"), ("rn", "rz")):
        one = partial(narrow, form=form, rounding=rounding)
        yield Vector(f"cvt.{rounding}.{form}.f32 {{o}}, {{a}};", "hr", one)
        yield Vector(f"cvt.{rounding}.{form}x2.f32 {{o}}, {{a}}, {{b}};", "rrr", partial(lambda a, b, one: one(a) << 16 | one(b), one=one))
        if rounding == "rn":
            both = partial(lambda a, b, one, form: finite(one(a), form) << 16 | finite(one(b), form), one=one, form=form)
            yield Vector(f"cvt.rn.satfinite.{form}x2.f32 {{o}}, {{a}}, {{b}};", "rrr", both)
    for kind in exact.FP8:
        code = partial(lambda a, kind: exact.encode_fp8(decode(a, "f32"), kind), kind=kind)
        yield Vector(
            f"cvt.rn.satfinite.{kind}x2.f32 {{o}}, {{a}}, {{b}};", "hrr", partial(lambda a, b, code: code(a) << 8 | code(b), code=code)
        )


def widen_vectors() -> Iterator[Vector]:
    for form in ("f16", "bf16"):
        yield Vector(f"cvt.f32.{form} {{o}}, {{a}};", "rh", partial(lambda a, form: encode(decode(a, form), "f32"), form=form))
    for kind in exact.FP8:

        def pair(a: int, kind: str = kind) -> int:
            return exact.encode_fp8(decode(a, "f16"), kind) | exact.encode_fp8(decode(a >> 16, "f16"), kind) << 8

        def spread(a: int, kind: str = kind) -> int:
            return encode(exact.decode_fp8(a & 255, kind), "f16") | encode(exact.decode_fp8(a >> 8, kind), "f16") << 16

        yield Vector(f"cvt.rn.satfinite.{kind}x2.f16x2 {{o}}, {{a}};", "hr", pair)
        yield Vector(f"cvt.rn.f16x2.{kind}x2 {{o}}, {{a}};", "rh", spread)


SIXTEEN = [*half_vectors(), *widen_vectors()]
COMPARED_HALVES = list(half_comparisons())
NARROWED = list(narrow_vectors())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [1, 2])
def test_halves(mode: str, seed: int) -> None:
    floats = {vector for vector in SIXTEEN if vector.code.startswith("cvt.f32")}
    check(SIXTEEN, half_inputs(seed), mode, lambda vector: "f32" if vector in floats else "")
    check(NARROWED, float_inputs(seed), mode)


@pytest.mark.parametrize("mode", MODES)
def test_comparisons_of_halves(mode: str) -> None:
    check(COMPARED_HALVES, half_inputs(1), mode)


# ---------------------------------------------------------------- pairs of f32, and what else Blackwell adds


def pair_inputs(seed: int) -> list[np.ndarray]:
    """Return two f32 in every word."""
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


# ---------------------------------------------------------------- the table itself


def spellings(tree: Any) -> list[str]:
    """Return all strings that a parsed regular expression without repetitions matches."""
    results = [""]
    for operation, argument in tree:
        name = str(operation)
        if name == "LITERAL":
            parts = [chr(argument)]
        elif name == "SUBPATTERN":
            parts = spellings(argument[3])
        elif name == "BRANCH":
            parts = [text for branch in argument[1] for text in spellings(branch)]
        elif name == "MAX_REPEAT" and argument[1] == 1:
            parts = ["", *spellings(argument[2])]
        elif name == "IN":
            parts = [
                chr(code) for kind, value in argument for code in (range(value[0], value[1] + 1) if str(kind) == "RANGE" else (value,))
            ]
        else:
            raise AssertionError(f"a pattern with {name}")
        results = [before + part for before in results for part in parts]
    return results


def accepted(*families: str) -> set[str]:
    """Return all opcodes that families of the table take."""
    found: set[str] = set()
    for spec in table.all_specs():
        if spec.emit is not None and spec.emit.__module__.rsplit(".", 1)[1] in families:
            found |= set(spellings(re._parser.parse(spec.pattern.pattern)))  # type: ignore[attr-defined]
    return found


def test_every_spelling_has_a_vector() -> None:
    every = [*INTEGERS, *COMPARED, *FLOATS, *TO_INTEGERS, *SIXTEEN, *COMPARED_HALVES, *NARROWED, *PACKED]
    tested = {vector.code.split()[0] for vector in every}
    wanted = {name for name in accepted("arithmetic", "conversions", "emitter", "floats", "packed_floats") if not name.startswith("cvta")}
    assert wanted - tested == set()
    assert tested <= wanted


REFUSED = """
    add.f64 fma.rn.f64 cvt.rn.f32.f64 cvt.rzi.s8.f32 cvt.sat.u8.s32 cvt.rna.tf32.f32 cvt.rn.relu.bf16.f32 cvt.rm.f16.f32 add.sat.f32
    add.sat.s32 fma.rn.sat.f32 fma.rn.relu.f16 add.ftz.f16 ex2.approx.f16 tanh.approx.ftz.f32 sin.approx.f32 min.relu.u32
    max.xorsign.abs.f32 setp.lo.s32 setp.lt.b32 setp.eq.f64 setp.eq.f16 selp.f64 selp.f16 mov.f64 mov.v2.b128 bfe.u32 bfi.b32
    brev.b64 bfind.u64 prmt.b32.f4e shf.l.b32 mul.s32 mad.lo.cc.s32 addc.u32 sub.cc.u32 add.s8 mul24.lo.s32 sad.s32 dp4a.s32.s64 div.rz.f32
    set.lt.u32.f32 set.lt.ftz.u32.bf16x2 set.lt.f16x2.bf16x2
    rcp.rz.f32 fma.f32 lg2.f32 add.rn.f64x2 neg.f32x2 max.f32x2 add.rn.f32x2.bf16x2 add.rz.f32.f16 mul.wide.s64
    redux.sync.max.s32 match.any.sync.b16 activemask.b32 shfl.idx.b32 vote.ballot.b32 movmatrix.sync.aligned.m8n8.b16 brkpt
    atom.global.max.u64 atom.global.add.f32 red.global.inc.u32 red.async.relaxed.cluster.global.add.u32 ld.local.u32 ld.const.u32
    st.param.u32 ld.global.v16.f32 ld.global.f16 ld.release.gpu.global.u32 st.acquire.gpu.global.u32 st.global.v8.b8x2 discard.global.L2
    fence.proxy.alias barrier.sync.unaligned bar.red.popc.s32 mbarrier.init.b64 mbarrier.arrive_drop.shared.b64 mbarrier.pending_count.b64
    mbarrier.init.shared::cluster.b64 mbarrier.try_wait.shared::cluster.b64
    cp.async.bulk.tensor.2d.shared::cta.global.im2col.mbarrier::complete_tx::bytes
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
    cp.reduce.async.bulk.tensor.2d.global.shared::cta.min.tile.bulk_group cp.async.ca.shared.global.L2::cache_hint mapa.u32
    ldmatrix.sync.aligned.m8n8.x4.shared.b8 stmatrix.sync.aligned.m16n8.x1.shared.b8
    tcgen05.alloc.cta_group::3.sync.aligned.shared::cta.b32 call.uni trap.foo tensormap.replace.tile.global_address.global.b1024.b64
    cvt.rn.bf16x2.e5m2x2 cvt.rn.ue8m0x2.f32 cvt.rp.ue8m0x2.bf16x2 cvt.rn.satfinite.e2m1x2.f32 cvt.rn.f16x2.e2m1x2
    cvt.rn.satfinite.scaled::n2::ue8m0.bf16x2.e4m3x2 cvt.rn.satfinite.relu.bf16x2.f32 redux.sync.min.abs.f32 max.f32.abs
    cp.async.bulk.tensor.3d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes
    cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes.cta_group::3
    cp.async.bulk.tensor.2d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.cta_group::2
    cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile::scatter4.bulk_group
    clusterlaunchcontrol.try_cancel.async.mbarrier::complete_tx::bytes.b128 clusterlaunchcontrol.query_cancel.get_first_ctaid.b32.b128
    cp.async.bulk.prefetch.L3.global createpolicy.range.L2::evict_last.b64 getctarank.shared::cluster.u32 isspacep.shared
"""


@pytest.mark.parametrize("opcode", REFUSED.split())
def test_what_nobody_needs_is_refused(opcode: str) -> None:
    assert table.lookup(opcode) is None

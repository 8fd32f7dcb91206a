"""Every accepted spelling of an instruction on registers, against Python integers and fractions, in all kinds of generated code."""

from __future__ import annotations

import itertools
import math
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from cute_mla.simulator.isa import table
from tests.simulator import exact
from tests.simulator.exact import M16, M32, M64, decode, encode, flush, signed
from tests.simulator.small_kernels import Kernel

LANES = 64
WIDTH = {"h": 16, "r": 32, "d": 64, "p": 1}
BANK = {"16": "h", "32": "r", "64": "d"}
Function = Callable[..., int]


@dataclass(frozen=True)
class Vector:
    """An instruction with {a}, {b}, {c}, {e} for its sources and {o} for its result. banks: of the result, then of the sources.

    The function has the patterns of the sources and gives that of the result; tolerance: units of f32 that it may be off.
    """

    code: str
    banks: str
    function: Function
    tolerance: int = 0


def vector_lines(index: int, vector: Vector, guard: str) -> str:
    """The instruction with its registers."""
    registers = {name: f"%{name}{bank}" for name, bank in zip("abce", vector.banks[1:], strict=False)}
    return f"{guard}{vector.code.format(o=f'%o{vector.banks[0]}{index}', **registers)}"


STARTS = {
    "plain": "",
    "tainted": "mov.b32 %r1, smem;\nld.shared.u32 %r2, [%r1];",  # an undefined value that nobody uses
    "some lanes": "setp.eq.u32 %p1, %r0, 5;\nsetp.gt.or.u32 %p1, %r0, 40, %p1;\n@%p1 bra OUT;",
}


def run_vectors(vectors: list[Vector], inputs: list[np.ndarray], mode: str) -> np.ndarray:
    """Results (vector, lane) as 64-bit patterns. inputs: one uint64 array for each of a, b, c, e."""
    count = len(vectors)
    guard = "@%p30 " if mode == "guarded" else ""
    lines = [f".reg .b16 %oh<{count}>;\n.reg .b32 %or<{count}>;\n.reg .b64 %od<{count}>;\n.reg .pred %op<{count}>;"]
    lines += [".reg .b16 %ah, %bh, %ch, %eh;\n.reg .b32 %ar, %br, %cr, %er;\n.reg .b64 %ad, %bd, %cd, %ed;\n.reg .pred %ap, %bp, %cp, %ep;"]
    lines += ["setp.lt.u32 %p30, %r0, 17;\nsetp.eq.or.u32 %p30, %r0, 60, %p30;", STARTS.get(mode, "")]
    for index, name in enumerate("abce"):
        lines.append(f"ld.param.u64 %rd3, [p{index + 1}];\nadd.s64 %rd3, %rd3, %rd1;\nadd.s64 %rd3, %rd3, %rd1;")
        lines.append(f"ld.global.u64 %{name}d, [%rd3];\nld.global.u32 %{name}r, [%rd3];\nld.global.u16 %{name}h, [%rd3];")
        lines.append(f"shr.u32 %r5, %{name}r, 3;\nand.b32 %r5, %r5, 1;\nsetp.ne.u32 %{name}p, %r5, 0;")
    for index, vector in enumerate(vectors):
        lines.append({"p": f"mov.pred %op{index}, 0;", "d": f"mov.b64 %od{index}, 0;", "r": f"mov.b32 %or{index}, 0;",
                      "h": f"mov.b16 %oh{index}, 0;"}[vector.banks[0]])  # fmt: skip
    lines += [vector_lines(index, vector, guard) for index, vector in enumerate(vectors)]
    lines.append("add.s64 %rd5, %rd2, %rd1;")
    for index, vector in enumerate(vectors):
        bank = vector.banks[0]
        if bank == "p":
            lines.append(f"selp.b32 %r6, 1, 0, %op{index};")
        register = "%r6" if bank == "p" else f"%o{bank}{index}"
        lines.append(f"st.global.b{max(WIDTH[bank], 16) if bank != 'p' else 32} [%rd5+{index * LANES * 8}], {register};")
    out = np.zeros((count, LANES), np.uint64)
    report = Kernel("\n".join([*lines, "OUT:"]), threads=LANES, smem=16).run(out, *inputs)
    assert report.ok, report.findings
    return out


def lane_runs(lane: int, mode: str) -> bool:
    """Whether a lane executes the instructions in a mode."""
    if mode == "guarded":
        return lane < 17 or lane == 60
    return not (mode == "some lanes" and (lane == 5 or lane > 40))


def check(vectors: list[Vector], inputs: list[np.ndarray], mode: str, is_float: Callable[[Vector], str] = lambda _: "") -> None:
    """Compare all lanes of all vectors, any NaN of a format with any other."""
    wrong = []
    for vector, row in zip(vectors, run_vectors(vectors, inputs, mode), strict=True):
        width = WIDTH[vector.banks[0]]
        for lane in range(LANES):
            sources = [int(array[lane]) & ((1 << WIDTH[bank]) - 1) if bank != "p" else int(array[lane]) >> 3 & 1
                       for array, bank in zip(inputs, vector.banks[1:], strict=False)]  # fmt: skip
            wanted = expectation(vector, *sources) & ((1 << width) - 1) if lane_runs(lane, mode) else 0
            actual = int(row[lane])
            if actual != wanted and not same_float(actual, wanted, is_float(vector), vector.tolerance):
                wrong.append(f"lane {lane}: {vector.code} of {[hex(v) for v in sources]} is {actual:#x}, not {wanted:#x}")
    assert not wrong, "\n".join(wrong[:20])


@cache
def expectation(vector: Vector, *sources: int) -> int:
    """What the function says; the modes ask for the same."""
    return vector.function(*sources)


def same_float(actual: int, wanted: int, form: str, tolerance: int) -> bool:
    """Two NaNs, or f32 patterns at most tolerance units apart."""
    if form == "f32" and tolerance and actual >> 31 == wanted >> 31 and abs(actual - wanted) <= tolerance and finite32(wanted):
        return finite32(actual)
    return form == "f32" and math.isnan(decode(actual, form)) and math.isnan(decode(wanted, form))


def finite32(bits: int) -> bool:
    """Not infinite, not NaN, not zero."""
    return math.isfinite(decode(bits, "f32")) and decode(bits, "f32") != 0


MODES = ("plain", "tainted", "guarded", "some lanes")

# ---------------------------------------------------------------- integers


def number(kind: str) -> Callable[[int], int]:
    """How an operand of an integer type is read."""
    bits = int(kind[1:])
    return (lambda value: signed(value, bits)) if kind[0] == "s" else (lambda value: value & ((1 << bits) - 1))


def of_numbers(kind: str, function: Function) -> Function:
    """A function of operands of an integer type."""
    read = number(kind)
    return lambda *values: function(*map(read, values))


TWO = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul.lo": lambda a, b: a * b, "min": min, "max": max,
    "div": exact.truncated, "rem": lambda a, b: a - exact.truncated(a, b) * b if b else a,
}  # fmt: skip
BITS = {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b}


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
    for bits in (32, 64):
        yield Vector(f"popc.b{bits} {{o}}, {{a}};", "r" + BANK[str(bits)], lambda a: a.bit_count())
        yield Vector(f"clz.b{bits} {{o}}, {{a}};", "r" + BANK[str(bits)], partial(lambda a, bits: bits - a.bit_length(), bits=bits))
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
    """A comparison, and its second destination."""

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


NASTY = [0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 255, 256, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000,
         0x1000001, 0x1000003, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFF80, 0xFFFFFFFE, M32, 1 << 32,
         (1 << 32) + 1, (1 << 40) + (1 << 15) + 1,
         (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 63) + 1, M64 - 1, M64, 0x8000_0000_8000_8000, 0x7FFF_FFFF_FFFF_8000]  # fmt: skip


def integer_inputs(seed: int) -> list[np.ndarray]:
    """Nasty and random patterns, each of them against others."""
    rng = np.random.default_rng(seed)
    values = np.array(NASTY + [int(v) for v in rng.integers(0, 2**64, LANES - len(NASTY), dtype=np.uint64)], np.uint64)
    shuffled = [np.ascontiguousarray(rng.permutation(values)) for _ in range(3)]
    shuffled[0][:8] = values[:8]  # some equal pairs
    return [values, *shuffled]


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


def real(function: Callable[..., float], ftz: bool = False) -> Function:
    """A function of f32 patterns from one of floats; ftz flushes operands and result."""
    if not ftz:
        return lambda *bits: encode(function(*(decode(b, "f32") for b in bits)), "f32")
    return lambda *bits: encode(flush(function(*(flush(decode(b, "f32")) for b in bits))), "f32")


def to_f32(value: float) -> float:
    """A double to f32, to nearest."""
    return exact.exact_round(Fraction(value), "f32") if math.isfinite(value) and value else value


def square_root(a: float) -> float:
    """The square root in f32."""
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
    for z, r in itertools.product(("", ".ftz"), ("", ".rn", ".rz", ".rm", ".rp")):
        rounding = r[1:] or "rn"
        names: dict[str, Callable[..., float]] = {
            "add": lambda a, b, rounding=rounding: exact.total(a, b, "f32", rounding),
            "sub": lambda a, b, rounding=rounding: exact.total(a, -b, "f32", rounding),
            "mul": lambda a, b, rounding=rounding: exact.product(a, b, "f32", rounding),
        }
        for name, function in names.items():
            yield Vector(f"{name}{r}{z}.f32 {{o}}, {{a}}, {{b}};", "rrr", real(function, bool(z)))
        if r:
            fused = partial(lambda a, b, c, rounding: exact.total(0.0, c, "f32", rounding, (a, b)), rounding=rounding)
            yield Vector(f"fma{r}{z}.f32 {{o}}, {{a}}, {{b}}, {{c}};", "rrrr", real(fused, bool(z)))
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
    """False for NaN."""
    return lambda a, b: not (math.isnan(a) or math.isnan(b)) and test(a, b)


def unordered(test: Callable[[float, float], bool]) -> Callable[[float, float], bool]:
    """True for NaN."""
    return lambda a, b: math.isnan(a) or math.isnan(b) or test(a, b)


def float_comparisons() -> Iterator[Vector]:
    tests = {name: ordered(test) for name, test in COMPARISONS.items()}
    tests |= {f"{name}u": unordered(test) for name, test in COMPARISONS.items()}
    tests |= {"num": ordered(lambda a, b: True), "nan": unordered(lambda a, b: False)}
    for name, test in tests.items():
        for combine, z in itertools.product(COMBINE, ("", ".ftz")):
            read = (lambda a: flush(decode(a, "f32"))) if z else (lambda a: decode(a, "f32"))
            for vector in comparison("f32", name, combine, "r", read, test):
                yield Vector(vector.code.replace(".f32", f"{z}.f32"), vector.banks, vector.function)


F32 = [0.0, -0.0, 1.0, -1.0, 1.5, -1.5, 2.5, -2.5, 0.5, -0.5, 0.1, -0.1, 3.0, 7.25, 100.0, -100.0, 127.5, -126.5, -130.25, 1e-3,
       3e38, -3e38,
       2.0**31, -(2.0**31), 2.0**32, 2.0**63, 2.0**64, -(2.0**63), 16777217.0, 8388609.0, 0.99999994, 1.0000001, 2.0**-126, -(2.0**-126),
       2.0**-149, -(2.0**-149), 1e-40, -1e-40, math.inf, -math.inf, math.nan, 65504.0, 65520.0, 448.0, 464.0, 57344.0]  # fmt: skip


def float_inputs(seed: int) -> list[np.ndarray]:
    """Special and random f32 patterns."""
    rng = np.random.default_rng(seed)
    specials = [struct.unpack("<I", struct.pack("<f", value))[0] for value in F32]
    values = np.array([*specials, 0xFF800001, *(int(v) for v in rng.integers(0, 2**32, LANES - len(F32) - 1))], np.uint64)
    near = rng.permutation(values)
    near[:10] = (values[:10] ^ np.uint64(1 << 31)) + np.uint64(1)  # sums that cancel, nearly
    near[10:20] = values[10:20]
    return [values, near, np.ascontiguousarray(rng.permutation(values)), np.ascontiguousarray(rng.permutation(values))]


FLOATS = list(float_vectors())
TO_INTEGERS = [*float_to_integer_vectors(), *float_comparisons()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [1, 2])
def test_floats(mode: str, seed: int) -> None:
    check(FLOATS, float_inputs(seed), mode, lambda _: "f32")
    check(TO_INTEGERS, float_inputs(seed), mode)


# ---------------------------------------------------------------- 16 and 8 bits


def each_half(function: Function) -> Function:
    """A function of 16-bit patterns on both halves."""
    return lambda *words: function(*(w & M16 for w in words)) | function(*(w >> 16 for w in words)) << 16


def half(form: str, function: Callable[..., float]) -> Function:
    """A function of 16-bit patterns from one of floats."""
    return lambda *bits: encode(function(*(decode(b, form) for b in bits)), form)


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


def narrow_vectors() -> Iterator[Vector]:
    for form, rounding in itertools.product(("f16", "bf16"), ("rn", "rz")):
        one = partial(narrow, form=form, rounding=rounding)
        yield Vector(f"cvt.{rounding}.{form}.f32 {{o}}, {{a}};", "hr", one)
        yield Vector(f"cvt.{rounding}.{form}x2.f32 {{o}}, {{a}}, {{b}};", "rrr", partial(lambda a, b, one: one(a) << 16 | one(b), one=one))
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


HALVES = [0, 0x8000, 0x3C00, 0xBC00, 0x3F80, 0xBF80, 1, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x7F7F, 0x7F80,
          0xFF80,
          0x7FC0, 0xFFC1, 0x0080, 0x007F, 0x5F00, 0x5F40, 0x4248, 0x3555, 0x6400, 0x7EFF]  # fmt: skip


def half_inputs(seed: int) -> list[np.ndarray]:
    """Words of two special or random 16-bit patterns."""
    rng = np.random.default_rng(seed)
    low = np.array([*HALVES, *(int(v) for v in rng.integers(0, 65536, LANES - len(HALVES)))], np.uint64)
    return [low | rng.permutation(low) << np.uint64(16), *(rng.permutation(low) | rng.permutation(low) << np.uint64(16) for _ in range(3))]


SIXTEEN = [*half_vectors(), *widen_vectors()]
NARROWED = list(narrow_vectors())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [1, 2])
def test_halves(mode: str, seed: int) -> None:
    floats = {vector for vector in SIXTEEN if vector.code.startswith("cvt.f32")}
    check(SIXTEEN, half_inputs(seed), mode, lambda vector: "f32" if vector in floats else "")
    check(NARROWED, float_inputs(seed), mode)


# ---------------------------------------------------------------- the table itself


def spellings(tree: Any) -> list[str]:
    """All strings that a parsed regular expression without repetitions matches."""
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
    """All opcodes that families of the table take."""
    found: set[str] = set()
    for spec in table.all_specs():
        if spec.emit is not None and spec.emit.__module__.rsplit(".", 1)[1] in families:
            found |= set(spellings(re._parser.parse(spec.pattern.pattern)))  # type: ignore[attr-defined]
    return found


def test_every_spelling_has_a_vector() -> None:
    every = [*INTEGERS, *COMPARED, *FLOATS, *TO_INTEGERS, *SIXTEEN, *NARROWED]
    tested = {vector.code.split()[0] for vector in every}
    wanted = {name for name in accepted("arithmetic", "conversions", "floats") if not name.startswith("cvta")}
    assert wanted - tested == set()
    assert tested <= wanted


REFUSED = """
    add.f64 fma.rn.f64 cvt.rn.f32.f64 cvt.rzi.s8.f32 cvt.sat.u8.s32 cvt.rna.tf32.f32 cvt.rn.relu.bf16.f32 cvt.rm.f16.f32 add.sat.f32
    add.sat.s32 fma.rn.sat.f32 fma.rn.relu.f16 add.ftz.f16 ex2.approx.f16 tanh.approx.ftz.f32 sin.approx.f32 min.relu.u32
    max.xorsign.abs.f32 setp.lo.s32 setp.lt.b32 setp.eq.f64 setp.eq.f16 selp.f64 selp.f16 mov.f64 mov.b128 bfe.u32 bfi.b32 brev.b32
    bfind.u32 prmt.b32.f4e shf.l.b32 mul.s32 mad.lo.cc.s32 addc.u32 sub.cc.u32 add.s8 mul24.lo.s32 sad.s32 dp4a.s32.s32 div.rz.f32
    rcp.rz.f32 fma.f32 lg2.f32 add.rn.f32x2 mul.wide.s64 redux.sync.max.s32 match.any.sync.b32 activemask.b32 shfl.idx.b32
    vote.ballot.b32 movmatrix.sync.aligned.m8n8.trans.b16 brkpt atom.global.max.u32 atom.global.add.f32 red.global.inc.u32
    red.async.relaxed.cluster.global.add.u32 ld.local.u32 ld.const.u32 st.param.u32 ld.global.v8.f32 ld.global.f16
    ld.release.gpu.global.u32 st.acquire.gpu.global.u32 ld.global.b128 discard.global.L2 fence.proxy.alias barrier.sync bar.red.popc.s32
    mbarrier.init.b64 mbarrier.arrive_drop.shared.b64 mbarrier.pending_count.b64 mbarrier.init.shared::cluster.b64
    mbarrier.try_wait.shared::cluster.b64 cp.async.bulk.tensor.2d.shared::cta.global.im2col.mbarrier::complete_tx::bytes
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
    cp.reduce.async.bulk.tensor.2d.global.shared::cta.min.tile.bulk_group cp.async.ca.shared.global.L2::cache_hint mapa.u32
    ldmatrix.sync.aligned.m8n8.x4.shared.b8 stmatrix.sync.aligned.m16n8.x1.trans.shared.b8
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 call.uni trap.foo tensormap.replace.tile.global_address.global.b1024.b64
    cp.async.bulk.prefetch.L3.global createpolicy.range.L2::evict_last.b64 getctarank.shared::cluster.u32 isspacep.shared
"""


@pytest.mark.parametrize("opcode", REFUSED.split())
def test_what_nobody_needs_is_refused(opcode: str) -> None:
    assert table.lookup(opcode) is None

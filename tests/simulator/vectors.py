"""Vectors: single instructions with a function that says what they do, run in all kinds of generated code."""

from __future__ import annotations

import itertools
import math
import operator
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

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
    """Return the instruction with its registers."""
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
    """Return whether a lane executes the instructions in a mode."""
    if mode == "guarded":
        return lane < 17 or lane == 60
    return not (mode == "some lanes" and (lane == 5 or lane > 40))


def check(
    vectors: list[Vector],
    inputs: list[np.ndarray],
    mode: str,
    is_float: Callable[[Vector], str] = lambda _: "",
    same: Callable[[int, int], bool] = operator.eq,
) -> None:
    """Compare all lanes of all vectors, any NaN of a format with any other; or as `same` says."""
    wrong = []
    for vector, row in zip(vectors, run_vectors(vectors, inputs, mode), strict=True):
        width = WIDTH[vector.banks[0]]
        for lane in range(LANES):
            sources = [int(array[lane]) & ((1 << WIDTH[bank]) - 1) if bank != "p" else int(array[lane]) >> 3 & 1
                       for array, bank in zip(inputs, vector.banks[1:], strict=False)]  # fmt: skip
            wanted = expectation(vector, *sources) & ((1 << width) - 1) if lane_runs(lane, mode) else 0
            actual = int(row[lane])
            if not same(actual, wanted) and not same_float(actual, wanted, is_float(vector), vector.tolerance):
                wrong.append(f"lane {lane}: {vector.code} of {[hex(v) for v in sources]} is {actual:#x}, not {wanted:#x}")
    assert not wrong, "\n".join(wrong[:20])


@cache
def expectation(vector: Vector, *sources: int) -> int:
    """Return the values that the function gives; every mode expects the same ones."""
    return vector.function(*sources)


def same_float(actual: int, wanted: int, form: str, tolerance: int) -> bool:
    """Return whether two f32 patterns are NaNs, or at most tolerance units apart."""
    if form == "f32" and tolerance and actual >> 31 == wanted >> 31 and abs(actual - wanted) <= tolerance and finite32(wanted):
        return finite32(actual)
    return form == "f32" and math.isnan(decode(actual, form)) and math.isnan(decode(wanted, form))


def finite32(bits: int) -> bool:
    """Not infinite, not NaN, not zero."""
    return math.isfinite(decode(bits, "f32")) and decode(bits, "f32") != 0


MODES = ("plain", "tainted", "guarded", "some lanes")

# ---------------------------------------------------------------- functions of patterns


def number(kind: str) -> Callable[[int], int]:
    """Return the function that reads an operand of an integer type."""
    bits = int(kind[1:])
    return (lambda value: signed(value, bits)) if kind[0] == "s" else (lambda value: value & ((1 << bits) - 1))


def real(function: Callable[..., float], ftz: bool = False) -> Function:
    """Return a function of f32 patterns from one of floats; ftz flushes operands and result."""
    if not ftz:
        return lambda *bits: encode(function(*(decode(b, "f32") for b in bits)), "f32")
    return lambda *bits: encode(flush(function(*(flush(decode(b, "f32")) for b in bits))), "f32")


def each_half(function: Function) -> Function:
    """Return a function of 16-bit patterns on both halves."""
    return lambda *words: function(*(w & M16 for w in words)) | function(*(w >> 16 for w in words)) << 16


def rounded_vectors(kind: str, bank: str, lift: Callable[[Function], Function] = lambda function: function) -> Iterator[Vector]:
    """Yield the sums, products and fused sums of f32 in all roundings. lift: makes a function of operands of this kind."""
    for z, r in itertools.product(("", ".ftz"), ("", ".rn", ".rz", ".rm", ".rp")):
        rounding = r[1:] or "rn"
        names: dict[str, Callable[..., float]] = {
            "add": lambda a, b, rounding=rounding: exact.total(a, b, "f32", rounding),
            "sub": lambda a, b, rounding=rounding: exact.total(a, -b, "f32", rounding),
            "mul": lambda a, b, rounding=rounding: exact.product(a, b, "f32", rounding),
        }
        for name, function in names.items():
            yield Vector(f"{name}{r}{z}.{kind} {{o}}, {{a}}, {{b}};", bank * 3, lift(real(function, bool(z))))
        if r:
            fused = partial(lambda a, b, c, rounding: exact.total(0.0, c, "f32", rounding, (a, b)), rounding=rounding)
            yield Vector(f"fma{r}{z}.{kind} {{o}}, {{a}}, {{b}}, {{c}};", bank * 4, lift(real(fused, bool(z))))


# ---------------------------------------------------------------- inputs

NASTY = [0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 255, 256, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000,
         0x1000001, 0x1000003, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFF80, 0xFFFFFFFE, M32, 1 << 32,
         (1 << 32) + 1, (1 << 40) + (1 << 15) + 1,
         (1 << 53) + 1, (1 << 62) + (1 << 38) + 1, M64 - (1 << 62) - (1 << 38),
         (1 << 63) - 1, 1 << 63, (1 << 63) + 1, M64 - 1, M64, 0x8000_0000_8000_8000, 0x7FFF_FFFF_FFFF_8000]  # fmt: skip


def integer_inputs(seed: int) -> list[np.ndarray]:
    """Return nasty and random patterns, each of them against others."""
    rng = np.random.default_rng(seed)
    values = np.array(NASTY + [int(v) for v in rng.integers(0, 2**64, LANES - len(NASTY), dtype=np.uint64)], np.uint64)
    shuffled = [np.ascontiguousarray(rng.permutation(values)) for _ in range(3)]
    shuffled[0][:8] = values[:8]  # some equal pairs
    return [values, *shuffled]


F32 = [0.0, -0.0, 1.0, -1.0, 1.5, -1.5, 2.5, -2.5, 0.5, -0.5, 0.1, -0.1, 3.0, 7.25, 100.0, -100.0, 127.5, -126.5, -130.25, 1e-3,
       3e38, -3e38,
       2.0**31, -(2.0**31), 2.0**32, 2.0**63, 2.0**64, -(2.0**63), 16777217.0, 8388609.0, 0.99999994, 1.0000001, 2.0**-126, -(2.0**-126),
       2.0**-149, -(2.0**-149), 1e-40, -1e-40, math.inf, -math.inf, math.nan, 65504.0, 65520.0, 448.0, 464.0, 57344.0]  # fmt: skip


def float_inputs(seed: int) -> list[np.ndarray]:
    """Return special and random f32 patterns."""
    rng = np.random.default_rng(seed)
    specials = [struct.unpack("<I", struct.pack("<f", value))[0] for value in F32]
    values = np.array([*specials, 0xFF800001, *(int(v) for v in rng.integers(0, 2**32, LANES - len(F32) - 1))], np.uint64)
    near = rng.permutation(values)
    near[:10] = (values[:10] ^ np.uint64(1 << 31)) + np.uint64(1)  # sums that cancel, nearly
    near[10:20] = values[10:20]
    return [values, near, np.ascontiguousarray(rng.permutation(values)), np.ascontiguousarray(rng.permutation(values))]


HALVES = [0, 0x8000, 0x3C00, 0xBC00, 0x3F80, 0xBF80, 1, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x7F7F, 0x7F80,
          0xFF80,
          0x7FC0, 0xFFC1, 0x0080, 0x007F, 0x5F00, 0x5F40, 0x4248, 0x3555, 0x6400, 0x7EFF]  # fmt: skip


def half_inputs(seed: int) -> list[np.ndarray]:
    """Return words of two special or random 16-bit patterns."""
    rng = np.random.default_rng(seed)
    low = np.array([*HALVES, *(int(v) for v in rng.integers(0, 65536, LANES - len(HALVES)))], np.uint64)
    return [low | rng.permutation(low) << np.uint64(16), *(rng.permutation(low) | rng.permutation(low) << np.uint64(16) for _ in range(3))]

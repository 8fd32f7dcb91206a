"""Floating-point arithmetic, comparison and conversion of machine code. Roundings and special values are those of `numerics`."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from ..isa.arithmetic import COMPARE
from ..isa.emitter import Emitter, Unsupported
from ..isa.floats import APPROXIMATIONS
from ..isa.packed_floats import ONES
from ..isa.table import runtime
from ..numerics import elementwise
from .listing import Immediate, Operand, Register, SassInstruction
from .operands import WIDE, assign, assign_pair, assign_run, constant, pair, signed, source
from .predicates import assign_compared
from .table import op

_SCALES_OF_1 = 0x7F7F  # two ue8m0 of 2^0
_ROUNDINGS = {"RM": "rm", "RP": "rp", "RZ": "rz"}


def rounding(ins: SassInstruction) -> str:
    """Return the rounding of an instruction, to nearest by default."""
    return next((_ROUNDINGS[word] for word in ins.modifiers if word in _ROUNDINGS), "rn")


def floats(e: Emitter, ins: SassInstruction, operands: tuple[Operand, ...]) -> list[str]:
    """Return f32 sources, with subnormals flushed under FTZ."""
    values = [source(e, operand, "f32") for operand in operands]
    return [f"flush_f32({value})" for value in values] if "FTZ" in ins.modifiers else values


def finish(e: Emitter, ins: SassInstruction, value: str) -> None:
    """Store an f32 result, flushed under FTZ."""
    assign(e, ins.operands[0], "f32", f"flush_f32({value})" if "FTZ" in ins.modifiers else value)


@op(r"U?(FADD|FMUL)(.FTZ)?(.RM|.RP|.RZ)?")
def basic(e: Emitter, ins: SassInstruction) -> None:
    """Emit an addition or a multiplication."""
    a, b = floats(e, ins, ins.operands[1:3])
    exact = {"FADD": "add", "FMUL": "multiply"}[ins.base.removeprefix("U")]
    directed = {"FADD": elementwise.add_f32, "FMUL": elementwise.mul_f32}[ins.base.removeprefix("U")]
    way = rounding(ins)
    finish(e, ins, f"{exact}({a}, {b})" if way == "rn" else f"{e.constants.thing(directed)}({a}, {b}, {way!r})")


@op(r"U?FFMA(.FTZ)?(.RM|.RP|.RZ)?", batch=True)
def fused(e: Emitter, ins: SassInstruction) -> None:
    """Emit a * b + c with one rounding."""
    a, b, c = floats(e, ins, ins.operands[1:4])
    finish(e, ins, f"fma_f32({a}, {b}, {c}, {rounding(ins)!r})")


@op(r"FMNMX3?(.FTZ)?(.NAN)?", batch=True)
def extremes(e: Emitter, ins: SassInstruction) -> None:
    """Emit the minimum (PT) or maximum of two or three values. Without NAN a NaN operand loses."""
    *sources, which = ins.operands[1:]
    assert isinstance(which, Register)
    if which.number is not None:
        raise Unsupported("a minimum or maximum by a predicate")
    function = e.constants.thing(elementwise.max_f32 if which.negative else elementwise.min_f32)
    value, *others = floats(e, ins, tuple(sources))
    for other in others:
        value = f"{function}({value}, {other}, {'NAN' in ins.modifiers})"
    finish(e, ins, value)


_UNORDERED = {"equ": "not_equal_ordered", "ltu": "greater_equal", "leu": "greater", "gtu": "less_equal", "geu": "less"}


@op(r"U?FSETP.((EQ|NE|LT|LE|GT|GE)U?|NAN)(.FTZ)?.(AND|OR|XOR)", taint="own", batch=True)
def compare(e: Emitter, ins: SassInstruction) -> None:
    """Emit a comparison. With a NaN operand, ordered comparisons are false and unordered ones (..U) true; NAN is true only then."""
    left, right, other = ins.operands[2:]
    a, b = floats(e, ins, (left, right))
    name = ins.modifiers[0].lower()
    if name in _UNORDERED:
        value = f"logical_not({_UNORDERED[name]}({a}, {b}))"
    elif name == "ne":
        value = f"not_equal_ordered({a}, {b})"
    elif name == "nan":
        value = f"either_nan({a}, {b})"
    else:
        value = f"{COMPARE['ne' if name == 'neu' else name]}({a}, {b})"
    assign_compared(e, ins, value, [left, right], other)


@runtime
def either_nan(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return whether an operand is NaN."""
    result: np.ndarray = np.isnan(a) | np.isnan(b)
    return result


@op(r"MUFU.(RCP|RSQ|LG2|EX2|SQRT|TANH)", batch=True)
def approximate(e: Emitter, ins: SassInstruction) -> None:
    """Emit a transcendental function or a reciprocal, with subnormals flushed, more exact than the hardware's."""
    name = {"RSQ": "rsqrt"}.get(ins.modifiers[0], ins.modifiers[0].lower())
    value = source(e, ins.operands[1], "f32")
    assign(e, ins.operands[0], "f32", f"{e.constants.thing(APPROXIMATIONS[name])}(flush_f32({value}), True)")


@op(r"FCHK")
def check_division(e: Emitter, ins: SassInstruction) -> None:
    """Emit the test if a / b needs the slow path. The true criterion is unknown; a stricter one gives the same quotient."""
    result, a, b = ins.operands
    assign(e, result, "pred", f"needs_slow_division({source(e, a, 'u32')}, {source(e, b, 'u32')})")


@runtime
def needs_slow_division(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return True unless both exponents, and their difference, are far from the ends of the range."""
    first, second = ((x >> np.uint32(23) & np.uint32(255)).astype(np.int32) for x in (a, b))
    near = (np.abs(first - 127) > 90) | (np.abs(second - 127) > 90)
    result: np.ndarray = near | (np.abs(first - second) > 90)
    return result


# ---------------------------------------------------------------- pairs


def lanes_of_pair(e: Emitter, operand: Operand) -> tuple[str, str]:
    """Return the two floats of a pair, or a single float or literal for both.

    Signs are those of both floats: ptxas makes |pair| of two magnitudes, and leaves a single one an instruction of its own.
    """
    if isinstance(operand, Register) and "HI_LO" in operand.suffixes:
        if operand.number is None:
            raise Unsupported("RZ as a pair of floats")
        low, high = operand.registers(2)
        return signed(operand, e.row(low, "f32"), "f32"), signed(operand, e.row(high, "f32"), "f32")
    value = source(e, operand, "f32")
    return value, value


@op(r"(FADD2|FMUL2|FFMA2)(.FTZ)?(.RM|.RP|.RZ)?", taint="own", batch=True)
def packed(e: Emitter, ins: SassInstruction) -> None:
    """Emit arithmetic on pairs of floats, each of which has a poison of its own."""
    result = ins.operands[0]
    if e.tainted and isinstance(result, Register):
        runs = [operand.registers(2 if "HI_LO" in operand.suffixes else 1) for operand in ins.operands[1:] if isinstance(operand, Register)]
        marks = [(e.temp(), e.taint_of([run[index % len(run)] for run in runs if run]) or "False") for index in range(2)]
        for mark, poison in marks:
            e.line(f"{mark} = array({poison})")
        for (mark, _), register in zip(marks, result.registers(2), strict=False):
            e.line(f"{e.taint(register)}[...] = {mark}")
    values = []
    for sources in zip(*(lanes_of_pair(e, operand) for operand in ins.operands[1:]), strict=True):
        terms = [f"flush_f32({value})" if "FTZ" in ins.modifiers else value for value in sources]
        name = {"FADD2": elementwise.add_f32, "FMUL2": elementwise.mul_f32, "FFMA2": elementwise.fma_f32}[ins.base]
        value = f"{e.constants.thing(name)}({', '.join(terms)}, {rounding(ins)!r})"
        values.append(f"flush_f32({value})" if "FTZ" in ins.modifiers else value)
    assign_run(e, ins.operands[0], values, "f32")


# ---------------------------------------------------------------- 16-bit


@op(r"(HADD2|HMUL2)(.BF16_V2)?")
def halves(e: Emitter, ins: SassInstruction) -> None:
    """Emit arithmetic on pairs of 16-bit floats. H0_H0, H1_H1: one half of an operand for both."""
    kind = "bf16" if "BF16_V2" in ins.modifiers else "f16"
    function = elementwise.half_arithmetic({"HADD2": "add", "HMUL2": "mul"}[ins.base], kind, nan=False)
    assign(e, ins.operands[0], "u32", f"on_halves({e.constants.thing(function)}, {', '.join(half_pairs(e, ins, 2))})")


@op(r"HFMA2(.MMA)?(.BF16_V2)?")
def fused_halves(e: Emitter, ins: SassInstruction) -> None:
    """Emit a * b + c on pairs of 16-bit floats. -0 * 0 plus a literal is a move."""
    pairs = half_pairs(e, ins, 3)
    a, b, *rest = ins.operands[1:]
    if isinstance(rest[0], Immediate) and all(isinstance(operand, Register) and operand.number is None for operand in (a, b)):
        assign(e, ins.operands[0], "u32", pairs[2])
        return
    function = elementwise.half_arithmetic("fma", "bf16" if "BF16_V2" in ins.modifiers else "f16", nan=False)
    assign(e, ins.operands[0], "u32", f"on_halves({e.constants.thing(function)}, {', '.join(pairs)})")


@op(r"HSET2(.BF16_V2)?(.BF)?.((EQ|NE|LT|LE|GT|GE)U?|NUM|NAN)(.FTZ)?.(AND|OR|XOR)")
def set_halves(e: Emitter, ins: SassInstruction) -> None:
    """Emit a comparison of both halves: all bits of a half, or with BF 1.0."""
    kind = "bf16" if "BF16_V2" in ins.modifiers else "f16"
    assign(e, ins.operands[0], "u32", f"words_of({compared_halves(e, ins, 1)}, {ONES[kind] if 'BF' in ins.modifiers else 0xFFFF})")


@op(r"HSETP2(.BF16_V2)?.((EQ|NE|LT|LE|GT|GE)U?|NUM|NAN)(.FTZ)?.(AND|OR|XOR)")
def compare_halves(e: Emitter, ins: SassInstruction) -> None:
    """Emit a comparison of the lower halves and of the upper ones."""
    value = e.temp()
    e.line(f"{value} = {compared_halves(e, ins, 2)}")
    for index, result in enumerate(ins.operands[:2]):
        assign(e, result, "pred", f"{value}[..., {index}]")


def compared_halves(e: Emitter, ins: SassInstruction, first: int) -> str:
    """Return the expression of a comparison of both halves. first: place of the first source."""
    words = [word for word in ins.modifiers if word not in ("BF16_V2", "BF", "FTZ")]
    name, combine = (word.lower() for word in words)
    a, b = half_pairs(e, replace(ins, operands=(ins.operands[0], *ins.operands[first:-1])), 2)
    kind = "bf16" if "BF16_V2" in ins.modifiers else "f16"
    return f"compare_halves({a}, {b}, {name!r}, {kind!r}, {'FTZ' in ins.modifiers}, {combine!r}, {source(e, ins.operands[-1], 'pred')})"


def half_pairs(e: Emitter, ins: SassInstruction, count: int) -> list[str]:
    """Return the expressions of the sources of an operation on pairs of 16-bit floats. A literal is printed as two halves."""
    sources = [operand for operand in ins.operands[1:] if not isinstance(operand, Immediate)]
    literals = len(ins.operands) - 1 - len(sources)
    if len(sources) + literals // 2 != count or literals not in (0, 2):
        raise Unsupported(f"{ins.base} with other literals")
    pairs = [half_pair(e, operand) for operand in sources]
    if literals:
        place = next(index for index, operand in enumerate(ins.operands[1:]) if isinstance(operand, Immediate))
        pairs.insert(place, constant(e, "u32", ins.low >> 32))
    return pairs


def half_pair(e: Emitter, operand: Operand) -> str:
    """Return the expression of a pair of 16-bit floats."""
    if not isinstance(operand, Register) or operand.inverted:
        raise Unsupported(f"operand {operand} as a pair of halves")
    value = source(e, replace(operand, negative=False, absolute=False, suffixes=()), "u32")
    if operand.absolute:
        value = f"({value} & {constant(e, 'u32', 0x7FFF7FFF)})"
    if operand.suffixes == ("H0_H0",):
        value = f"(({value} & {constant(e, 'u32', 0xFFFF)}) * {constant(e, 'u32', 0x10001)})"
    elif operand.suffixes == ("H1_H1",):
        value = f"(({value} >> {constant(e, 'u32', 16)}) * {constant(e, 'u32', 0x10001)})"
    elif operand.suffixes:
        raise Unsupported(f"halves {operand.suffixes}")
    return f"({value} ^ {constant(e, 'u32', 0x80008000)})" if operand.negative else value


# ---------------------------------------------------------------- conversions


@op(r"U?I2F(.S32|.U32)?(.RP)?", r"I2F.(U64|S64)(.RP)?", r"I2FP.F32.(S32|U32)(.RZ)?", batch=True)
def from_integer(e: Emitter, ins: SassInstruction) -> None:
    """Emit a conversion of integers to f32, to nearest, upwards or towards zero."""
    words = ins.modifiers
    if "U64" in words or "S64" in words:
        value = pair(e, ins.operands[1])
        value = f"{value}.view({e.constants.thing(np.dtype('i8'))})" if "S64" in words else value
    else:
        value = source(e, ins.operands[1], "u32" if "U32" in words else "s32")
    function = "integer_to_f32_up" if "RP" in words else "integer_to_f32_short" if "RZ" in words else "integer_to_f32"
    assign(e, ins.operands[0], "f32", f"{function}({value})")


@runtime
def integer_to_f32_up(x: np.ndarray) -> np.ndarray:
    """Round integers to f32 towards plus infinity."""
    near = x.astype(np.float32)
    # longdouble holds every integer of 64 bits, so that the comparison is exact.
    short = near.astype(np.longdouble) < x.astype(np.longdouble)
    result: np.ndarray = np.where(short, np.nextafter(near, np.float32(np.inf)), near)
    return result


@runtime
def integer_to_f32_short(x: np.ndarray) -> np.ndarray:
    """Round integers to f32 towards zero."""
    near = x.astype(np.float32)
    far = np.abs(near.astype(np.longdouble)) > np.abs(x.astype(np.longdouble))
    result: np.ndarray = np.where(far, np.nextafter(near, np.float32(0)), near)
    return result


@op(r"U?F2I(.FTZ)?(.U32|.U64|.S64)?.TRUNC(.NTZ)?")
def to_integer(e: Emitter, ins: SassInstruction) -> None:
    """Emit a saturating conversion of f32 to integers, towards zero."""
    kind = next((word for word in ins.modifiers if re.fullmatch(r"[US]\d\d", word)), "S32")
    dtype = np.dtype(f"{'u' if kind[0] == 'U' else 'i'}{int(kind[1:]) // 8}")
    (value,) = floats(e, ins, (ins.operands[1],))
    value = f"float_to_integer({value}, {e.constants.thing(dtype)}, 'rzi')"
    if dtype.itemsize == 8:
        assign_pair(e, ins.operands[0], f"{value}.view({e.constants.thing(WIDE)})")
    else:
        assign(e, ins.operands[0], "u32" if kind[0] == "U" else "s32", value)


@op(r"F2FP(.SATFINITE)?.(BF16|F16).F32.PACK_AB(.RZ)?", batch=True)
def pack_halves(e: Emitter, ins: SassInstruction) -> None:
    """Emit a conversion of two f32 to a pair of 16-bit floats, a in the upper half. SATFINITE: none is infinite."""
    kind = "bf16" if "BF16" in ins.modifiers else "f16"
    a, b = (source(e, operand, "f32") for operand in ins.operands[1:3])
    value = f"f32_to_{kind}x2({a}, {b}, {rounding(ins)!r})"
    assign(e, ins.operands[0], "u32", f"finite_halves({value}, {kind!r})" if "SATFINITE" in ins.modifiers else value)


@op(r"F2FP.(F16|BF16).E2M1.UNPACK_B", batch=True)
def unpack_nibbles(e: Emitter, ins: SassInstruction) -> None:
    """Emit a conversion of two 4-bit floats of a byte (B1 to B3, else the lowest) to f16 or bf16. bf16 has two scales, which must be 1."""
    value = ins.operands[1]
    if list(ins.operands[2:]) not in ([], [Immediate(_SCALES_OF_1, ("H0",))]) or not isinstance(value, Register):
        raise Unsupported(f"operands {ins.operands[1:]}")
    byte = int(value.suffixes[0][1:]) if value.suffixes else 0
    codes = f"({source(e, replace(value, suffixes=()), 'u32')} >> {constant(e, 'u32', 8 * byte)})"
    assign(e, ins.operands[0], "u32", f"e2m1x2_to_halves({codes}, {ins.modifiers[0].lower()!r})")


@op(r"FHADD(.BF16)?", r"FHFMA(.BF16)?", batch=True)
def widened(e: Emitter, ins: SassInstruction) -> None:
    """Emit a + c or a * b + c of 16-bit floats, lower halves but for H1, and an f32, rounded once to f32."""
    *halves, addend = ins.operands[1:]
    terms = [widened_half(e, operand, "bf16" if "BF16" in ins.modifiers else "f16") for operand in halves]
    terms.append(source(e, addend, "f32"))
    assign(e, ins.operands[0], "f32", f"add({', '.join(terms)})" if ins.base == "FHADD" else f"fma_f32({', '.join(terms)}, 'rn')")


def widened_half(e: Emitter, operand: Operand, kind: str) -> str:
    """Return the expression of a 16-bit float as f32."""
    if not isinstance(operand, Register) or operand.absolute or operand.inverted or operand.suffixes not in ((), ("H1",)):
        raise Unsupported(f"operand {operand} as a half")
    word = source(e, replace(operand, negative=False, suffixes=()), "u32")
    shifted = f"({word} >> {constant(e, 'u32', 16)})" if operand.suffixes else word
    value = f"half_to_f32({shifted}.astype({e.constants.thing(np.dtype('u2'))}), {kind!r})"
    return f"negative({value})" if operand.negative else value


@op(r"F2F.(BF16|F16).F32")
def narrow(e: Emitter, ins: SassInstruction) -> None:
    """Emit a conversion of f32 to a 16-bit float in the lower half; the upper half is 0."""
    kind = {"BF16": "bf16x2", "F16": "f16x2"}[ins.modifiers[0]]
    (value,) = floats(e, ins, (ins.operands[1],))
    assign(e, ins.operands[0], "u32", f"f32_to_{kind}({constant(e, 'f32', 0)}, {value}, 'rn')")


@op(r"F2FP.SATFINITE.(E4M3|E5M2).F32.PACK_AB_MERGE_C", batch=True)
def pack_bytes(e: Emitter, ins: SassInstruction) -> None:
    """Emit a conversion of two f32 to a pair of 8-bit floats, below the lower half of c."""
    kind = ins.modifiers[1].lower()
    a, b = (source(e, operand, "f32") for operand in ins.operands[1:3])
    merged = f"{source(e, ins.operands[3], 'u32')} << {constant(e, 'u32', 16)}"
    assign(e, ins.operands[0], "u32", f"{merged} | f32_to_fp8x2({a}, {b}, {kind!r})")


@op(r"F2FP.F16.(E4M3|E5M2).UNPACK_B", r"F2FP.BF16.E4M3.UNPACK_B", batch=True)
def unpack_bytes(e: Emitter, ins: SassInstruction) -> None:
    """Emit a conversion of two 8-bit floats, of the lower half or the upper (H1), to f16 or bf16. bf16 has two scales, which must be 1."""
    scales = list(ins.operands[2:])
    if scales not in ([], [Immediate(_SCALES_OF_1, ("H0",))]):
        raise Unsupported(f"scales {scales}")
    narrow = e.constants.thing(np.dtype("u2"))
    pairs = f"{_byte_pair(e, ins)}.astype({narrow})"
    assign(e, ins.operands[0], "u32", f"fp8x2_to_{ins.modifiers[0].lower()}x2({pairs}, {ins.modifiers[1].lower()!r})")


def _byte_pair(e: Emitter, ins: SassInstruction) -> str:
    """Return the half of the first source that an UNPACK_B converts, below other bits."""
    operand = ins.operands[1]
    assert isinstance(operand, Register)
    value = source(e, operand, "u32")
    return f"({value} >> {constant(e, 'u32', 16)})" if operand.suffixes == ("H1",) else value


@op(r"F2FP.BF16.E8.UNPACK_B", batch=True)
def unpack_scales(e: Emitter, ins: SassInstruction) -> None:
    """Emit a conversion of two powers of two (ue8m0), of the lower half or the upper (H1), to bf16."""
    narrow = e.constants.thing(np.dtype("u2"))
    assign(e, ins.operands[0], "u32", f"ue8m0x2_to_bf16x2({_byte_pair(e, ins)}.astype({narrow}))")


@op(r"HADD2.F32", batch=True)
def widen_half(e: Emitter, ins: SassInstruction) -> None:
    """Emit a conversion of a 16-bit float to f32: minus zero plus one half of b."""
    result, a, b = ins.operands
    if not (isinstance(a, Register) and a.number is None and a.negative and isinstance(b, Register) and not b.negative):
        raise Unsupported("HADD2.F32 other than a conversion")
    if b.suffixes not in (("H0_H0",), ("H1_H1",)):
        raise Unsupported(f"half {b.suffixes}")
    value = source(e, b, "u32")
    if b.suffixes == ("H1_H1",):
        value = f"({value} >> {constant(e, 'u32', 16)})"
    assign(e, result, "f32", f"half_to_f32({value}.astype({e.constants.thing(np.dtype('u2'))}), 'f16')")

"""Integer arithmetic, logic, shifts and comparison of machine code; the uniform forms are the same on uniform registers."""

from __future__ import annotations

import numpy as np

from ..isa.arithmetic import COMPARE
from ..isa.emitter import Emitter, Unsupported
from ..isa.table import runtime
from .accesses import destinations
from .listing import Immediate, Operand, Register, SassInstruction
from .operands import WIDE, WORD, assign, assign_pair, constant, is_dropped, pair, plain, source
from .predicates import assign_compared
from .table import op


def parts(ins: SassInstruction) -> tuple[Operand, tuple[Operand, ...], tuple[Operand, ...]]:
    """Return the result, the predicate results behind it, and the sources."""
    count = destinations(ins)
    return ins.operands[0], ins.operands[1:count], ins.operands[count:]


def carry_term(e: Emitter, operand: Operand) -> str:
    """Return a term of a sum in 64 bits: -x is ~x + 1 without wrapping, so that -0 carries."""
    value = f"{plain(e, operand, 'u32')}.astype({e.constants.thing(WIDE)})"
    if isinstance(operand, Register) and (operand.negative or operand.inverted):
        value = f"({value} ^ {e.constants.array(WIDE, 0xFFFFFFFF)})"
        if operand.negative:
            value = f"({value} + {e.constants.array(WIDE, 1)})"
    return value


def assign_carries(e: Emitter, carries: tuple[Operand, ...], total: str) -> None:
    """Store the carry outs of a total in 64 bits: at least 1, at least 2."""
    for least, carry in enumerate(carries, 1):
        assign(e, carry, "pred", f"({total} >> {e.constants.array(WIDE, 32)}) >= {e.constants.array(WIDE, least)}")


def assign_total(e: Emitter, result: Operand, carries: tuple[Operand, ...], terms: list[str]) -> None:
    """Store the low word of a sum of 64-bit terms, and its carries."""
    total = e.temp()
    e.line(f"{total} = {' + '.join(terms)}")
    low = e.temp()
    e.line(f"{low} = {total}.astype({e.constants.thing(WORD)})")
    assign_carries(e, carries, total)
    assign(e, result, "u32", low)


def carry_in(e: Emitter, operand: Operand) -> str:
    """Return a carry as a 64-bit term."""
    return f"array({source(e, operand, 'pred')}).astype({e.constants.thing(WIDE)})"


@op(r"U?IADD3")
def add3(e: Emitter, ins: SassInstruction) -> None:
    """Emit a + b + c, with up to two carry outs."""
    result, carries, sources = parts(ins)
    if is_dropped(carries):
        terms = [source(e, operand, "u32") for operand in sources if not is_zero(operand)] or [constant(e, "u32", 0)]
        assign(e, result, "u32", " + ".join(terms))
    else:
        assign_total(e, result, carries, [carry_term(e, operand) for operand in sources])


def is_zero(operand: Operand) -> bool:
    """Return True for RZ and URZ without a complement."""
    return isinstance(operand, Register) and operand.number is None and not operand.inverted and not operand.is_predicate


@op(r"IADD(.X)?")
def add_two(e: Emitter, ins: SassInstruction) -> None:
    """Emit a + b, under X with a carry in, and its carry outs."""
    result, carries, sources = parts(ins)
    if is_dropped(carries) and "X" not in ins.modifiers:
        assign(e, result, "u32", " + ".join(source(e, operand, "u32") for operand in sources))
    else:
        terms = [carry_term(e, operand) for operand in sources[:2]] + [carry_in(e, operand) for operand in sources[2:]]
        assign_total(e, result, carries, terms)


@op(r"U?IADD3.X")
def add3_carry(e: Emitter, ins: SassInstruction) -> None:
    """Emit a + b + c and up to two carry ins."""
    result, carries, sources = parts(ins)
    terms = [carry_term(e, operand) for operand in sources[:3]] + [carry_in(e, operand) for operand in sources[3:]]
    assign_total(e, result, carries, terms)


@op(r"UIADD3.64", r"IADD.64")
def add_pairs(e: Emitter, ins: SassInstruction) -> None:
    """Emit a sum of 64-bit values."""
    result, carries, sources = parts(ins)
    if not is_dropped(carries):
        raise Unsupported("a carry out of 64 bits")
    assign_pair(e, result, " + ".join(pair(e, operand) for operand in sources))


@op(r"VIADD")
def add2(e: Emitter, ins: SassInstruction) -> None:
    """Emit a + b."""
    assign(e, ins.operands[0], "u32", f"{source(e, ins.operands[1], 'u32')} + {source(e, ins.operands[2], 'u32')}")


@op(r"IMAD(.MOV|.MOV.U32|.U32|.IADD|.SHL|.SHL.U32)?", r"UIMAD")
def multiply_add(e: Emitter, ins: SassInstruction) -> None:
    """Emit a * b + c, low word. The modifiers say only what the operands make of it."""
    result, carries, (a, b, c) = parts(ins)
    if not is_dropped(carries):
        raise Unsupported("a carry out of a product's low word")
    addend = source(e, c, "u32")
    if is_zero(a) or is_zero(b):
        assign(e, result, "u32", addend)
        return
    product = source(e, a, "u32")
    if not (isinstance(b, Immediate) and b.bits == 1):
        product = f"{product} * {source(e, b, 'u32')}"
    assign(e, result, "u32", product if is_zero(c) else f"{product} + {addend}")


@op(r"U?IMAD.X")
def multiply_add_carry(e: Emitter, ins: SassInstruction) -> None:
    """Emit a * b + c and a carry in, low word."""
    result, carries, (a, b, c, carry) = parts(ins)
    if not is_dropped(carries):
        raise Unsupported("a carry out of a product's low word")
    word = e.constants.thing(WORD)
    assign(
        e, result, "u32",
        f"{source(e, a, 'u32')} * {source(e, b, 'u32')} + {source(e, c, 'u32')} + array({source(e, carry, 'pred')}).astype({word})",
    )  # fmt: skip


@op(r"U?IMAD.(WIDE|HI)(.U32)?", r"IMAD.WIDE.U32.X")
def multiply_wide(e: Emitter, ins: SassInstruction) -> None:
    """Emit the 64-bit a * b + c of a 64-bit c, or its high word, with a carry out. X: and a carry in."""
    result, carries, (a, b, c, *carry) = parts(ins)
    kind, dtype = ("u32", "u8") if "U32" in ins.modifiers else ("s32", "i8")
    wide = e.constants.thing(np.dtype(dtype))
    product, total = e.temp(), e.temp()
    e.line(f"{product} = ({source(e, a, kind)}.astype({wide}) * {source(e, b, kind)}).view({e.constants.thing(WIDE)})")
    e.line(f"{total} = {' + '.join([product, pair(e, c), *(carry_in(e, item) for item in carry)])}")
    if not is_dropped(carries):
        if carry:
            raise Unsupported("a carry in and out of 64 bits")
        assign(e, carries[0], "pred", f"{total} < {product}")
    if ins.modifiers[0] == "HI":
        assign(e, result, "u32", f"({total} >> {e.constants.array(WIDE, 32)}).astype({e.constants.thing(WORD)})")
    else:
        assign_pair(e, result, total)


@op(r"U?LEA")
def scaled_add(e: Emitter, ins: SassInstruction) -> None:
    """Emit b + (a << s), with a carry out of the addition."""
    result, carries, (a, b, shift) = parts(ins)
    scaled = f"({source(e, a, 'u32')} << {source(e, shift, 'u32')})"
    if is_dropped(carries):
        assign(e, result, "u32", f"{scaled} + {source(e, b, 'u32')}")
    else:
        assign_total(e, result, carries, [f"{scaled}.astype({e.constants.thing(WIDE)})", carry_term(e, b)])


@op(r"U?LEA.HI(.X)?(.SX32)?")
def scaled_add_high(e: Emitter, ins: SassInstruction) -> None:
    """Emit b + the high word of {c:a} << s, with carries. SX32: c is the sign of a."""
    result, carries, sources = parts(ins)
    words = list(sources)
    carry = words.pop() if "X" in ins.modifiers else None
    if "SX32" in ins.modifiers:
        a, b, shift = words
        high = f"({source(e, a, 's32')} >> {constant(e, 's32', 31)}).view({e.constants.thing(WORD)})"
    else:
        a, b, c, shift = words
        high = source(e, c, "u32")
    if not isinstance(shift, Immediate) or not 0 < shift.bits < 32:
        raise Unsupported("a shift other than 1 to 31")
    scaled = f"({high} << {constant(e, 'u32', shift.bits)} | {source(e, a, 'u32')} >> {constant(e, 'u32', 32 - shift.bits)})"
    terms = [f"{scaled}.astype({e.constants.thing(WIDE)})", carry_term(e, b)]
    assign_total(e, result, carries, terms + ([] if carry is None else [carry_in(e, carry)]))


@op(r"U?SHF.(L.U32|L.W.U32|L.W.U32.HI|R.U32.HI|R.S32.HI|L.U64.HI|R.U32|R.U64)")
def shift(e: Emitter, ins: SassInstruction) -> None:
    """Emit a shift by an unsigned amount: clamped, or modulo 32 (W)."""
    result, low, amount, high = ins.operands
    count = source(e, amount, "u32")
    form = ".".join(ins.modifiers)
    if form == "L.W.U32.HI":
        count = f"({count} & {constant(e, 'u32', 31)})"
    if form in ("L.U64.HI", "L.W.U32.HI"):
        value = f"shift_pair_left({source(e, low, 'u32')}, {source(e, high, 'u32')}, {count})"
    elif form in ("R.U64", "R.U32"):
        if form == "R.U32" and not is_zero(high):
            raise Unsupported("a shift of 32 bits with an upper word")
        value = f"shift_pair_right({source(e, low, 'u32')}, {source(e, high, 'u32')}, {count})"
    elif form == "L.W.U32":
        value = f"{source(e, low, 'u32')} << ({count} & {constant(e, 'u32', 31)})"
    elif form == "R.S32.HI":
        signed = e.constants.thing(np.dtype("i4"))
        value = f"({source(e, high, 's32')} >> minimum({count}, {constant(e, 'u32', 31)}).astype({signed})).view({e.constants.thing(WORD)})"
    else:
        value = f"{'left' if form[0] == 'L' else 'right'}_shift({source(e, low if form[0] == 'L' else high, 'u32')}, {count})"
        if not (isinstance(amount, Immediate) and amount.bits < 32):
            value = f"where({count} < {constant(e, 'u32', 32)}, {value}, {constant(e, 'u32', 0)})"
    assign(e, result, "u32", value)


@op(r"SGXT(.W)?(.U32)?")
def extend(e: Emitter, ins: SassInstruction) -> None:
    """Emit the extension of the low bits: by their sign, or by zeros (U32). Their number is clamped, or modulo 32 (W)."""
    result, value, count = ins.operands
    terms = f"{source(e, value, 'u32')}, {source(e, count, 'u32')}"
    assign(e, result, "u32", f"extended({terms}, {'W' in ins.modifiers}, {'U32' in ins.modifiers})")


@runtime
def shift_pair_left(low: np.ndarray, high: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return the high word of a 64-bit value shifted left."""
    wide = high.astype(np.uint64) << np.uint64(32) | low
    moved = np.where(count < 64, wide << np.minimum(count, 63).astype(np.uint64), np.uint64(0))
    result: np.ndarray = (moved >> np.uint64(32)).astype(np.uint32)
    return result


@runtime
def shift_pair_right(low: np.ndarray, high: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return the low word of a 64-bit value shifted right."""
    wide = high.astype(np.uint64) << np.uint64(32) | low
    moved = np.where(count < 64, wide >> np.minimum(count, 63).astype(np.uint64), np.uint64(0))
    result: np.ndarray = moved.astype(np.uint32)
    return result


TABLES = {
    0x0C: "~{a} & {b}",
    0x30: "{a} & ~{b}",
    0x33: "~{b}",
    0x3C: "{a} ^ {b}",
    0xC0: "{a} & {b}",
    0xFC: "{a} | {b}",
    0xF8: "{a} | ({b} & {c})",
}


@op(r"U?LOP3.LUT")
def logic(e: Emitter, ins: SassInstruction) -> None:
    """Emit any function of three bits. A predicate result: some bit is set, or the last operand."""
    count = destinations(ins)
    a, b, c, table, last = ins.operands[count:]
    assert isinstance(table, Immediate)
    names = {name: source(e, operand, "u32") for name, operand in (("a", a), ("b", b), ("c", c))}
    form = TABLES.get(table.bits)
    value = e.temp()
    e.line(f"{value} = {form.format(**names) if form else 'truth_table({a}, {b}, {c}, '.format(**names) + f'{table.bits})'}")
    if count == 2:
        assign(e, ins.operands[0], "pred", f"logical_or({value} != {constant(e, 'u32', 0)}, {source(e, last, 'pred')})")
    assign(e, ins.operands[count - 1], "u32", value)


@op(r"U?ISETP.(EQ|NE|LT|LE|GT|GE)(.U32)?.(AND|OR|XOR)(.EX)?", taint="own")
def compare(e: Emitter, ins: SassInstruction) -> None:
    """Emit a comparison combined with a predicate, and its negation combined. EX: of high words, behind the result of the low words."""
    a, b, *others = ins.operands[2:]
    words = ins.modifiers
    name = words[0].lower()
    kind = "u32" if "U32" in words else "s32"
    left, right = source(e, a, kind), source(e, b, kind)
    value = f"{COMPARE[name]}({left}, {right})"
    if "EX" in words:
        value = extended(e, name, left, right, source(e, others[1], "pred"))
    assign_compared(e, ins, value, [a, b, *others[1:]], others[0])


@op(r"U?ISETP.(EQ|NE|LT|LE|GT|GE).(U64|S64).(AND|OR|XOR)", taint="own")
def compare_pairs(e: Emitter, ins: SassInstruction) -> None:
    """Emit a comparison of 64-bit values combined with a predicate, and its negation combined."""
    a, b, other = ins.operands[2:]
    left, right = signed_pairs(e, ins, (a, b))
    assign_compared(e, ins, f"{COMPARE[ins.modifiers[0].lower()]}({left}, {right})", [a, b], other, width=2)


@op(r"IMNMX.(U64|S64)")
def extreme_of_pairs(e: Emitter, ins: SassInstruction) -> None:
    """Emit the minimum (PT) or maximum of 64-bit values."""
    first, second, result, a, b, which, last = ins.operands
    if not is_dropped((first, second, last)):
        raise Unsupported("a predicate of a minimum of 64 bits")
    value = folded(e, signed_pairs(e, ins, (a, b)), which)
    assign_pair(e, result, f"{value}.view({e.constants.thing(WIDE)})" if "S64" in ins.modifiers else value)


def signed_pairs(e: Emitter, ins: SassInstruction, operands: tuple[Operand, ...]) -> list[str]:
    """Return 64-bit sources, under S64 as signed numbers."""
    values = [pair(e, operand) for operand in operands]
    return [f"{value}.view({e.constants.thing(np.dtype('i8'))})" for value in values] if "S64" in ins.modifiers else values


def extended(e: Emitter, name: str, left: str, right: str, low: str) -> str:
    """Return the comparison of 64-bit values whose low words have been compared."""
    if name in ("eq", "ne"):
        return f"logical_{'and' if name == 'eq' else 'or'}({COMPARE[name]}({left}, {right}), {low})"
    strict = "less" if name in ("lt", "le") else "greater"
    return f"logical_or({strict}({left}, {right}), logical_and(equal({left}, {right}), {low}))"


@op(r"VIMNMX3?(.U32|.RELU)?", r"U?VIMNMX.(S32|U32)(.RELU)?")
def extremes(e: Emitter, ins: SassInstruction) -> None:
    """Emit the minimum (PT) or maximum of two or three integers. RELU: not below 0."""
    result, carries, sources = parts(ins)
    if not is_dropped(carries):
        raise Unsupported("a predicate result of a minimum")
    kind = "u32" if "U32" in ins.modifiers else "s32"
    *values, which = sources
    value = folded(e, [source(e, operand, kind) for operand in values], which)
    assign(e, result, kind, floored(e, ins, value, kind))


def folded(e: Emitter, values: list[str], which: Operand) -> str:
    """Return the minimum or maximum of values, as a constant predicate says."""
    if not isinstance(which, Register) or which.number is not None:
        raise Unsupported("a minimum or maximum by a predicate")
    function = "maximum" if which.negative else "minimum"
    value = values[0]
    for other in values[1:]:
        value = f"{function}({value}, {other})"
    return value


@op(r"VIADDMNMX(.U32|.RELU)?")
def add_extremes(e: Emitter, ins: SassInstruction) -> None:
    """Emit the minimum (PT) or maximum of a + b and c. RELU: not below 0."""
    result, a, b, c, which = ins.operands
    kind = "u32" if "U32" in ins.modifiers else "s32"
    total = f"({source(e, a, kind)} + {source(e, b, kind)})"
    value = folded(e, [total, source(e, c, kind)], which)
    assign(e, result, kind, floored(e, ins, value, kind))


def floored(e: Emitter, ins: SassInstruction, value: str, kind: str) -> str:
    """Return a value, under RELU not below 0."""
    return f"maximum({value}, {constant(e, kind, 0)})" if "RELU" in ins.modifiers else value


@op(r"IABS")
def absolute(e: Emitter, ins: SassInstruction) -> None:
    """Emit |a|."""
    assign(e, ins.operands[0], "s32", f"absolute({source(e, ins.operands[1], 's32')})")


@op(r"U?POPC")
def population(e: Emitter, ins: SassInstruction) -> None:
    """Emit the number of set bits."""
    assign(e, ins.operands[0], "u32", f"bits_popc({source(e, ins.operands[1], 'u32')})")


@op(r"U?FLO(.U32)?(.SH)?")
def leading(e: Emitter, ins: SassInstruction) -> None:
    """Emit the index of the highest bit that is set, or unlike the sign; SH: how far it is from the top. All ones for none."""
    value = source(e, ins.operands[1], "u32" if "U32" in ins.modifiers else "s32")
    assign(e, ins.operands[0], "u32", f"highest_bit({value}, {'SH' in ins.modifiers})")


@op(r"BREV")
def turn(e: Emitter, ins: SassInstruction) -> None:
    """Emit the bits in the opposite order."""
    assign(e, ins.operands[0], "u32", f"bits_reversed({source(e, ins.operands[1], 'u32')})")


@op(r"IDP.4A.[US]8.[US]8", r"IDP.2A.(LO|HI).[US]16.[US]8")
def dot(e: Emitter, ins: SassInstruction) -> None:
    """Emit a sum of products of bytes, or of halves and bytes."""
    terms = ", ".join(source(e, operand, "u32") for operand in ins.operands[1:])
    half = ins.modifiers[1].lower() if ins.modifiers[0] == "2A" else ""
    first, second = (word[0].lower() for word in ins.modifiers[-2:])
    assign(e, ins.operands[0], "u32", f"dot_product({terms}, {first!r}, {second!r}, {half!r})")

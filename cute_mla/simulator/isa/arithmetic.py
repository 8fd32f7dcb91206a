"""Integer arithmetic, bit manipulation, moves, selection and comparison."""

from __future__ import annotations

import re

import numpy as np

from ..frontend.ptx import Imm, Instruction, Operand, Reg, Symbol, Vec
from .emitter import Emitter, Unsupported, immediate_bits, pair_items
from .table import op, registers_of, runtime, statements

Match = re.Match[str]


_INTEGER = "[us](16|32|64)"
# Wrapping arithmetic, logic, and divisions, which truncate and are all ones where the divisor is 0, as ptxas computes them.
statements(
    (
        (rf"add.(?P<t>{_INTEGER})", "add({a}, {b}, {out})", "{t}", "{t}", "{t}"),
        (rf"sub.(?P<t>{_INTEGER})", "subtract({a}, {b}, {out})", "{t}", "{t}", "{t}"),
        (r"(?P<f>and|or|xor).(?P<t>b(16|32|64))", "bitwise_{f}({a}, {b}, {out})", "{t}", "{t}", "{t}"),
        (r"(?P<f>and|or|xor).pred", "logical_{f}({a}, {b}, {out})", "pred", "pred", "pred"),
        (r"not.(?P<t>b16|b32|b64)", "invert({a}, {out})", "{t}", "{t}"),
        (r"not.pred", "logical_not({a}, {out})", "pred", "pred"),
        (r"neg.(?P<t>s(16|32|64))", "negative({a}, {out})", "{t}", "{t}"),
        (r"abs.(?P<t>s(16|32|64))", "absolute({a}, {out})", "{t}", "{t}"),
        (rf"(?P<f>min|max).(?P<t>{_INTEGER})", "{out}[...] = {f}imum({a}, {b})", "{t}", "{t}", "{t}"),
        (r"(?P<f>min|max).relu.s32", "{out}[...] = maximum({f}imum({a}, {b}), 0)", "s32", "s32", "s32"),
        (rf"mul.lo.(?P<t>{_INTEGER})", "multiply({a}, {b}, {out})", "{t}", "{t}", "{t}"),
        (r"mul.hi.(?P<t>[us](?P<n>16|32|64))", "{out}[...] = mul_hi({a}, {b}, {n})", "{t}", "{t}", "{t}"),
        (rf"mad.lo.(?P<t>{_INTEGER})", "add(multiply({a}, {b}), {c}, {out})", "{t}", "{t}", "{t}", "{t}"),
        (r"mad.hi.(?P<t>[us](?P<n>32|64))", "add(mul_hi({a}, {b}, {n}), {c}, {out})", "{t}", "{t}", "{t}", "{t}"),
        (rf"(?P<f>div|rem).(?P<t>{_INTEGER})", "{out}[...] = divide_{f}({a}, {b})", "{t}", "{t}", "{t}"),
        (r"szext.(?P<m>clamp|wrap).(?P<t>[us]32)", "{out}[...] = extended({a}, {b}, {m!r} == 'wrap', {t!r} == 'u32')", "u32", "u32", "u32"),
        (r"(?P<f>popc|clz).(?P<t>b32|b64)", "{out}[...] = bits_{f}({a})", "u32", "{t}"),
        (r"brev.b32", "{out}[...] = bits_reversed({a})", "u32", "u32"),
        (r"bfind(?P<s>.shiftamt)?.(?P<t>[us]32)", "{out}[...] = highest_bit({a}, {s!r} == '.shiftamt')", "u32", "{t}"),
        (r"dp4a.(?P<f>[us])32.(?P<s>[us])32", "{out}[...] = dot_product({a}, {b}, {c}, {f!r}, {s!r}, '')", "u32", "u32", "u32", "u32"),
        (
            r"dp2a.(?P<h>lo|hi).(?P<f>[us])32.(?P<s>[us])32", "{out}[...] = dot_product({a}, {b}, {c}, {f!r}, {s!r}, {h!r})",
            "u32", "u32", "u32", "u32",
        ),
    )
)  # fmt: skip


def _wide(kind: str) -> str:
    return f"{kind[0]}{int(kind[1:]) * 2}"


@op(r"mul.wide.(?P<t>[us](16|32))")
def mul_wide(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit the full product of 16- or 32-bit factors."""
    kind = m["t"]
    wide = _wide(kind)
    dtype = e.constants.thing(np.dtype(f"{'u' if kind[0] == 'u' else 'i'}{int(kind[1:]) // 4}"))
    a, b = e.src(ins.operands[1], kind), e.src(ins.operands[2], kind)
    e.line(f"multiply({a}, {b}, {e.dst(ins.operands[0], wide)}, dtype={dtype})")


@runtime
def mul_hi(a: np.ndarray, b: np.ndarray, bits: int) -> np.ndarray:
    """Return the high `bits` bits of a * b."""
    if bits < 64:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return (a.astype(wide) * b.astype(wide) >> wide(bits)).astype(a.dtype)
    left, right = np.broadcast_arrays(a, b)
    products = [(int(x) * int(y) >> 64) & (2**64 - 1) for x, y in zip(left.ravel(), right.ravel(), strict=True)]
    return np.array(products, np.uint64).view(a.dtype).reshape(left.shape)


@op(r"mad.wide.(?P<t>[us](16|32))")
def mad_wide(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit the full product of a and b, plus a wide addend."""
    kind = m["t"]
    wide = _wide(kind)
    dtype = e.constants.thing(np.dtype(f"{'u' if kind[0] == 'u' else 'i'}{int(kind[1:]) // 4}"))
    a, b, c = e.src(ins.operands[1], kind), e.src(ins.operands[2], kind), e.src(ins.operands[3], wide)
    e.line(f"add(multiply({a}, {b}, dtype={dtype}), {c}, {e.dst(ins.operands[0], wide)})")


@runtime
def divide_div(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the quotient, rounded towards zero."""
    quotient = np.floor_divide(a, b)
    if a.dtype.kind == "i":
        quotient = quotient + ((quotient < 0) & (quotient * b != a)).astype(a.dtype)
    return np.where(b == 0, ~np.zeros((), a.dtype), quotient)


@runtime
def divide_rem(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the remainder, with the sign of the dividend."""
    return np.where(b == 0, ~np.zeros((), a.dtype), np.fmod(a, b))


@op(r"shl.b(?P<n>16|32|64)", r"shr.(?P<t>[usb](16|32|64))")
def shift(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a shift by an unsigned 32-bit amount, clamped to the width."""
    groups = m.groupdict()
    kind = groups.get("t") or f"b{groups['n']}"
    function = "right_shift" if "t" in groups else "left_shift"
    a = e.src(ins.operands[1], kind)
    amount = ins.operands[2]
    if isinstance(amount, Imm):
        count = e.src(Imm(min(int(amount.value), int(kind[1:]))), kind)
    else:
        dtype = e.constants.thing(np.dtype(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}"))
        count = f"minimum({e.src(amount, 'u32')}, {int(kind[1:])}).astype({dtype})"
    e.line(f"{function}({a}, {count}, {e.dst(ins.operands[0], kind)})")


@op(r"shf.(?P<side>l|r).(?P<mode>wrap|clamp).b32")
def funnel(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a funnel shift of the 64-bit value b:a."""
    a, b, c = (e.src(operand, "u32") for operand in ins.operands[1:4])
    e.line(f"{e.dst(ins.operands[0], 'b32')}[...] = funnel_shift({a}, {b}, {c}, {m['side'] == 'l'}, {m['mode'] == 'wrap'})")


@runtime
def funnel_shift(a: np.ndarray, b: np.ndarray, c: np.ndarray, left: bool, wrap: bool) -> np.ndarray:
    """Return the upper (left) or lower (right) word of b:a shifted by c."""
    count = (c & 31 if wrap else np.minimum(c, 32)).astype(np.uint64)
    value = b.astype(np.uint64) << np.uint64(32) | a.astype(np.uint64)
    moved = value << count >> np.uint64(32) if left else value >> count
    return moved.astype(np.uint32)


@runtime
def bits_popc(a: np.ndarray) -> np.ndarray:
    """Count the set bits."""
    return np.bitwise_count(a)


@runtime
def bits_clz(a: np.ndarray) -> np.ndarray:
    """Count the leading zero bits."""
    width = a.dtype.itemsize * 8
    return np.array([width - int(x).bit_length() for x in np.atleast_1d(a)], np.uint32)


@runtime
def bits_reversed(a: np.ndarray) -> np.ndarray:
    """Return words with their bits in the opposite order."""
    octets = np.ascontiguousarray(np.atleast_1d(a)).view(np.uint8).reshape(-1, 4)
    bits = np.unpackbits(octets, axis=-1, bitorder="little")[:, ::-1]
    return np.packbits(bits, axis=-1, bitorder="little").view(np.uint32)[:, 0]


@runtime
def highest_bit(a: np.ndarray, shift: bool) -> np.ndarray:
    """Return the place of the highest bit that is set, or unlike the sign; shift: how far it is from the top. All ones for none."""
    words = (np.where(a < 0, ~a, a) if a.dtype.kind == "i" else a).view(np.uint32)
    zeros = bits_clz(words)
    result: np.ndarray = np.where(zeros == 32, np.uint32(0xFFFFFFFF), zeros) if shift else np.uint32(31) - zeros
    return result


@runtime
def dot_product(a: np.ndarray, b: np.ndarray, c: np.ndarray, first: str, second: str, half: str) -> np.ndarray:
    """Return c plus the products of bytes of a and b, or of halves of a and the lower or upper bytes of b. first, second: signs."""
    shape = np.broadcast_shapes((1,), a.shape, b.shape)
    kinds = {"s": "i", "u": "u"}
    left = np.ascontiguousarray(np.broadcast_to(a, shape)).view(f"{kinds[first]}{2 if half else 1}").reshape(*shape, -1)
    right = np.ascontiguousarray(np.broadcast_to(b, shape)).view(f"{kinds[second]}1").reshape(*shape, -1)
    if half:
        right = right[..., :2] if half == "lo" else right[..., 2:]
    return (left.astype(np.int64) * right).sum(axis=-1).astype(np.uint32) + c


@op(r"lop3.b32")
def logic3(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit any function of three bits, given as a truth table."""
    table = ins.operands[4]
    if not isinstance(table, Imm):
        raise Unsupported("lop3 with a table that is not a literal")
    a, b, c = (e.src(operand, "u32") for operand in ins.operands[1:4])
    e.line(f"{e.dst(ins.operands[0], 'u32')}[...] = truth_table({a}, {b}, {c}, {int(table.value)})")


@runtime
def truth_table(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """Return the bitwise function whose value for (a, b, c) = bits of i is bit i of table (a is the high bit)."""
    result = np.zeros(np.broadcast(a, b, c).shape, np.uint32)
    for index in range(8):
        if table >> index & 1:
            term = (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
            result |= term
    return result


@op(r"prmt.b32", batch=True)
def permute(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a choice of four bytes out of b:a."""
    a, b, c = (e.src(operand, "u32") for operand in ins.operands[1:4])
    selector = ins.operands[3]
    if isinstance(selector, Imm) and not int(selector.value) & 0x8888:
        index = [int(selector.value) >> 4 * byte & 7 for byte in range(4)]
        e.line(f"{e.dst(ins.operands[0], 'u32')}[...] = pick_bytes({a}, {b}, {e.constants.number(tuple(index))})")
    else:
        e.line(f"{e.dst(ins.operands[0], 'u32')}[...] = permute_bytes({a}, {b}, {c})")


@runtime
def pick_bytes(a: np.ndarray, b: np.ndarray, index: tuple[int, ...]) -> np.ndarray:
    """Return bytes index[0..3] (low to high) of b:a."""
    result: np.ndarray | int = 0
    for place, byte in enumerate(index):
        word = a if byte < 4 else b
        moved = (word >> np.uint32(8 * (byte & 3))) & np.uint32(255)
        result = result | (moved << np.uint32(8 * place))
    assert isinstance(result, np.ndarray | np.generic)
    return result  # type: ignore[return-value]


@runtime
def permute_bytes(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Return the result of prmt in its default mode. Bit 3 of a selector nibble replicates the byte's sign."""
    value = b.astype(np.uint64) << np.uint64(32) | a.astype(np.uint64)
    result = np.zeros(np.broadcast(value, selector).shape, np.uint64)
    for place in range(4):
        nibble = selector.astype(np.uint64) >> np.uint64(4 * place) & np.uint64(15)
        byte = value >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        result |= np.where(nibble & np.uint64(8), sign, byte) << np.uint64(8 * place)
    return result.astype(np.uint32)


@op(r"selp.(?P<t>[bus](16|32|64)|f32)", taint="own", batch=True)
def select(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit d = p ? a : b. Poison of the operand that is not selected is dropped."""
    kind = m["t"]
    d, a, b, p = ins.operands
    assert d is None or isinstance(d, Reg)
    condition = e.src(p, "pred")
    if e.tainted and d is not None:
        pa, pb, pp = e.taint(a) or "False", e.taint(b) or "False", e.taint(p) or "False"
        e.line(f"{e.taint(d)}[...] = logical_or(where({condition}, {pa}, {pb}), {pp})")
    left, right = e.src(a, kind), e.src(b, kind)
    e.line(f"{e.dst(d, kind)}[...] = where({condition}, {left}, {right})")


COMPARE = {
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
    "lo": "less", "ls": "less_equal", "hi": "greater", "hs": "greater_equal",
}  # fmt: skip


@op(
    r"setp.(?P<c>eq|ne|lt|le|gt|ge)(.(?P<b>and|or|xor))?.(?P<t>[us](16|32|64))",
    r"setp.(?P<c>lo|ls|hi|hs)(.(?P<b>and|or|xor))?.(?P<t>u(16|32|64))",
    r"setp.(?P<c>eq|ne)(.(?P<b>and|or|xor))?.(?P<t>b(16|32|64))",
)
def compare(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit p|q = (a op b), combined with c. q uses the opposite of the comparison."""
    kind = m["t"]
    a, b = e.src(ins.operands[1], kind), e.src(ins.operands[2], kind)
    first, second = pair_items(ins.operands[0])
    function = COMPARE[m["c"]]
    if m["b"] is None and second is None:
        value = _constant_comparison(e, ins, m["c"], kind)
        e.line(f"{function}({a}, {b}, {e.dst(first, 'pred')})")
        if value is not None and first is not None:
            e.known[first.name] = value
        return
    combine_comparison(e, ins, f"{function}({a}, {b})", m["b"])


def _constant_comparison(e: Emitter, ins: Instruction, name: str, kind: str) -> int | None:
    """Return the result of eq/ne when both sides are known while the block is generated."""
    values = []
    for operand in ins.operands[1:3]:
        if isinstance(operand, Imm):
            values.append(immediate_bits(operand, kind))
        elif isinstance(operand, Reg) and operand.name in e.known:
            values.append(e.known[operand.name])
    if len(values) != 2 or name not in ("eq", "ne"):
        return None
    return int((values[0] == values[1]) == (name == "eq"))


def combine_comparison(e: Emitter, ins: Instruction, expression: str, combine: str | None) -> None:
    """Write p and q of a comparison."""
    first, second = pair_items(ins.operands[0])
    temp = e.temp()
    e.line(f"{temp} = {expression}")
    function = {"and": "logical_and", "or": "logical_or", "xor": "logical_xor", None: ""}[combine]
    third = e.src(ins.operands[3], "pred") if combine else ""
    values = (temp, f"logical_not({temp})")
    names = []
    for value in values:
        name = e.temp()
        e.line(f"{name} = {function}({value}, {third})" if combine else f"{name} = {value}")
        names.append(name)
    for register, name in zip((first, second), names, strict=True):
        if register is not None:
            e.line(f"{e.dst(register, 'pred')}[...] = {name}")


@op(r"mov.(?P<t>[bus](16|32|64)|f32)", taint="own", halves=True)
def move(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a copy, a packing of {a, b} into a wider register, or an unpacking."""
    d, a = ins.operands
    kind = m["t"]
    if e.tainted:
        move_taint(e, d, a)
    if isinstance(d, Vec):
        unpack(e, d, a, kind)
    elif isinstance(a, Vec):
        pack(e, d, a, kind)
    elif isinstance(a, Imm) and isinstance(d, Reg):
        bits = immediate_bits(a, kind)
        unsigned = f"u{kind[1:]}"
        e.line(f"{e.dst(d, unsigned)}.fill({e.constants.number(bits)})")
        if d.name not in e.redirect:
            e.known[d.name] = bits
    else:
        source = a
        value = e.src(source, kind) if not isinstance(a, Symbol) else e.address(a, int(kind[1:]))
        e.line(f"{e.dst(d, kind)}[...] = {value}")


def move_taint(e: Emitter, d: Operand | None, a: Operand | None) -> None:
    """Emit the poison of a move. Halves of 64 bits keep their own poison, and other parts that are packed and unpacked within a block."""
    if isinstance(d, Vec) and isinstance(a, Reg) and a.bank == "d" and len(d.items) == 2:
        for item, half in zip(d.items, e.half_taints(a), strict=True):
            if item is not None:
                e.line(f"{e.taint(item)}[...] = {half}")
        return
    if isinstance(d, Reg) and d.bank == "d" and isinstance(a, Vec) and len(a.items) == 2:
        low, high = (e.taint(item) or "False" for item in a.items)
        e.taint_halves(d, low, high)
        return
    if isinstance(d, Reg) and d.bank == "d" and isinstance(a, Reg) and a.bank == "d":
        e.taint_halves(d, *e.half_taints(a))
    if isinstance(d, Vec):
        parts = e.parts.get(a.name) if isinstance(a, Reg) else None
        for index, item in enumerate(d.items):
            if item is not None:
                e.line(f"{e.taint(item)}[...] = {parts[index] if parts and len(parts) == len(d.items) else e.taint(a)}")
        return
    if not isinstance(d, Reg):
        return
    if not (d.bank == "d" and isinstance(a, Reg) and a.bank == "d"):
        e.taint_from([d], registers_of(a))
        e.join_halves((d,))
    if isinstance(a, Vec):
        parts = []
        for item in a.items:
            parts.append(e.temp())
            e.line(f"{parts[-1]} = {e.taint(item)}.copy()" if isinstance(item, Reg) else f"{parts[-1]} = False")
        e.parts[d.name] = parts
    elif isinstance(a, Reg) and a.name in e.parts:
        e.parts[d.name] = e.parts[a.name]


def unpack(e: Emitter, d: Vec, a: object, kind: str) -> None:
    """Emit {x, y, ...} = a."""
    bits = int(kind[1:])
    part = bits // len(d.items)
    if not isinstance(a, Reg) or part < 16:
        raise Unsupported("mov that unpacks bytes or something other than a register")
    temp = e.temp()
    e.line(f"{temp} = {e.src(a, f'b{bits}')}")
    dtype = e.constants.thing(np.dtype(f"u{part // 8}"))
    pieces = [e.temp() for _ in d.items]
    for index, piece in enumerate(pieces):  # all parts are read before any is written: a may be among them
        shift_by = e.constants.array(np.dtype(f"u{bits // 8}"), index * part)
        e.line(f"{piece} = ({temp} >> {shift_by}).astype({dtype})" if index else f"{piece} = {temp}.astype({dtype})")
    for item, piece in zip(d.items, pieces, strict=True):
        if item is not None:
            e.line(f"{e.dst(item, f'b{part}')}[...] = {piece}")


def pack(e: Emitter, d: object, a: Vec, kind: str) -> None:
    """Emit d = {x, y, ...}, x lowest."""
    bits = int(kind[1:])
    part = bits // len(a.items)
    if not isinstance(d, Reg) or part < 16:
        raise Unsupported("mov that packs bytes or into something other than a register")
    dtype = e.constants.thing(np.dtype(f"u{bits // 8}"))
    terms = []
    for index, item in enumerate(a.items):
        value = f"{e.src(item, f'b{part}')}.astype({dtype})"
        terms.append(f"({value} << {e.constants.array(np.dtype(f'u{bits // 8}'), index * part)})" if index else value)
    e.line(f"{e.dst(d, f'b{bits}')}[...] = {' | '.join(terms)}")


@op(r"mov.b128", taint="own")
def move_pair(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a move between 128-bit registers and pairs of 64-bit registers, lower half first."""
    d, a = ins.operands
    if not isinstance(d, Vec) or not isinstance(a, Vec) or len(d.items) != 2 or len(a.items) != 2:
        raise Unsupported("mov.b128 of something other than two 64-bit halves")
    moves: list[tuple[str, str]] = []
    for target, source in zip(d.items, a.items, strict=True):
        if target is not None:
            moves.append((e.dst(target, "b64"), e.src(source, "b64")))
            if e.tainted:
                moves.append((str(e.taint(target)), e.taint(source) or "False"))
    names = [e.temp() for _ in moves]
    for name, (_, value) in zip(names, moves, strict=True):  # all are read before any is written: d may overlap a
        e.line(f"{name} = array({value})")
    for name, (row, _) in zip(names, moves, strict=True):
        e.line(f"{row}[...] = {name}")


@op(r"mov.pred")
def move_predicate(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a copy of a predicate or constant."""
    e.line(f"{e.dst(ins.operands[0], 'pred')}[...] = {e.src(ins.operands[1], 'pred')}")


@runtime
def extended(value: np.ndarray, count: np.ndarray, wraps: bool, unsigned: bool) -> np.ndarray:
    """Return the low bits of words, extended by zeros or by their sign; 0 for no bits. wraps: their number counts modulo 32."""
    drop = np.uint32(32) - (count & np.uint32(31) if wraps else np.minimum(count, np.uint32(32)))
    moved = (value.astype(np.uint64) << drop.astype(np.uint64)).astype(np.uint32)
    if unsigned:
        result = moved.astype(np.uint64) >> drop.astype(np.uint64)
    else:
        result = moved.view(np.int32).astype(np.int64) >> drop.astype(np.int64)
    extended_bits: np.ndarray = result.astype(np.uint32)
    return extended_bits

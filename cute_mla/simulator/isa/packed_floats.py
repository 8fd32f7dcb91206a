"""Arithmetic on pairs of f32 and on f32 with 16-bit operands, both of Blackwell, and comparisons of pairs of 16-bit floats."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, reduce

import numpy as np

from ..frontend.ptx import Instruction, Reg
from ..numerics import elementwise
from .emitter import Emitter, pair_items
from .floats import subtract_f32
from .table import op, runtime, statements

Match = re.Match[str]
Function = Callable[..., np.ndarray]

_ROUNDED: dict[str, Function] = {
    "add": elementwise.add_f32, "sub": subtract_f32, "mul": elementwise.mul_f32, "fma": elementwise.fma_f32,
}  # fmt: skip


@cache
def arithmetic(name: str, rounding: str, ftz: bool) -> Function:
    """Return the function of f32 arrays for an operation, its rounding and flushing."""
    rounded = _ROUNDED[name]

    def plain(*operands: np.ndarray) -> np.ndarray:
        return rounded(*operands, rounding)

    def flushing(*operands: np.ndarray) -> np.ndarray:
        return elementwise.flush_f32(rounded(*(elementwise.flush_f32(operand) for operand in operands), rounding))

    return flushing if ftz else plain


@op(
    r"(?P<f>add|sub|mul)(.(?P<r>rn|rz|rm|rp))?(?P<z>.ftz)?.f32x2", r"(?P<f>fma).(?P<r>rn|rz|rm|rp)(?P<z>.ftz)?.f32x2",
    taint="own", halves=True, batch=True,
)  # fmt: skip
def pairs(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit an operation on both f32 of 64-bit registers, each of which has a poison of its own."""
    result = ins.operands[0]
    if e.tainted and isinstance(result, Reg):
        marks = [e.half_taints(operand) for operand in ins.operands[1:] if isinstance(operand, Reg)]
        low, high = (
            reduce(lambda one, other: f"logical_or({one}, {other})", half) for half in zip(("False", "False"), *marks, strict=True)
        )
        e.taint_halves(result, low, high)
    function = arithmetic(m["f"], m["r"] or "rn", bool(m["z"]))
    sources = ", ".join(e.src(operand, "b64") for operand in ins.operands[1:])
    e.line(f"{e.dst(ins.operands[0], 'b64')}[...] = on_pairs({e.constants.thing(function)}, {sources})")


@runtime
def on_pairs(function: Function, *words: np.ndarray) -> np.ndarray:
    """Apply a function of f32 arrays to both halves of 64-bit words."""
    shape = words[0].shape
    if not shape or any(word.shape != shape for word in words):
        shape = np.broadcast_shapes((1,), *(word.shape for word in words))
        words = tuple(np.broadcast_to(word, shape) for word in words)
    parts = [np.ascontiguousarray(word).view(np.float32) for word in words]
    return function(*parts).view(np.uint64)


# Sums and products of 16-bit floats with an f32, rounded once to f32.
statements(
    (
        (r"add(.rn)?.f32.(?P<s>f16|bf16)", "add(half_to_f32({a}, {s!r}), {b}, {out})", "f32", "b16", "f32"),
        (r"sub(.rn)?.f32.(?P<s>f16|bf16)", "subtract(half_to_f32({a}, {s!r}), {b}, {out})", "f32", "b16", "f32"),
        (
            r"fma.rn.f32.(?P<s>f16|bf16)",
            "{out}[...] = fma_f32(half_to_f32({a}, {s!r}), half_to_f32({b}, {s!r}), {c}, 'rn')",
            "f32", "b16", "b16", "f32",
        ),
    ),
    batch=True,
)  # fmt: skip


# Comparisons by the one that they negate. Ordered ones are false where an operand is NaN.
_OPPOSITES = {"neu": "eq", "equ": "ne", "geu": "lt", "gtu": "le", "leu": "gt", "ltu": "ge", "nan": "num"}
_ORDERED: dict[str, Function] = {
    "eq": np.equal, "ne": lambda a, b: np.less(a, b) | np.greater(a, b), "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}  # fmt: skip
_COMPARED = rf"(?P<c>{'|'.join([*_ORDERED, *_OPPOSITES])})(.(?P<b>and|or|xor))?"
ONES = {"f16": 0x3C00, "bf16": 0x3F80}


@op(rf"set.{_COMPARED}(?P<z>.ftz)?.(?P<d>f16x2|u32|s32).(?P<t>f16)x2", rf"set.{_COMPARED}(?P<z>).(?P<d>bf16x2|u32|s32).(?P<t>bf16)x2")
def set_halves(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a comparison of both halves: 1.0 or 0.0 in each, or all bits of a half."""
    bits = ONES[m["t"]] if m["d"].endswith("x2") else 0xFFFF
    e.line(f"{e.dst(ins.operands[0], 'b32')}[...] = words_of({_compared(e, ins, m)}, {bits})")


@op(rf"setp.{_COMPARED}(?P<z>.ftz)?.(?P<t>f16)x2", rf"setp.{_COMPARED}(?P<z>).(?P<t>bf16)x2")
def compare_both(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a comparison of the lower halves and of the upper ones."""
    value = e.temp()
    e.line(f"{value} = {_compared(e, ins, m)}")
    for index, register in enumerate(pair_items(ins.operands[0])):
        if register is not None:
            e.line(f"{e.dst(register, 'pred')}[...] = {value}[..., {index}]")


def _compared(e: Emitter, ins: Instruction, m: Match) -> str:
    a, b = (e.src(operand, "b32") for operand in ins.operands[1:3])
    other = e.src(ins.operands[3], "pred") if m["b"] else "None"
    return f"compare_halves({a}, {b}, {m['c']!r}, {m['t']!r}, {bool(m['z'])}, {m['b'] or ''!r}, {other})"


@runtime
def compare_halves(a: np.ndarray, b: np.ndarray, name: str, kind: str, ftz: bool, combine: str, other: np.ndarray | None) -> np.ndarray:
    """Return a comparison of the lower and the upper halves of words, shape (.., 2), combined with a predicate of the lane."""
    shape = np.broadcast_shapes((1,), a.shape, b.shape)
    words = (np.ascontiguousarray(np.broadcast_to(word, shape)).view(np.uint16) for word in (a, b))
    left, right = (elementwise.half_to_f32(word, kind) for word in words)
    if ftz:
        left, right = (np.where(np.abs(value) < 2.0**-14, np.float32(0), value) for value in (left, right))
    found = _ORDERED[_OPPOSITES.get(name, name)](left, right) ^ (name in _OPPOSITES)
    result: np.ndarray = found.reshape(*shape, 2)
    if other is None:
        return result
    function = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[combine]
    result = function(result, np.atleast_1d(other)[..., None])
    return result


@runtime
def words_of(found: np.ndarray, bits: int) -> np.ndarray:
    """Return words with these bits in the halves where a comparison holds."""
    halves: np.ndarray = np.where(found, np.uint16(bits), np.uint16(0))
    return np.ascontiguousarray(halves).view(np.uint32)[..., 0]

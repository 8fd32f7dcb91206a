"""Floating-point arithmetic and comparison. Roundings and special values are those of `numeric`."""

from __future__ import annotations

import re
from functools import partial

import numpy as np

from ..frontend.ptx import Instruction
from ..numerics import elementwise
from .arithmetic import COMPARE, combine_comparison
from .emitter import Emitter, Unsupported
from .table import op, runtime

Match = re.Match[str]

FUNCTIONS = {"add": "add", "sub": "subtract", "mul": "multiply"}
runtime(elementwise.flush_f32)
runtime(elementwise.fma_f32)


def flushed(ftz: str | None, *sources: str) -> list[str]:
    """Return the sources, with subnormals flushed under .ftz."""
    return [f"flush_f32({source})" if ftz else source for source in sources]


def finish(e: Emitter, ins: Instruction, value: str, ftz: str | None) -> None:
    """Store an f32, flushed under .ftz."""
    e.line(f"{e.dst(ins.operands[0], 'f32')}[...] = {flushed(ftz, value)[0]}")


@runtime
def subtract_f32(a: np.ndarray, b: np.ndarray, rounding: str) -> np.ndarray:
    """Return a - b in f32, rounded once."""
    return elementwise.add_f32(a, np.negative(b), rounding)


def binary(e: Emitter, ins: Instruction, function: str, kind: str) -> None:
    """Emit d = function(a, b), in place."""
    d, a, b = ins.operands
    left, right = e.src(a, kind), e.src(b, kind)
    e.line(f"{function}({left}, {right}, {e.dst(d, kind)})")


@op(r"(?P<f>add|sub|mul)(.(?P<r>rn|rz|rm|rp))?(?P<z>.ftz)?.f32")
def basic32(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit an f32 addition, subtraction or multiplication."""
    if m["r"] in (None, "rn") and not m["z"]:
        binary(e, ins, FUNCTIONS[m["f"]], "f32")
        return
    a, b = flushed(m["z"], e.src(ins.operands[1], "f32"), e.src(ins.operands[2], "f32"))
    if m["r"] in (None, "rn"):
        value = f"{FUNCTIONS[m['f']]}({a}, {b})"
    else:
        function = {"add": elementwise.add_f32, "sub": subtract_f32, "mul": elementwise.mul_f32}[m["f"]]
        value = f"{e.constants.thing(function)}({a}, {b}, {m['r']!r})"
    finish(e, ins, value, m["z"])


@op(r"fma.(?P<r>rn|rz|rm|rp)(?P<z>.ftz)?.f32", batch=True)
def fma32(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a * b + c with one rounding."""
    a, b, c = flushed(m["z"], *(e.src(operand, "f32") for operand in ins.operands[1:4]))
    finish(e, ins, f"fma_f32({a}, {b}, {c}, {m['r']!r})", m["z"])


@op(r"(?P<f>min|max)(?P<z>.ftz)?(?P<n>.NaN)?.f32", batch=True)
def min_max32(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit the minimum or maximum of two or three values; without .NaN a NaN operand loses."""
    if len(ins.operands) not in (3, 4):
        raise Unsupported(f"min/max of {len(ins.operands) - 1} values")
    value, *others = flushed(m["z"], *(e.src(operand, "f32") for operand in ins.operands[1:]))
    function = e.constants.thing(elementwise.min_f32 if m["f"] == "min" else elementwise.max_f32)
    for other in others:
        value = f"{function}({value}, {other}, {bool(m['n'])})"
    e.line(f"{e.dst(ins.operands[0], 'f32')}[...] = {value}")


@op(r"(?P<f>neg|abs)(?P<z>.ftz)?.f32")
def sign(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a sign change."""
    function = "negative" if m["f"] == "neg" else "absolute"
    finish(e, ins, f"{function}({e.src(ins.operands[1], 'f32')})", m["z"])


@op(r"copysign.f32")
def copy_sign(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit the magnitude of b with the sign of a."""
    a, b = e.src(ins.operands[1], "f32"), e.src(ins.operands[2], "f32")
    e.line(f"{e.constants.thing(np.copysign)}({b}, {a}, {e.dst(ins.operands[0], 'f32')})")


@op(r"div.(rn|full|approx)(?P<z>.ftz)?.f32", batch=True)
def divide32(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a division, rounded correctly in all forms."""
    a, b = e.src(ins.operands[1], "f32"), e.src(ins.operands[2], "f32")
    e.line(f"{e.dst(ins.operands[0], 'f32')}[...] = {e.constants.thing(elementwise.div_f32)}({a}, {b}, {bool(m['z'])})")


APPROXIMATIONS = {
    "ex2": elementwise.ex2_f32, "lg2": elementwise.lg2_f32, "rcp": elementwise.rcp_f32, "sqrt": elementwise.sqrt_f32,
    "rsqrt": elementwise.rsqrt_f32, "tanh": elementwise.tanh_f32,
}  # fmt: skip


@op(
    r"(?P<f>ex2|lg2|rsqrt).approx(?P<z>.ftz)?.f32", r"(?P<f>tanh).approx(?P<z>).f32", r"(?P<f>rcp|sqrt).(approx|rn)(?P<z>.ftz)?.f32",
    batch=True,
)  # fmt: skip
def special_function(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a transcendental function or a reciprocal, more exact than the hardware's."""
    function = e.constants.thing(APPROXIMATIONS[m["f"]])
    e.line(f"{e.dst(ins.operands[0], 'f32')}[...] = {function}({e.src(ins.operands[1], 'f32')}, {bool(m['z'])})")


# ---------------------------------------------------------------- 16-bit


@op(
    r"(?P<f>add|sub|mul)(.rn)?.(?P<t>bf16x2|f16x2|bf16|f16)",
    r"(?P<f>min|max)(?P<n>.NaN)?.(?P<t>bf16x2|f16x2|bf16|f16)",
    r"(?P<f>fma).rn.(?P<t>bf16x2|f16x2|bf16|f16)",
    batch=True,
)
def half(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit arithmetic on 16-bit floats, single or packed in pairs, rounded once."""
    kind = "b32" if m["t"].endswith("x2") else "b16"
    function = elementwise.half_arithmetic(m["f"], m["t"].removesuffix("x2"), nan=bool(m.groupdict().get("n")))
    sources = ", ".join(e.src(operand, kind) for operand in ins.operands[1:])
    e.line(f"{e.dst(ins.operands[0], kind)}[...] = on_halves({e.constants.thing(function)}, {sources})")


@runtime
def on_halves(function: partial[np.ndarray], *words: np.ndarray) -> np.ndarray:
    """Apply a function of 16-bit patterns to words of 16 or 32 bits."""
    shape = np.broadcast_shapes((1,), *(word.shape for word in words))
    parts = [np.ascontiguousarray(np.broadcast_to(word, shape)).view(np.uint16) for word in words]
    return function(*parts).astype(np.uint16, copy=False).view(words[0].dtype)


@op(r"(?P<f>neg|abs).(?P<t>bf16x2|f16x2|bf16|f16)")
def half_sign(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a sign change of 16-bit floats."""
    kind = "b32" if m["t"].endswith("x2") else "b16"
    mask = 0x80008000 if kind == "b32" else 0x8000
    constant = e.constants.array(np.dtype("u4" if kind == "b32" else "u2"), ~mask if m["f"] == "abs" else mask)
    function = "bitwise_and" if m["f"] == "abs" else "bitwise_xor"
    e.line(f"{function}({e.src(ins.operands[1], kind)}, {constant}, {e.dst(ins.operands[0], kind)})")


# ---------------------------------------------------------------- comparison

_UNORDERED = {"equ": "not_equal_ordered", "ltu": "greater_equal", "leu": "greater", "gtu": "less_equal", "geu": "less"}


@op(r"setp.(?P<c>eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan)(.(?P<b>and|or|xor))?(?P<z>.ftz)?.f32", batch=True)
def compare_float(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a comparison. With a NaN operand, ordered comparisons are false and unordered ones true."""
    a, b = flushed(m["z"], e.src(ins.operands[1], "f32"), e.src(ins.operands[2], "f32"))
    name = m["c"]
    if name in ("num", "nan"):
        expression = f"logical_or(isnan({a}), isnan({b}))"
        expression = f"logical_not({expression})" if name == "num" else expression
    elif name in _UNORDERED:
        expression = f"logical_not({_UNORDERED[name]}({a}, {b}))"
    elif name == "ne":
        expression = f"not_equal_ordered({a}, {b})"
    else:
        expression = f"{COMPARE['ne' if name == 'neu' else name]}({a}, {b})"
    combine_comparison(e, ins, expression, m["b"])


@runtime
def not_equal_ordered(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a < b or a > b: false where an operand is NaN."""
    return np.logical_or(np.less(a, b), np.greater(a, b))

"""Blackwell's arithmetic on pairs of f32, and on f32 with 16-bit operands."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import numpy as np

from ..frontend.ptx import Instruction
from ..numerics import elementwise
from .emitter import Emitter
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


@op(r"(?P<f>add|sub|mul)(.(?P<r>rn|rz|rm|rp))?(?P<z>.ftz)?.f32x2", r"(?P<f>fma).(?P<r>rn|rz|rm|rp)(?P<z>.ftz)?.f32x2", batch=True)
def pairs(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit an operation on both f32 of 64-bit registers."""
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

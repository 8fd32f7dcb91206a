"""cvt: between integers, f32 and the narrow floats; cvta: between address spaces."""

from __future__ import annotations

import re

import numpy as np

from ..frontend.layout import PARAM_WINDOW, SHARED_WINDOW, WINDOW_MASK
from ..frontend.ptx import Instruction, Reg, Symbol
from ..numerics import elementwise
from .emitter import KINDS, Emitter, Unsupported
from .table import op, runtime, statements

Match = re.Match[str]

for _function in (
    elementwise.f32_to_bf16x2,
    elementwise.f32_to_f16x2,
    elementwise.f32_to_fp8x2,
    elementwise.fp8x2_to_f16x2,
    elementwise.f16x2_to_fp8x2,
    elementwise.fp8x2_to_bf16x2,
    elementwise.bf16x2_to_fp8x2,
    elementwise.e2m1x2_to_halves,
    elementwise.finite_halves,
    elementwise.ue8m0x2_to_bf16x2,
    elementwise.f32_to_ue8m0x2,
    elementwise.scaled_s2f6x2_to_bf16x2,
    elementwise.integer_to_f16,
    elementwise.f32_to_half,
    elementwise.half_to_f32,
    elementwise.float_to_integer,
    elementwise.integer_to_f32,
    elementwise.round_to_integral,
):
    runtime(_function)


@op(r"cvt.(?P<d>[us](8|16|32|64)).(?P<s>[us](8|16|32|64))")
def integer_to_integer(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a truncation, or a zero or sign extension."""
    store_integer(e, ins, m["d"], integer_source(e, ins, m["s"]))


def integer_source(e: Emitter, ins: Instruction, kind: str) -> str:
    """Return the source operand as an array of an integer type of 8 to 64 bits."""
    if kind.endswith("8"):
        dtype = e.constants.thing(np.dtype("i1" if kind[0] == "s" else "u1"))
        operand = ins.operands[1]
        wide = {"h": "u16", "r": "u32", "d": "u64"}[operand.bank] if isinstance(operand, Reg) else "u32"
        return f"{e.src(operand, wide)}.astype({dtype})"
    return e.src(ins.operands[1], kind)


def store_integer(e: Emitter, ins: Instruction, kind: str, value: str) -> None:
    """Store an integer array of any type as kind (8-bit results are extended to the register)."""
    size = int(kind[1:])
    dtype = e.constants.thing(np.dtype(f"{'i' if kind[0] == 's' else 'u'}{size // 8}"))
    register = ins.operands[0]
    if not isinstance(register, Reg):
        raise Unsupported(f"cvt destination {register}")
    width = {"h": 16, "r": 32, "d": 64}[register.bank]
    if width < size:
        raise Unsupported(f"cvt of {size} bits into a register of {width}")
    e.line(f"{e.dst(register, kind[0] + str(width))}[...] = ({value}).astype({dtype})")


@op(r"cvt.rn.f32.(?P<s>[us](8|16|32|64))", batch=True)
def integer_to_float(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a conversion of integers to f32, to nearest."""
    e.line(f"{e.dst(ins.operands[0], 'f32')}[...] = integer_to_f32({integer_source(e, ins, m['s'])})")


@op(r"cvt.(?P<r>rni|rzi|rmi|rpi)(?P<z>.ftz)?.(?P<d>[us](32|64)).f32", batch=True)
def float_to_integer(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a saturating conversion of f32 to integers."""
    dtype = e.constants.thing(np.dtype(f"{'i' if m['d'][0] == 's' else 'u'}{int(m['d'][1:]) // 8}"))
    store_integer(e, ins, m["d"], f"float_to_integer({flushed_source(e, ins, m)}, {dtype}, {m['r']!r})")


@op(r"cvt.(?P<r>rni|rzi|rmi|rpi)(?P<z>.ftz)?.f32.f32")
def float_to_integral(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a rounding to integral floats."""
    e.line(f"{e.dst(ins.operands[0], 'f32')}[...] = round_to_integral({flushed_source(e, ins, m)}, {m['r']!r})")


def flushed_source(e: Emitter, ins: Instruction, m: Match) -> str:
    """Return the f32 source, flushed under .ftz."""
    source = e.src(ins.operands[1], "f32")
    return f"flush_f32({source})" if m["z"] else source


# Of two sources the first one is the upper half of the result. Widening is exact, so that .satfinite changes nothing.
statements(
    (
        (r"cvt.rn.f16.s16", "{out}[...] = integer_to_f16({a})", "b16", "s16"),
        (r"cvt.(?P<r>rn|rz).(?P<d>f16|bf16).f32", "{out}[...] = f32_to_half({a}, {d!r}, {r!r})", "b16", "f32"),
        (r"cvt.f32.(?P<s>f16|bf16)", "{out}[...] = half_to_f32({a}, {s!r})", "f32", "b16"),
        (r"cvt.(?P<r>rn|rz).(?P<d>f16x2|bf16x2).f32", "{out}[...] = f32_to_{d}({a}, {b}, {r!r})", "b32", "f32", "f32"),
        (r"cvt.rn.satfinite.(?P<d>f16|bf16)x2.f32", "{out}[...] = finite_halves(f32_to_{d}x2({a}, {b}), {d!r})", "b32", "f32", "f32"),
        (r"cvt.rn.satfinite.(?P<d>e4m3|e5m2)x2.f32", "{out}[...] = f32_to_fp8x2({a}, {b}, {d!r})", "b16", "f32", "f32"),
        (r"cvt.rn.satfinite.(?P<d>e4m3|e5m2)x2.(?P<s>f16x2)", "{out}[...] = {s}_to_fp8x2({a}, {d!r})", "b16", "b32"),
        (r"cvt.rn.satfinite.(?P<d>e4m3)x2.(?P<s>bf16x2)", "{out}[...] = {s}_to_fp8x2({a}, {d!r})", "b16", "b32"),
        (r"cvt.rn.(?P<d>f16x2).(?P<s>e4m3|e5m2)x2", "{out}[...] = fp8x2_to_{d}({a}, {s!r})", "b32", "b16"),
        (r"cvt.rn(.satfinite)?.(?P<d>bf16x2).(?P<s>e4m3)x2", "{out}[...] = fp8x2_to_{d}({a}, {s!r})", "b32", "b16"),
        (r"cvt.rn.bf16x2.ue8m0x2", "{out}[...] = ue8m0x2_to_bf16x2({a})", "b32", "b16"),
        (r"cvt.rn.satfinite.scaled::n2::ue8m0.bf16x2.s2f6x2", "{out}[...] = scaled_s2f6x2_to_bf16x2({a}, {b})", "b32", "b16", "b16"),
    ),
    batch=True,
)


@op(r"cvt.(?P<r>rz|rp)(?P<f>.satfinite)?.ue8m0x2.f32", batch=True)
def narrow_scales(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a conversion of two f32 to a pair of powers of two; the first source is the upper one."""
    upper, lower = e.src(ins.operands[1], "f32"), e.src(ins.operands[2], "f32")
    e.line(f"{e.dst(ins.operands[0], 'b16')}[...] = f32_to_ue8m0x2({upper}, {lower}, {m['r']!r}, {bool(m['f'])})")


@op(r"cvta(?P<to>.to)?.(?P<space>global|shared|shared::cta|shared::cluster|param).(?P<t>u64)")
def convert_address(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a conversion between generic and specific addresses."""
    space = m["space"].split("::")[0]
    operand = ins.operands[1]
    source = e.address(operand, 64) if isinstance(operand, Symbol) else e.src(operand, "u64")
    destination = e.dst(ins.operands[0], "u64")
    if space == "global":
        e.line(f"{destination}[...] = {source}")
        return
    window = SHARED_WINDOW if space == "shared" else PARAM_WINDOW
    constant = e.constants.array(KINDS["u64"][2], WINDOW_MASK if m["to"] else window)
    e.line(f"{'bitwise_and' if m['to'] else 'bitwise_or'}({source}, {constant}, {destination})")

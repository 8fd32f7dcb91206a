"""mma.sync: matrix products of a warp in registers."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from ..findings import Fault
from ..frontend.ptx import Imm, Instruction, Operand, Reg, Vec
from ..numerics import warp_products
from ..state.registers import WARP
from ..state.window import Window
from .emitter import Emitter, Unsupported
from .table import op, runtime

Match = re.Match[str]

COUNTS = (4, 4, 2, 4)  # registers of D, A, B and C
_FIRST_PLACE = Vec((Imm(0), Imm(0)))  # of scales: byte and lanes


@op(
    r"mma.sync.aligned.m16n8k16.row.col.f32.(?P<t>f16|bf16).(?P=t).f32",
    r"mma.sync.aligned.m16n8k32.row.col.f32.(?P<t>e4m3).(?P=t).f32",
    needs="warp", taint="own", pure=False,
)  # fmt: skip
def multiply(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit D = A B + C of 16 x 8 x 16, or x 32 of 8 bits."""
    runs = [registers_of(operand, count) for operand, count in zip(ins.operands, COUNTS, strict=True)]
    sources = [[e.src(item, kind) for item in run] for run, kind in zip(runs[1:], ("b32", "b32", "f32"), strict=True)]
    emit_product(e, sources, [e.dst(item, "f32") for item in runs[0]], m["t"])
    if e.tainted:
        emit_poison(e, [[e.taint(item) for item in run] for run in runs])


@op(
    r"mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.(?P<t>e4m3).(?P=t).f32.ue8m0",
    needs="warp", taint="own", pure=False,
)  # fmt: skip
def multiply_scaled(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit D = A B + C of 16 x 8 x 32, of rows and columns with scales in byte 0 of the first lanes of a quad."""
    *operands, row_scale, row_place, column_scale, column_place = ins.operands
    if any(place != _FIRST_PLACE for place in (row_place, column_place)):
        raise Unsupported(f"scales at {row_place}, {column_place}; supported: {{0, 0}}")
    runs = [registers_of(operand, count) for operand, count in zip(operands, COUNTS, strict=True)]
    sources = [[e.src(item, kind) for item in run] for run, kind in zip(runs[1:], ("b32", "b32", "f32"), strict=True)]
    scales = [e.src(operand, "b32") for operand in (row_scale, column_scale)]
    emit_product(e, sources, [e.dst(item, "f32") for item in runs[0]], m["t"], scales)
    if e.tainted:
        emit_poison(e, [[e.taint(item) for item in run] for run in runs], [e.taint(operand) for operand in (row_scale, column_scale)])


def registers_of(operand: Operand | None, count: int) -> Sequence[Reg]:
    """Return the registers of a vector."""
    items = [item for item in operand.items if isinstance(item, Reg)] if isinstance(operand, Vec) else []
    if len(items) != count:
        raise Unsupported(f"{count} registers expected")
    return items


def emit_product(e: Emitter, sources: Sequence[Sequence[str]], results: Sequence[str], kind: str, scales: Sequence[str] = ()) -> None:
    """Emit the product of registers. sources: of A, B and C."""
    value = e.temp()
    e.line(f"{value} = multiply_warp(w, {listed([*sources, scales])}, {kind!r})")
    for index, result in enumerate(results):
        e.line(f"{result}[...] = {value}[{index}]")


def listed(runs: Sequence[Sequence[str | None]]) -> str:
    """Return lists of expressions as arguments."""
    return ", ".join(f"[{', '.join(map(str, run))}]" for run in runs)


def emit_poison(e: Emitter, marks: Sequence[Sequence[str | None]], scales: Sequence[str | None] = ()) -> None:
    """Emit the poison of the sums. marks: poison of the registers of D, A, B and C. scales: of theirs."""
    value = e.temp()
    e.line(f"{value} = poison_of_product(w, {listed([*marks[1:], scales])})")
    for index, mark in enumerate(marks[0]):
        e.line(f"{mark}[...] = {value}[{index}]")


def by_warp(w: Window, values: Sequence[np.ndarray | None]) -> list[np.ndarray]:
    """Return rows of lanes as (warps, 32). None: nothing is poisoned."""
    return [np.broadcast_to(False if value is None else value, (w.n,)).reshape(-1, WARP) for value in values]


@runtime
def multiply_warp(
    w: Window, left: list[np.ndarray], right: list[np.ndarray], addend: list[np.ndarray], scales: list[np.ndarray], kind: str
) -> list[np.ndarray]:
    """Execute mma.sync.m16n8k16 or m16n8k32."""
    if not w.whole:
        raise Fault("divergence", "a product of a warp needs all 32 lanes of its warps")
    sums = warp_products.multiply(by_warp(w, left), by_warp(w, right), by_warp(w, addend), kind, tuple(by_warp(w, scales)))
    return [part.reshape(-1) for part in sums]


@runtime
def poison_of_product(
    w: Window,
    left: list[np.ndarray | None],
    right: list[np.ndarray | None],
    addend: list[np.ndarray | None],
    scales: list[np.ndarray | None],
) -> list[np.ndarray]:
    """Return the poison of the sums."""
    found = warp_products.poison(by_warp(w, left), by_warp(w, right), by_warp(w, addend), tuple(by_warp(w, scales)))
    return [part.reshape(-1) for part in found]

"""Instruction table: the spelling of each instruction, the operands it writes, and the emitter of its code.

A spelling is a regular expression over the whole opcode with all its modifiers, so any other spelling is
refused at load. Nothing is ignored silently: a no-op is an entry with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ..frontend.ptx import Instruction, Mem, Negated, Operand, Pair, Reg, Vec
from .emitter import Emitter, statement

Emit = Callable[["Emitter", Instruction, re.Match[str]], None]

NAMESPACE: dict[str, Any] = {}  # functions that generated code can call by name
_TABLE: dict[str, list[Spec]] = {}


@dataclass(frozen=True)
class Spec:
    """One entry of the table.

    writes: indices of the operands that are destinations. taint: "or" (outputs are poisoned where any input is) or "own"
    (the emitter does it). needs: "warp" or "warpgroup" when all live threads of those must be there together.
    pure: has no effect but its destinations, so a guard can select results. starts, ends: begins or closes a block.
    loads: may bring poison into its destinations. reason: why a no-op is one. control: "bra", "exit" or "". halves: its own rule of poison
    tells the halves of 64-bit registers apart.
    """

    pattern: re.Pattern[str]
    emit: Emit | None
    writes: tuple[int, ...] = (0,)
    taint: str = "or"
    needs: str = ""
    pure: bool = True
    starts: bool = False
    ends: bool = False
    loads: bool = False
    reason: str = ""
    control: str = ""
    batch: bool = False  # element-wise and costly: worth doing for several registers at once
    halves: bool = False
    asynchronous: bool = False  # destinations are an accumulator that is read later (wgmma)


def op(*patterns: str, **options: Any) -> Callable[[Emit], Emit]:
    """Register an emitter for opcode patterns (dots may be written plainly)."""

    def register(emit: Emit) -> Emit:
        for pattern in patterns:
            _add(pattern, emit, options)
        return emit

    return register


def statements(rows: Iterable[tuple[str, ...]], **options: Any) -> None:
    """Register instructions of one line each: rows of an opcode pattern, and the line and the types that `statement` takes."""
    for pattern, line, *kinds in rows:
        op(pattern, **options)(statement(line, *kinds))


def ignored(pattern: str, reason: str, **options: Any) -> None:
    """Register an instruction that has no effect here, with the reason."""
    _add(pattern, None, {"writes": (), "pure": False, "reason": reason, **options})


def _add(pattern: str, emit: Emit | None, options: dict[str, Any]) -> None:
    compiled = re.compile(re.sub(r"(?<!\\)\.", r"\\.", pattern))
    head = re.match(r"(?:\((?:\?P<\w+>)?)?(\w+(?:\|\w+)*)", pattern)
    assert head is not None
    spec = Spec(compiled, emit, **options)
    for name in head.group(1).split("|"):
        _TABLE.setdefault(name, []).append(spec)


def runtime(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a helper callable from generated code under its own name."""
    NAMESPACE[function.__name__] = function
    return function


@dataclass(frozen=True)
class Decoded:
    """An instruction with its table entry and the registers it touches.

    Implicit reads (an address, a guard) count as reads. accumulators: registers of an asynchronous destination.
    """

    instruction: Instruction
    spec: Spec
    match: re.Match[str]
    reads: tuple[Reg, ...]
    writes: tuple[Reg, ...]
    accumulators: tuple[Reg, ...] = field(default=())


@cache
def lookup(opcode: str) -> tuple[Spec, re.Match[str]] | None:
    """Return the table entry of a spelling, with its match; None when there is none."""
    for spec in _TABLE.get(opcode.split(".", 1)[0], ()):
        match = spec.pattern.fullmatch(opcode)
        if match is not None:
            return spec, match
    return None


def decode(instruction: Instruction) -> Decoded | None:
    """Return the table entry of an instruction; None when there is none."""
    found = lookup(instruction.opcode)
    if found is None:
        return None
    spec, match = found
    reads: list[Reg] = []
    writes: list[Reg] = []
    for index, operand in enumerate(instruction.operands):
        registers = writes if index in spec.writes else reads
        if operand.__class__ is Reg:
            registers.append(operand)  # type: ignore[arg-type]
        else:
            registers.extend(registers_of(operand))
    if instruction.guard is not None:
        reads.append(instruction.guard[0])
    accumulators = tuple(writes) if spec.asynchronous else ()
    return Decoded(instruction, spec, match, tuple(reads), () if spec.asynchronous else tuple(writes), accumulators)


def registers_of(operand: Operand | None) -> list[Reg]:
    """Return all registers in an operand."""
    if isinstance(operand, Reg):
        return [operand]
    if isinstance(operand, Negated):
        return [operand.reg]
    if isinstance(operand, Pair):
        return [register for register in (operand.first, operand.second) if register is not None]
    if isinstance(operand, Vec):
        return [register for item in operand.items for register in registers_of(item)]
    if isinstance(operand, Mem):
        inner = registers_of(operand.base) + registers_of(operand.coords)
        return inner + [register for item in operand.extra for register in registers_of(item)]
    return []


def all_specs() -> list[Spec]:
    """Return every entry of the table."""
    return [spec for specs in _TABLE.values() for spec in specs]

"""Instruction table of machine code: spellings and the emitters of their code. The emitted functions run in the same windows as PTX's."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ..codegen.batches import BatchReg, Mergeable
from ..frontend.ptx import Instruction, Reg
from ..isa.emitter import Emitter
from ..isa.table import Spec
from .listing import Constant, Immediate, Operand, Register, SassInstruction

Emit = Callable[[Emitter, SassInstruction], None]

_TABLE: list[Spec] = []


@dataclass
class MachineInstruction(Mergeable):
    """A machine instruction, or a part of one, as the translator takes it. sass: what it comes from."""

    sass: SassInstruction | None = None

    def form(self) -> tuple[object, ...] | None:
        """Return opcode and operands, of registers only the bank and the signs; None with operands in brackets and the like."""
        assert self.sass is not None
        key: list[object] = [self.opcode]
        for operand in self.sass.operands:
            if isinstance(operand, Register) and operand.number is not None:
                key.append((operand.is_predicate, operand.negative, operand.inverted, operand.absolute, operand.suffixes))
            elif isinstance(operand, Register | Immediate | Constant):
                key.append(operand)
            else:
                return None
        return tuple(key)

    def merge(self, items: list[Instruction]) -> Instruction:
        """Return one instruction whose registers stand for those of all items."""
        assert self.sass is not None
        rows = [item.sass.operands for item in items if isinstance(item, MachineInstruction) and item.sass is not None]
        operands = tuple(merged(column) for column in zip(*rows, strict=True))
        return replace(self, sass=replace(self.sass, operands=operands))


@dataclass(frozen=True)
class MergedRegister(Register):
    """One operand of several instructions."""

    members: tuple[Register, ...] = ()

    def registers(self, width: int = 1) -> tuple[Reg, ...]:
        """Return the registers of a run of this width, each for all members."""
        runs = [member.registers(width) for member in self.members]
        bank = "p" if self.is_predicate else "r"
        return tuple(
            BatchReg(f"{runs[0][0].name} and others, {index}", bank, places) for index, places in enumerate(zip(*runs, strict=True))
        )


def merged(operands: tuple[Operand, ...]) -> Operand:
    """Return operands of several instructions as one."""
    first = operands[0]
    if not isinstance(first, Register) or first.number is None:
        return first
    members = tuple(operand for operand in operands if isinstance(operand, Register))
    return MergedRegister(first.kind, first.number, first.negative, first.inverted, first.absolute, first.suffixes, members)


def op(*patterns: str, **options: Any) -> Callable[[Emit], Emit]:
    """Register an emitter for spellings: regular expressions over the whole opcode, dots written plainly. options: fields of Spec."""

    def register(emit: Emit) -> Emit:
        def adapted(e: Emitter, instruction: Instruction, match: re.Match[str]) -> None:
            assert isinstance(instruction, MachineInstruction)
            assert instruction.sass is not None
            emit(e, instruction.sass)

        for pattern in patterns:
            _add(pattern, adapted, options)
        return emit

    return register


def ignored(pattern: str, reason: str, **options: Any) -> None:
    """Register an instruction that has no effect here, with the reason."""
    _add(pattern, None, {"pure": False, "reason": reason, **options})


def _add(pattern: str, emit: Any, options: dict[str, Any]) -> None:
    compiled = re.compile(re.sub(r"(?<!\\)\.", r"\\.", pattern))
    _TABLE.append(Spec(compiled, emit, **options))


@cache
def lookup(opcode: str) -> tuple[Spec, re.Match[str]] | None:
    """Return the entry of a spelling, with its match; None when there is none."""
    for spec in _TABLE:
        match = spec.pattern.fullmatch(opcode)
        if match is not None:
            return spec, match
    return None


def spellings() -> list[str]:
    """Return the patterns of all entries."""
    return [spec.pattern.pattern for spec in _TABLE]

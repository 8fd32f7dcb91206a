"""Instruction table of machine code: spellings and the emitters of their code. The emitted functions run in the same windows as PTX's."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..frontend.ptx import Instruction
from ..isa.emitter import Emitter
from ..isa.table import Spec
from .listing import SassInstruction

Emit = Callable[[Emitter, SassInstruction], None]

_TABLE: list[Spec] = []


@dataclass
class MachineInstruction(Instruction):
    """A machine instruction, or a part of one, as the translator takes it. sass: what it comes from."""

    sass: SassInstruction | None = None


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

"""Translator: blocks to Python functions.

Each block becomes one function of a window, made on first use in two versions: plain, and tainted (which also moves poison).
A function returns the next program counter, EXIT, BLOCKED, or a Split when the lanes part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

import numpy as np

from ..frontend.layout import Layout
from ..frontend.ptx import Imm, Instruction, LabelRef, Reg, Symbol
from ..isa import NAMESPACE
from ..isa.emitter import DTYPES, UNSIGNED, Constants, Emitter
from ..isa.table import Decoded
from ..state.origin import LINES, PREFIX
from ..state.registers import BANK_DTYPES
from .batches import emit_batch, schedule
from .control_flow import Block, Flow

EXIT = -1
BLOCKED = -2
MAX_CODES = 2048  # compiled blocks that are cached, some 8 KB each

_NUMPY = (
    "add subtract multiply divide bitwise_and bitwise_or bitwise_xor logical_and logical_or logical_xor logical_not invert negative "
    "absolute minimum maximum fmin fmax left_shift right_shift equal not_equal less less_equal greater greater_equal isnan where empty "
    "zeros ones array float32 float64 longdouble copyto count_nonzero"
)


@dataclass(frozen=True)
class Split:
    """Outcome of a branch on which lanes differ: lanes with mask go to taken, the others to fallen."""

    taken: int
    fallen: int
    mask: np.ndarray


_BASE: dict[str, Any] = {name: getattr(np, name) for name in _NUMPY.split()}
_BASE.update({f"dtype_{name}": dtype for name, dtype in DTYPES.items()})
_BASE.update(Split=Split, EXIT=EXIT, BLOCKED=BLOCKED, bool=np.dtype(bool))


class Translator:
    """Compiler of the blocks of one entry."""

    def __init__(self, name: str, flow: Flow, layout: Layout) -> None:
        self.name = name
        self.flow = flow
        self.layout = layout
        self.scope: dict[str, Any] = {**_BASE, **NAMESPACE, LINES: {}}
        halving = (item for block in flow.blocks for item in block.instructions if item.spec.halves and _has_halves(item))
        self.halved = frozenset(register.name for item in halving for register in (*item.reads, *item.writes) if register.bank == "d")

    def compile(self, block: Block, tainted: bool) -> Callable[..., Any]:
        """Return the function of a block."""
        writer = BlockWriter(self, block, tainted)
        writer.write()
        filename = f"{PREFIX}{self.name} block {block.index}{' tainted' if tainted else ''}>"
        self.scope[LINES][filename] = writer.origins
        places = {NEXT: block.index + 1, TARGET: self.target(block)}
        functions: list[Callable[..., Any]] = []
        for code, values in zip(codes_of("\n".join(writer.lines)), writer.values, strict=True):
            defaults = tuple(self._bound(value, functions, places) for value in values)
            functions.append(FunctionType(code.replace(co_filename=filename), self.scope, code.co_name, defaults))
        return functions[-1]

    def target(self, block: Block) -> int | None:
        """Return the index of the block that the branch at the end of a block leads to, None without a branch."""
        last = block.instructions[-1]
        if last.spec.control != "bra":
            return None
        reference = last.instruction.operands[0]
        assert isinstance(reference, LabelRef)
        return self.flow.targets[reference.name]

    @staticmethod
    def _bound(value: Any, functions: list[Callable[..., Any]], places: dict[Place, int | None]) -> Any:
        """Return the value that a parameter stands for."""
        if value.__class__ is Guarded:
            return functions[value.index]
        return places[value] if value.__class__ is Place else value


@dataclass(frozen=True)
class Guarded:
    """Parameter that stands for a function written earlier, number index of its block."""

    index: int


@dataclass(frozen=True)
class Place:
    """Parameter that stands for the index of another block, so that the source of a block does not depend on where the others lie."""

    name: str


NEXT, TARGET = Place("next"), Place("target of the branch")


@lru_cache(MAX_CODES)
def codes_of(source: str) -> list[CodeType]:
    """Compile a text of functions without default values, and return their codes in order. Blocks with equal texts share a compilation."""
    return [constant for constant in compile(source, PREFIX, "exec", dont_inherit=True).co_consts if isinstance(constant, CodeType)]


class BlockWriter:
    """Writer of the source of one block."""

    def __init__(self, translator: Translator, block: Block, tainted: bool) -> None:
        self.translator = translator
        self.block = block
        self.tainted = tainted
        self.lines: list[str] = []
        self.origins: list[Instruction | None] = []
        self.values: list[list[Any]] = []

    def emitter(self, known: dict[str, int] | None = None) -> Emitter:
        """Return a fresh emitter for a function body."""
        e = Emitter(self.translator.layout, Constants(), self.tainted, known)
        e.halved = self.translator.halved
        return e

    def write(self) -> None:
        """Write the functions of the block, itself last."""
        e = self.emitter()
        positions = {id(item): position for position, item in enumerate(self.block.instructions)}
        steps = list(self.block.instructions) if self.tainted else schedule(self.block.instructions)
        for step in steps:
            if isinstance(step, list):
                e.position = positions[id(step[0])]
                emit_batch(e, step)
            else:
                e.position = positions[id(step)]
                self.instruction(e, step, e.position)
        last = self.block.instructions[-1]
        e.position = len(self.block.instructions) - 1
        if not last.spec.control:
            e.line(f"return {e.constants.number(NEXT)}")
        self.function("block", e)

    def function(self, name: str, e: Emitter) -> None:
        """Append a function from an emitter's lines."""
        header = e.header()
        self.put(f"def {name}(w, {', '.join(f'k{number}' for number in range(len(e.constants.values)))}):", None)
        self.values.append(e.constants.values)
        for line in header:
            self.put(f"    {line}", None)
        for line, position in e.lines:
            self.put(f"    {line}", self.block.instructions[position].instruction)
        if not e.lines:
            self.put("    pass", None)

    def put(self, line: str, instruction: Instruction | None) -> None:
        """Append one line of source."""
        self.lines.append(line)
        self.origins.append(instruction)

    def instruction(self, e: Emitter, item: Decoded, position: int) -> None:
        """Emit one instruction, with its guard."""
        for register in item.writes:
            e.parts.pop(register.name, None)
        if item.spec.control:
            self.control(e, item)
        elif item.spec.emit is None:
            return
        elif item.instruction.guard is None:
            emit_plain(e, item)
        elif item.spec.pure and item.writes:
            emit_selected(e, item)
        else:
            self.emit_subset(e, item, position)

    def control(self, e: Emitter, item: Decoded) -> None:
        """Emit the branch or exit that ends the block."""
        instruction = item.instruction
        if item.spec.control == "exit":
            e.line("return EXIT")
            return
        if instruction.guard is None or self.translator.target(self.block) == self.block.index + 1:
            e.line(f"return {e.constants.number(TARGET)}")
            return
        register, negated = instruction.guard
        e.check_taint([register], "a branch")
        row = e.row(register, "pred")
        first, second = e.constants.number(TARGET), e.constants.number(NEXT)
        yes, no = (second, first) if negated else (first, second)
        e.line(f"n = count_nonzero({row})")
        e.line(f"if n == w.n: return {yes}")
        e.line(f"if n == 0: return {no}")
        e.line(f"return Split({yes}, {no}, {row}.copy())")

    def emit_subset(self, e: Emitter, item: Decoded, position: int) -> None:
        """Emit a guarded instruction with effects: its own function, on the window of the lanes that execute it."""
        instruction = item.instruction
        assert instruction.guard is not None
        register, negated = instruction.guard
        inner = self.emitter(dict(e.known))
        inner.position = position
        emit_plain(inner, item)
        name = e.constants.number(Guarded(len(self.values)))
        self.function("guarded", inner)
        for written in item.writes:
            e.known.pop(written.name, None)
        e.check_taint([register], "whether an instruction executes")
        row = e.row(register, "pred")
        e.line(f"s = w.subset({f'~{row}' if negated else row})")
        e.line("if s is not None:")
        e.line(f"    {name}(s)")
        e.line("    if s.parent is not None: s.write_back()")


def emit_plain(e: Emitter, item: Decoded) -> None:
    """Emit an instruction without a guard, with its poison rule."""
    assert item.spec.emit is not None
    if item.spec.taint == "or":
        e.taint_from(item.writes, item.reads)
    item.spec.emit(e, item.instruction, item.match)
    if not item.spec.halves:
        e.join_halves(item.writes)


def _has_halves(item: Decoded) -> bool:
    """Return True for an instruction on halves of 64 bits: not for a plain move."""
    return not all(isinstance(operand, Reg | Imm | Symbol) for operand in item.instruction.operands) or "x2" in item.instruction.opcode


def emit_selected(e: Emitter, item: Decoded) -> None:
    """Emit a guarded instruction without effects: computed for all lanes, stored where the guard holds."""
    assert item.spec.emit is not None
    assert item.instruction.guard is not None
    guard, negated = item.instruction.guard
    condition = e.temp()
    row = e.row(guard, "pred")
    e.line(f"{condition} = {f'~{row}' if negated else f'{row}.copy()'}")
    if e.tainted:
        inputs = e.taint_of([register for register in item.reads if register is not guard]) or "False"
        for register in item.writes:
            mark = e.taint(register)
            e.line(f"{mark}[...] = logical_or(where({condition}, {inputs}, {mark}), {e.taint(guard)})")
        e.join_halves(item.writes)
    outputs: list[tuple[Reg, str]] = []
    for register in item.writes:
        temp = e.temp()
        e.line(f"{temp} = empty(w.n, {e.constants.thing(BANK_DTYPES[register.bank])})")
        e.redirect[register.name] = temp
        outputs.append((register, temp))
    was_tainted, e.tainted = e.tainted, False
    item.spec.emit(e, item.instruction, item.match)
    e.tainted = was_tainted
    e.redirect.clear()
    for register, temp in outputs:
        e.known.pop(register.name, None)
        e.line(f"copyto({e.row(register, UNSIGNED[register.bank])}, {temp}, where={condition})")

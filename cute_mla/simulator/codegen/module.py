"""Loaded PTX modules: entries with their parameters, ready to run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..findings import Finding, PtxError, UnsupportedInstruction
from ..frontend.layout import Layout, make_layout
from ..frontend.ptx import EntryText, Imm, Mem, Operand, ParamDecl, Reg, Special, Symbol, Vec, parse_ptx
from ..isa.emitter import Constants, Emitter, Unsupported
from ..isa.table import Decoded, decode
from ..state.cta import Cta
from .control_flow import Flow, accumulator_groups, build_flow, desugar
from .translator import Translator
from .wgmma_fences import missing_fences

# Errors of text that is grammatical and nevertheless no program: an operand of the wrong kind, a label without a block.
_MALFORMED = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(eq=False)
class Entry:
    """One kernel.

    undefined: names of registers that some path reads before writing them (they start poisoned). findings: what is wrong before
    anything runs. prepare: sets what shared memory a CTA finds set when it starts.
    """

    name: str
    params: tuple[ParamDecl, ...]
    reqntid: tuple[int, int, int] | None
    flow: Flow
    layout: Layout
    translator: Translator
    undefined: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    prepare: Callable[[Cta], None] | None = None


@dataclass
class Module:
    """All kernels of a PTX text."""

    entries: dict[str, Entry] = field(default_factory=dict)


def load_module(ptx: str) -> Module:
    """Parse PTX, check every instruction against the table, and analyse control flow.

    Raises PtxError for text that cannot be read and UnsupportedInstruction with the list of everything unknown.
    """
    module = Module()
    problems: dict[str, list[int]] = {}
    with collection_paused():
        for name, text in parse_ptx(ptx).items():
            try:
                entry = load_entry(text, problems)
            except _MALFORMED as error:
                raise PtxError(f"entry {name} cannot be analysed: {type(error).__name__} {error}") from error
            if entry is not None:
                module.entries[name] = entry
    if problems:
        lines = [f"{what} (PTX line{'s' if len(where) > 1 else ''} {', '.join(map(str, where[:5]))})" for what, where in problems.items()]
        raise UnsupportedInstruction("unsupported instructions:\n  " + "\n  ".join(lines))
    return module


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the garbage collector, which would go over a growing number of live objects again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def load_entry(text: EntryText, problems: dict[str, list[int]]) -> Entry | None:
    """Load one entry; None for an unsupported one. Unsupported instructions go to problems (description -> PTX lines)."""
    instructions, labels = desugar(text)
    decoded: list[Decoded] = []
    for instruction in instructions:
        item = decode(instruction)
        if item is None:
            problems.setdefault(instruction.opcode, []).append(instruction.line)
        else:
            decoded.append(item)
    layout = make_layout(text, accumulator_groups(instructions))
    check_operands(decoded, layout, problems)
    if problems:
        return None
    flow = build_flow(decoded, labels, layout)
    names = {(register.bank, layout.rows[name]): name for name, register in text.registers.items()}
    undefined = tuple(names[bank, row] for bank, rows in flow.undefined.items() for row in rows)
    translator = Translator(text.name, flow, layout)
    return Entry(text.name, text.params, text.reqntid, flow, layout, translator, undefined, missing_fences(flow.blocks))


def check_operands(decoded: list[Decoded], layout: Layout, problems: dict[str, list[int]]) -> None:
    """Try every distinct operand form at load; unsupported forms go to problems."""
    seen: set[tuple[object, ...]] = set()
    forms: dict[int, object] = {}  # by id of the operand, of which the parser makes one for each text
    for item in decoded:
        if item.spec.emit is None:
            continue
        operands = item.instruction.operands
        for operand in operands:
            if id(operand) not in forms:
                forms[id(operand)] = describe(operand)
        shape = (item.instruction.opcode, *[forms[id(operand)] for operand in operands])
        if shape in seen:
            continue
        seen.add(shape)
        try:
            item.spec.emit(Emitter(layout, Constants(), False), item.instruction, item.match)
        except Unsupported as error:
            problems.setdefault(f"{item.instruction.opcode}: {error}", []).append(item.instruction.line)
        except _MALFORMED as error:
            problems.setdefault(f"{item.instruction.opcode}: operands not understood ({error})", []).append(item.instruction.line)


def describe(operand: Operand | None) -> object:
    """Return the form of an operand, without its particular registers."""
    if isinstance(operand, Reg):
        return operand.bank
    if isinstance(operand, Vec):
        return tuple(describe(item) for item in operand.items)
    if isinstance(operand, Mem):
        return describe(operand.base), operand.offset != 0, describe(operand.coords)
    if isinstance(operand, Imm | Special | Symbol):
        return repr(operand)
    return type(operand).__name__

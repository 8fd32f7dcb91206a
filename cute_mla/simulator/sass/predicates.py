"""Logic of predicates in machine code, and comparisons combined with a predicate."""

from __future__ import annotations

import numpy as np

from ..isa.emitter import Emitter
from ..isa.table import runtime
from .listing import Immediate, Operand, Register, SassInstruction
from .operands import assign, is_dropped, poison_of, source
from .table import op


@op(r"U?PLOP3.LUT", taint="own")
def predicate_logic(e: Emitter, ins: SassInstruction) -> None:
    """Emit two functions of three predicates, one truth table for each result.

    A result is undefined where it depends on an undefined predicate: false and undefined is false.
    """
    first, second, a, b, c, table, other = ins.operands
    sources = [f"array({source(e, operand, 'pred')})" for operand in (a, b, c)]
    marks = ", ".join(f"array({poison_of(e, operand)})" for operand in (a, b, c)) if e.tainted else ""
    values, poisons = [], []
    for item in (table, other):
        assert isinstance(item, Immediate)
        values.append(f"predicate_table({', '.join(sources)}, {item.bits})")
        poisons.append(f"predicate_poison(({', '.join(sources)}), ({marks}), {item.bits})")
    assign_predicates(e, (first, second), values, poisons)


def assign_predicates(e: Emitter, results: tuple[Operand, Operand], values: list[str], poisons: list[str]) -> None:
    """Store two predicates and, in tainted code, their poison. All values are computed before any is stored."""
    kept = [index for index, result in enumerate(results) if not is_dropped((result,))]
    names = {index: (e.temp(), e.temp()) for index in kept}
    for index in kept:
        e.line(f"{names[index][0]} = {values[index]}")
        if e.tainted:
            e.line(f"{names[index][1]} = {poisons[index]}")
    for index in reversed(kept):
        result = results[index]
        assert isinstance(result, Register)
        for register in result.registers() if e.tainted else ():
            e.line(f"{e.taint(register)}[...] = {names[index][1]}")
        assign(e, result, "pred", names[index][0])


@op(r"QUICK", taint="own", pure=False)
def leave_routines_out(e: Emitter, ins: SassInstruction) -> None:
    """Emit the predicate of a branch around a routine of arithmetic, with the value that leaves the routine out where it is undefined.

    ptxas makes such branches of a division or a reciprocal, which decides nothing. Both ways give an undefined result then.
    """
    result, condition, value = ins.operands
    assert isinstance(value, Immediate)
    chosen = source(e, condition, "pred")
    if e.tainted:
        chosen = f"where({poison_of(e, condition)}, {bool(value.bits)}, {chosen})"
    assign_predicates(e, (result, Register("P", None)), [f"array({chosen})", ""], ["False", ""])


@runtime
def predicate_table(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """Return the function of three predicates with this truth table: bit 4a + 2b + c."""
    index = a.astype(np.uint8) * 4 + b.astype(np.uint8) * 2 + c.astype(np.uint8)
    result: np.ndarray = (table >> index & 1).astype(bool)
    return result


@runtime
def predicate_poison(values: tuple[np.ndarray, ...], marks: tuple[np.ndarray, ...], table: int) -> np.ndarray:
    """Return where the function of three predicates depends on those that are undefined."""
    lowest = np.ones((), bool)
    highest = np.zeros((), bool)
    for guess in range(8):
        bits = [np.where(mark, bool(guess >> 2 - place & 1), value) for place, (value, mark) in enumerate(zip(values, marks, strict=True))]
        result = predicate_table(*bits, table)
        lowest, highest = lowest & result, highest | result
    depends: np.ndarray = highest & ~lowest
    return depends


def assign_compared(e: Emitter, ins: SassInstruction, value: str, compared: list[Operand], condition: Operand, width: int = 1) -> None:
    """Store a comparison and its negation, each combined with a predicate. compared: what is compared, of so many registers.

    ptxas compares registers that it has not loaded, and combines that with a predicate that is false then: the result is defined.
    """
    word = next(word for word in ins.modifiers if word in ("AND", "OR", "XOR"))
    name, other = e.temp(), source(e, condition, "pred")
    e.line(f"{name} = {value}")
    values = [f"logical_{word.lower()}({name}, {other})", f"logical_{word.lower()}(logical_not({name}), {other})"]
    poison = "False"
    if e.tainted:
        registers = [register for operand in compared if isinstance(operand, Register) for register in operand.registers(width)]
        poison = e.taint_of(registers) or poison
        if word != "XOR":
            poison = f"logical_and({poison}, {other if word == 'AND' else f'logical_not({other})'})"
        poison = f"logical_or({poison}, {poison_of(e, condition)})"
    first, second = ins.operands[:2]
    assign_predicates(e, (first, second), values, [poison, poison])

"""Batches: independent instructions of one kind in a block, done as one operation on several registers at once.

A block's instructions are reordered within their register dependences, so that the costly element-wise ones meet. Instructions
with effects keep their order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from ..frontend.layout import Layout
from ..frontend.ptx import Imm, Instruction, Operand, Reg
from ..isa.emitter import KINDS, Constants, Emitter
from ..isa.table import Decoded
from ..state.registers import BANK_DTYPES

MIN_BATCH = 3
MAX_BATCH = 128

Step = Decoded | list[Decoded]


@dataclass(frozen=True)
class BatchReg(Reg):
    """One operand of several instructions."""

    members: tuple[Reg, ...] = ()


class Mergeable(Instruction, ABC):
    """An instruction, not of PTX, that merges with others of its form."""

    @abstractmethod
    def form(self) -> tuple[object, ...] | None:
        """Return what instructions must share to be done together; None for an instruction that is done alone."""

    @abstractmethod
    def merge(self, items: list[Instruction]) -> Instruction:
        """Return one instruction whose registers stand for those of all items, itself among them."""


def batch_key(item: Decoded) -> tuple[object, ...] | None:
    """Return the key that instructions must share to be done together; None for an instruction that is done alone."""
    instruction = item.instruction
    if not item.spec.batch or instruction.guard is not None or not item.writes:
        return None
    if isinstance(instruction, Mergeable):
        return instruction.form()
    key: list[object] = [instruction.opcode]
    for operand in instruction.operands:
        if isinstance(operand, Reg):
            key.append(operand.bank)
        elif isinstance(operand, Imm):
            key.append(operand)
        else:
            return None
    return tuple(key)


def dependences(items: list[Decoded]) -> tuple[list[set[int]], list[set[int]]]:
    """Return the instructions that must come before each instruction, and the ones that must come after."""
    before: list[set[int]] = [set() for _ in items]
    written: dict[str, int] = {}
    readers: dict[str, list[int]] = defaultdict(list)
    in_order = -1
    for index, item in enumerate(items):
        inputs = (*item.reads, *item.accumulators)
        outputs = (*item.writes, *item.accumulators)
        if item.instruction.guard is not None:
            inputs = (*inputs, *item.writes)
        for register in inputs:
            if register.name in written:
                before[index].add(written[register.name])
        for register in outputs:
            if register.name in written:
                before[index].add(written[register.name])
            before[index].update(readers[register.name])
        if not item.spec.pure or item.instruction.guard is not None:
            if in_order >= 0:
                before[index].add(in_order)
            in_order = index
        if item.spec.ends or item.spec.control:
            before[index].update(range(index))
        for register in inputs:
            readers[register.name].append(index)
        for register in outputs:
            written[register.name] = index
            readers[register.name] = []
        before[index].discard(index)
    if items[0].spec.starts:
        for index in range(1, len(items)):
            before[index].add(0)
    after: list[set[int]] = [set() for _ in items]
    for index, earlier in enumerate(before):
        for other in earlier:
            after[other].add(index)
    return before, after


def schedule(items: list[Decoded]) -> list[Step]:
    """Return an order of the instructions of a block; a list stands for instructions that are done together.

    Instructions that are done one by one come as early as they can; a batch waits until nothing else can go on, so that it grows.
    """
    keys = [batch_key(item) for item in items]
    counts: dict[tuple[object, ...], int] = defaultdict(int)
    for key in keys:
        if key is not None:
            counts[key] += 1
    if not any(count >= MIN_BATCH for count in counts.values()):
        return list(items)
    before, after = dependences(items)
    missing = [len(earlier) for earlier in before]
    single: list[int] = []
    waiting: dict[tuple[object, ...], list[int]] = defaultdict(list)

    def release(index: int) -> None:
        key = keys[index]
        if key is None:
            heappush(single, index)
        else:
            waiting[key].append(index)

    for index, count in enumerate(missing):
        if count == 0:
            release(index)
    order: list[Step] = []
    while single or waiting:
        if single:
            chosen = [heappop(single)]
            order.append(items[chosen[0]])
        else:
            key = max(waiting, key=lambda name: (len(waiting[name]), -waiting[name][0]))
            chosen = waiting[key][:MAX_BATCH]
            waiting[key] = waiting[key][MAX_BATCH:]
            if not waiting[key]:
                del waiting[key]
            members = [items[index] for index in sorted(chosen)]
            order.extend([members] if len(members) >= MIN_BATCH else members)
        for done in chosen:
            for later in after[done]:
                missing[later] -= 1
                if missing[later] == 0:
                    release(later)
    return order


class BatchEmitter(Emitter):
    """Emitter of one instruction for several at once: registers become arrays (instructions, lanes)."""

    def __init__(self, layout: Layout, constants: Constants, known: dict[str, int], size: int) -> None:
        super().__init__(layout, constants, False, known)
        self.size = size
        self.finish: list[str] = []
        self.sources: dict[tuple[BatchReg, str], str] = {}

    def row(self, register: Reg, kind: str) -> str:
        """Return the rows of an operand viewed as a kind."""
        if not isinstance(register, BatchReg):
            return super().row(register, kind)
        key = (register, kind)
        if key not in self.sources:
            slots = [self.layout.row(member) for member in register.members]
            if len(set(slots)) == 1:
                return super().row(register.members[0], kind)
            name = self.temp()
            dtype = self.constants.thing(KINDS[kind][2])
            self.line(f"{name} = w.banks[{register.bank!r}][{self.constants.number(index_of(slots))}].view({dtype})")
            self.sources[key] = name
        return self.sources[key]

    def dst(self, operand: Operand | None, kind: str) -> str:
        """Return the rows of the results."""
        if not isinstance(operand, BatchReg):
            return super().dst(operand, kind)
        for member in operand.members:
            self.known.pop(member.name, None)
        index = index_of([self.layout.row(member) for member in operand.members])
        dtype = self.constants.thing(KINDS[kind][2])
        rows = f"w.banks[{operand.bank!r}][{self.constants.number(index)}]"
        if isinstance(index, slice):
            return f"{rows}.view({dtype})"
        name = self.temp()
        self.line(f"{name} = empty(({self.size}, w.n), {self.constants.thing(BANK_DTYPES[operand.bank])})")
        self.finish.append(f"{rows} = {name}")
        return f"{name}.view({dtype})"


def index_of(slots: list[int]) -> slice | np.ndarray:
    """Return a subscript for rows: a slice where they are evenly spaced, else an index array."""
    step = slots[1] - slots[0]
    if step > 0 and slots == list(range(slots[0], slots[-1] + 1, step)):
        return slice(slots[0], slots[-1] + 1, step)
    return np.array(slots)


def merged(items: list[Decoded]) -> Instruction:
    """Return one instruction whose registers stand for those of all items."""
    first = items[0].instruction
    if isinstance(first, Mergeable):
        return first.merge([item.instruction for item in items])
    operands: list[Operand | None] = []
    for position, operand in enumerate(first.operands):
        if isinstance(operand, Reg):
            members = tuple(item.instruction.operands[position] for item in items)
            names = f"batch{position}"
            operands.append(BatchReg(names, operand.bank, tuple(member for member in members if isinstance(member, Reg))))
        else:
            operands.append(operand)
    return Instruction(first.opcode, operands, None, first.line, first.source)


def emit_batch(e: Emitter, items: list[Decoded]) -> None:
    """Append the code of a batch to a block's emitter."""
    inner = BatchEmitter(e.layout, e.constants, e.known, len(items))
    inner.serial = e.serial
    inner.position = e.position
    inner.rows = e.rows
    emit = items[0].spec.emit
    assert emit is not None
    emit(inner, merged(items), items[0].match)
    e.serial = inner.serial
    e.lines += inner.lines
    for line in inner.finish:
        e.line(line)

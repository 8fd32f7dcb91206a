"""Control flow: instructions to basic blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..checks.tensor_hazards import RegisterUses, add_bits
from ..frontend.layout import Layout
from ..frontend.ptx import EntryText, Instruction, LabelRef, Reg
from ..isa.table import Decoded, lookup, registers_of
from ..state.registers import BANK_DTYPES
from .assignment import analyse

MAX_BLOCK = 600
ARRIVALS = (
    "mbarrier.arrive", "cp.async.mbarrier.arrive", "bar.sync", "bar.arrive", "bar.red", "bar.cta.", "barrier.", "tcgen05.commit", "atom.",
    "red.", "fence.acq_rel", "fence.sc", "membar.", "st.release", "st.async", "griddepcontrol.",
)  # fmt: skip
_NEEDS = {"": 0, "warp": 1, "warpgroup": 2}


class RegisterSet:
    """Registers of a kernel, by a bit mask of their numbers in its layout."""

    def __init__(self, mask: int, layout: Layout) -> None:
        self.mask = mask
        self.layout = layout

    @cached_property
    def rows(self) -> dict[str, np.ndarray]:
        """Return the rows by bank, ascending."""
        layout = self.layout
        packed = np.frombuffer(self.mask.to_bytes(len(layout.numbers) // 8 + 1, "little"), np.uint8)
        bits = np.unpackbits(packed, bitorder="little")
        return {bank: np.flatnonzero(bits[layout.starts[bank] : layout.starts[bank] + layout.sizes[bank]]) for bank in BANK_DTYPES}


@dataclass
class Block:
    """Instructions that run together. Its index is its program counter.

    needs: "", "warp" or "warpgroup" (all live threads of those must be there). live: registers that are read later. uses: how it uses
    registers, for kernels that load from tensor memory, whose blocks begin anew at each arrival that others may wait for.
    """

    index: int
    layout: Layout
    instructions: list[Decoded] = field(default_factory=list)
    needs: str = ""
    live: RegisterSet | None = None
    successors: list[int] = field(default_factory=list)
    plain: Callable[..., Any] | None = None
    tainted: Callable[..., Any] | None = None
    uses: RegisterUses | None = None

    @property
    def count(self) -> int:
        """Return the number of instructions in the block."""
        return len(self.instructions)

    @cached_property
    def touches(self) -> int:
        """Return the rows of bank "r" that ordinary instructions access, as a bit mask."""
        reads = (register for item in self.instructions if not item.spec.asynchronous for register in item.reads)
        return self.writes | self._rows_mask(reads)

    @cached_property
    def writes(self) -> int:
        """Return the rows of bank "r" that ordinary instructions write, as a bit mask."""
        return self._rows_mask(register for item in self.instructions for register in item.writes)

    @cached_property
    def used(self) -> RegisterSet:
        """Return all registers of the instructions."""
        numbers = self.layout.numbers
        registers = (register for item in self.instructions for register in (*item.reads, *item.writes, *item.accumulators))
        return RegisterSet(_mask({numbers[register.name] for register in registers}), self.layout)

    def _rows_mask(self, registers: Iterable[Reg]) -> int:
        return _mask({self.layout.rows[register.name] for register in registers if register.bank == "r"})


def _mask(numbers: Iterable[int]) -> int:
    mask = 0
    for number in numbers:
        mask |= 1 << number
    return mask


@dataclass
class Flow:
    """All blocks of an entry; undefined: bank -> rows of registers that may be read before they are written.

    tensor_fences: there is a tcgen05.fence::after_thread_sync.
    """

    blocks: list[Block]
    targets: dict[str, int]
    undefined: dict[str, list[int]]
    accumulators: dict[str, list[int]]
    tensor_fences: bool = False


def desugar(entry: EntryText) -> tuple[list[Instruction], dict[str, int]]:
    """Turn guards on blocking or collective instructions and on exits into branches around them."""
    instructions: list[Instruction] = []
    moved: list[int] = []
    labels: dict[str, int] = {}
    for instruction in entry.instructions:
        moved.append(len(instructions))
        found = lookup(instruction.opcode) if instruction.guard is not None else None
        collective = found is not None and bool(found[0].starts or found[0].needs or found[0].control == "exit")
        if collective and instruction.guard is not None:
            register, negated = instruction.guard
            name = f"$skip{len(instructions)}"
            branch = Instruction("bra", [LabelRef(name)], (register, not negated), instruction.line, instruction.source)
            instructions += [branch, replace(instruction, guard=None)]
            labels[name] = len(instructions)
        else:
            instructions.append(instruction)
    moved.append(len(instructions))
    for name, index in entry.labels.items():
        labels[name] = moved[index]
    return instructions, labels


def accumulator_groups(instructions: list[Instruction]) -> list[tuple[Reg, ...]]:
    """Return the register lists of accumulators, which should get consecutive rows; longest first."""
    groups: dict[tuple[str, ...], tuple[Reg, ...]] = {}
    for instruction in instructions:
        if instruction.opcode.startswith(("wgmma.mma_async", "tcgen05.ld.", "tcgen05.st.")):
            registers = tuple(registers_of(instruction.operands[instruction.opcode.startswith("tcgen05.st.")]))
            groups[tuple(register.name for register in registers)] = registers
    return sorted(groups.values(), key=len, reverse=True)


def build_flow(decoded: list[Decoded], labels: dict[str, int], layout: Layout) -> Flow:
    """Split into blocks, link them, and analyse which registers are read before they are written."""
    starts = set(labels.values())
    blocks: list[Block] = []
    block_at: dict[int, int] = {}
    current: Block | None = None
    state = _SplitState()
    tensor = any(item.instruction.opcode.startswith("tcgen05.ld.") for item in decoded)
    for position, item in enumerate(decoded):
        arrives = tensor and item.instruction.opcode.startswith(ARRIVALS)
        if current is None or position in starts or arrives or state.must_split(current, item):
            current = Block(len(blocks), layout)
            blocks.append(current)
            state = _SplitState()
        block_at.setdefault(position, current.index)
        current.instructions.append(item)
        if _NEEDS[item.spec.needs] > _NEEDS[current.needs]:
            current.needs = item.spec.needs
        state.add(item)
        if item.spec.ends:
            current = None
    end = len(blocks)
    targets = {name: block_at.get(position, end) for name, position in labels.items()}
    for block in blocks:
        _link(block, targets, end)
    usage = analyse([block.instructions for block in blocks], [block.successors for block in blocks], layout.numbers)
    for block, live in zip(blocks, usage.live, strict=True):
        block.live = RegisterSet(live, layout)
    undefined = {bank: rows.tolist() for bank, rows in RegisterSet(usage.undefined, layout).rows.items()}
    rows = sorted({layout.row(register) for item in decoded for register in item.accumulators})
    fenced = any(item.instruction.opcode == "tcgen05.fence::after_thread_sync" for item in decoded)
    return Flow(blocks, targets, undefined, {"r": rows}, fenced)


class _SplitState:
    """Registers that the next instruction of a block must not touch."""

    def __init__(self) -> None:
        self.loaded: set[str] = set()
        self.accumulators: set[str] = set()

    def must_split(self, block: Block, item: Decoded) -> bool:
        """Return True when item has to begin a new block."""
        if item.spec.starts or len(block.instructions) >= MAX_BLOCK:
            return True
        if _NEEDS[item.spec.needs] > _NEEDS[block.needs]:
            return True
        if not self.loaded and not self.accumulators:
            return False
        touched = {register.name for register in (*item.reads, *item.writes)}
        if self.loaded & (touched | {register.name for register in item.accumulators}):
            return True
        return bool(self.accumulators & touched)

    def add(self, item: Decoded) -> None:
        """Take an instruction into the block."""
        if item.spec.loads:
            self.loaded.update(register.name for register in item.writes)
        self.accumulators.update(register.name for register in item.accumulators)


def register_uses(instructions: list[Decoded], layout: Layout) -> RegisterUses:
    """Return how a block uses registers that can hold values loaded from tensor memory."""
    uses = RegisterUses()
    for item in instructions:
        reads, writes = _data_bits(item.reads, layout), _data_bits(item.writes, layout)
        if item.instruction.opcode.startswith("mov."):
            uses.moves.append((reads, writes))
            add_bits(uses.moved, reads)
        elif not item.instruction.opcode.startswith("tcgen05.ld."):
            add_bits(uses.touched, (*reads, *writes))
    return uses


def _data_bits(registers: tuple[Reg, ...], layout: Layout) -> list[tuple[str, int]]:
    return [(register.bank, 1 << layout.row(register)) for register in registers if register.bank != "p"]


def _link(block: Block, targets: dict[str, int], end: int) -> None:
    last = block.instructions[-1]
    if last.spec.control == "bra":
        reference = last.instruction.operands[0]
        assert isinstance(reference, LabelRef)
        block.successors.append(targets[reference.name])
        if last.instruction.guard is None:
            return
    if last.spec.control != "exit" and block.index + 1 not in block.successors:
        block.successors.append(block.index + 1)
    block.successors = [successor for successor in block.successors if successor <= end]

"""Interval analysis of PTX integers: a range for every register at every instruction, by abstract interpretation.

A register that is written once is evaluated anew from its sources wherever a branch has narrowed these. That is sound for registers in
static single assignment form: a definition precedes every use, so the value is the one that the sources have now.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from cute_mla.simulator.frontend.ptx import EntryText, Imm, Instruction, LabelRef, Mem, Negated, Operand, Pair, Reg, Special, Symbol, Vec
from tests.mutation.ranges import BITS, INVERSE, SWAPPED, Range, arithmetic, comparable, every, fits, hull, meet, narrowed, product, wrapped

State = dict[str, Range]  # ranges of registers at a place; a register that is left out has any value that it has anywhere

DEPTH = 4  # definitions that a lookup goes back
PATIENCE = 4  # changes of the state in front of a block before ranges that grow are widened
STEPS = tuple(1 << bits for bits in (0, 5, 10, 15, 20, 25, 30, 31, 32, 40, 50, 58, 63))
ROUNDS = 2  # solutions, each with the ranges of registers that the one before has found
ENDS = ("ret", "exit", "trap")
ANY = (-(1 << 80), 1 << 80)  # of a register that a mutation may have changed


class Noticed(Exception):
    """A register that a mutation may have changed reaches a branch, memory, or other threads. The argument is the line."""


def registers(operand: Operand | None) -> Iterator[Reg]:
    """Yield the registers of an operand."""
    if isinstance(operand, Reg):
        yield operand
    elif isinstance(operand, Negated):
        yield operand.reg
    elif isinstance(operand, Vec):
        for item in operand.items:
            yield from registers(item)
    elif isinstance(operand, Pair):
        yield from registers(operand.first)
        yield from registers(operand.second)
    elif isinstance(operand, Mem):
        for item in (operand.base, operand.coords, *operand.extra):
            yield from registers(item)


_NO_RESULT = ("st", "red", "bra", "bar", "barrier", "fence", "membar", "cp", "griddepcontrol", "setmaxnreg", "nanosleep", "prefetch", *ENDS)
_PURE = frozenset(
    re.findall(
        r"\w+",
        "mov add sub mul mad fma shl shr and or xor not neg abs min max div rem selp setp cvt cvta popc clz brev bfe bfi bfind prmt lop3 "
        "shf ex2 lg2 rcp sqrt rsqrt tanh copysign",
    )
)


def root(item: Instruction) -> str:
    """Return the opcode without its modifiers."""
    return item.opcode.split(".")[0]


def is_pure(item: Instruction) -> bool:
    """Return whether an instruction only computes registers from registers."""
    return root(item) in _PURE


def written(item: Instruction) -> list[Reg]:
    """Return the registers that an instruction may write: all of its operands, unless its opcode is known to write the first or none."""
    if root(item) in _NO_RESULT or item.opcode.startswith("mbarrier.arrive") or not item.operands:
        return []
    if is_pure(item) or root(item) in ("ld", "shfl", "vote"):
        return list(registers(item.operands[0]))
    return [register for operand in item.operands if not isinstance(operand, Mem) for register in registers(operand)]


@cache
def _is_float(opcode: str) -> bool:
    """Return whether an opcode computes with floats, so that nothing is known of its result."""
    name, *rest = opcode.split(".")
    return name not in ("mov", "selp", "ld") and any(re.fullmatch(r"b?f(16|32|64)(x2)?", part) for part in rest)


def wrapped_literal(value: Range) -> Range:
    """Return the signed value of a 32-bit literal that is written without a sign."""
    return (value[0] - (1 << 32), value[1] - (1 << 32)) if value[0] == value[1] and 1 << 31 <= value[0] < 1 << 32 else value


@dataclass
class Analysis:
    """Ranges of an entry.

    bounds: of parameters by name, and of special registers by name with a percent sign. before: the state in front of each block, None
    where nothing arrives. everywhere: ranges of registers that are written once.
    """

    entry: EntryText
    bounds: Mapping[str, Range]
    starts: list[int] = field(init=False)  # first instruction of each block; behind them, the number of instructions
    definitions: dict[str, list[Instruction]] = field(init=False)
    before: list[State | None] = field(init=False)
    everywhere: dict[str, Range] = field(default_factory=dict)
    indices: dict[int, int] = field(init=False)  # of instructions, by their id
    _lasting: dict[int, list[Instruction]] = field(default_factory=dict)
    _found: dict[str, Range] = field(default_factory=dict)
    _stable: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        items = self.entry.instructions
        ends = (index + 1 for index, item in enumerate(items) if root(item) in ("bra", *ENDS))
        self.starts = sorted({0, *self.entry.labels.values(), *ends, len(items)})
        self.indices = {id(item): index for index, item in enumerate(items)}
        self.definitions = defaultdict(list)
        for item in items:
            for register in written(item):
                self.definitions[register.name].append(item)
        for _ in range(ROUNDS):
            self._solve()

    # ---- registers

    def once(self, register: Reg) -> Instruction | None:
        """Return the only instruction that writes a register, None if there are several or it has a guard."""
        known = self.definitions.get(register.name, ())
        return known[0] if len(known) == 1 and known[0].guard is None else None

    def stable(self, register: Reg) -> bool:
        """Return whether a register may be evaluated anew: it is computed, and like its sources written once."""
        if register.name not in self._stable:
            item = self.once(register)
            sources = [source for operand in item.operands[1:] for source in registers(operand)] if item is not None else []
            self._stable[register.name] = item is not None and is_pure(item) and all(self.once(source) is not None for source in sources)
        return self._stable[register.name]

    def lookup(self, operand: Operand | None, state: State, depth: int = DEPTH) -> Range | None:
        """Return the range of an operand in a state, None if the state is impossible."""
        if isinstance(operand, Negated):
            value = self.lookup(operand.reg, state, depth)
            return None if value is None else (1 - value[1], 1 - value[0])
        if isinstance(operand, Imm):
            return int(operand.value), int(operand.value)
        if isinstance(operand, Special):
            return self.bounds.get(f"%{operand.name}", every(64))
        if not isinstance(operand, Reg):
            return every(64)
        value = state.get(operand.name) or every(BITS[operand.bank])
        if value == ANY:
            return every(BITS[operand.bank])
        if self.once(operand) is None:
            return value
        general = meet(value, self.everywhere.get(operand.name, value))
        if general is None or not depth or general[0] == general[1] or not self.stable(operand):
            return general
        anew = self.evaluate(self.definitions[operand.name][0], state, depth - 1)
        return None if anew is None else meet(general, anew)

    def evaluate(self, item: Instruction, state: State, depth: int = DEPTH) -> Range | None:
        """Return the range of the only result of an instruction, None if the state is impossible."""
        target, source = item.operands[0], item.operands[1] if len(item.operands) > 1 else None
        if not isinstance(target, Reg):
            return every(64)
        bits = BITS[target.bank]
        if item.opcode.startswith("ld.param") and isinstance(source, Mem) and isinstance(source.base, Symbol) and not source.offset:
            return self.bounds.get(source.base.name, every(bits))
        if _is_float(item.opcode):
            return every(bits)
        if root(item) == "shfl":
            return self.lookup(source, state, depth)  # a range holds for all lanes
        values = []
        for operand in item.operands[1:]:
            value = self.lookup(operand, state, depth)
            if value is None:
                return None
            values.append(wrapped_literal(value) if item.opcode.endswith("32") else value)
        result = self._rest_of_quotient(item, state, depth) or arithmetic(item, values)
        return every(bits) if result is None else wrapped(result, bits)

    def _rest_of_quotient(self, item: Instruction, state: State, depth: int) -> Range | None:
        """Return the range of x + y d - (x / d) d, as x - (x / d) d + y d, which is at least y d; None for other results.

        Two forms: of rows of which every d belong to a token, (y - x / d) d + x; and x, or a sum of x and y d, less (x / d) d.
        """
        name, sources = item.opcode, item.operands[1:]
        if name in ("mad.lo.s32", "mad.lo.u32"):
            outer = self._defined(sources[0], "sub.s32")
            quotient = self._defined(outer.operands[2], "div.s32", "div.u32") if outer is not None else None
            if outer is None or quotient is None or quotient.operands[1:] != [sources[2], sources[1]]:
                return None
            times = self.lookup(outer.operands[1], state, depth)
        elif name == "sub.s32":
            taken = self._defined(sources[1], "mul.lo.s32", "mul.lo.u32")
            quotient = self._defined(taken.operands[1], "div.s32", "div.u32") if taken is not None else None
            if taken is None or quotient is None or quotient.operands[2] != taken.operands[2]:
                return None
            times = self._factor_beside(sources[0], quotient, state, depth)
        else:
            return None
        number, divisor = (self.lookup(operand, state, depth) for operand in quotient.operands[1:])
        if times is None or number is None or divisor is None or number[0] < 0 or divisor[0] < 1:
            return None
        low, high = product(times, divisor)
        total = low, high + min(number[1], divisor[1] - 1)
        return total if fits(total, 32) else None

    def _factor_beside(self, total: Operand | None, quotient: Instruction, state: State, depth: int) -> Range | None:
        """Return the range of y in a total x + y d, where the quotient is x / d; 0 if the total is x."""
        number, divisor = quotient.operands[1:]
        if total == number:
            return 0, 0
        found = self._defined(total, "add.s32", "mad.lo.s32")
        if found is None:
            return None
        if root(found) == "mad":
            parts, rest = found.operands[1:3], found.operands[3]
        else:
            ordered = found.operands[1:] if found.operands[1] == number else found.operands[:0:-1]
            rest, multiple = ordered[0], self._defined(ordered[1], "mul.lo.s32", "mul.lo.u32")
            if multiple is None:
                return None
            parts = multiple.operands[1:]
        if rest != number or divisor not in parts:
            return None
        return self.lookup(parts[1] if parts[0] == divisor else parts[0], state, depth)

    def _defined(self, operand: Operand | None, *opcodes: str) -> Instruction | None:
        """Return the only instruction that writes an operand, if it has one of these opcodes, and sources that are written once."""
        item = self.once(operand) if isinstance(operand, Reg) else None
        return item if item is not None and item.opcode in opcodes and isinstance(operand, Reg) and self.stable(operand) else None

    # ---- branches

    def narrow(self, state: State, operand: Operand | None, value: bool, place: int, depth: int = DEPTH) -> State | None:
        """Return the state where a predicate has a value at an instruction, None if it cannot have it."""
        if isinstance(operand, Negated):
            return self.narrow(state, operand.reg, not value, place, depth)
        known = self.lookup(operand, state)
        if known is None or not known[0] <= value <= known[1]:
            return None
        if not isinstance(operand, Reg):
            return state
        state = {**state, operand.name: (int(value), int(value))}
        item = self.once(operand)
        if item is None or not depth:
            return state
        name, *rest = item.opcode.split(".")
        sources = item.operands[1:]
        if name == "setp" and len(rest) == 2 and all(self._unchanged(source, item, place) for source in sources):
            return self.compare(state, rest[0] if value else INVERSE.get(rest[0], "?"), rest[1], sources[0], sources[1])
        if item.opcode in ("not.pred", "mov.pred"):
            return self.narrow(state, sources[0], value != (name == "not"), place, depth - 1)
        if item.opcode in ("and.pred", "or.pred") and value == (name == "and"):
            first = self.narrow(state, sources[0], value, place, depth - 1)
            return None if first is None else self.narrow(first, sources[1], value, place, depth - 1)
        return state

    def _unchanged(self, operand: Operand | None, item: Instruction, place: int) -> bool:
        """Return whether an operand still has the value at a place that an instruction has read."""
        if not isinstance(operand, Reg) or self.once(operand) is not None:
            return True
        read = self.indices[id(item)]
        between = self.entry.instructions[read:place]
        return self.starts[self.block_of(place)] <= read < place and not any(operand in written(other) for other in between)

    def compare(self, state: State, name: str, kind: str, a: Operand | None, b: Operand | None) -> State | None:
        """Return the state where a comparison holds, None if it cannot hold."""
        left, right = self.lookup(a, state), self.lookup(b, state)
        if left is None or right is None:
            return None
        if kind[1:] == "32":
            left, right = (wrapped_literal(value) for value in (left, right))
        known = comparable(name, kind, left, right)
        if known not in INVERSE or known not in SWAPPED:
            return state
        sides = narrowed(known, left, right), narrowed(SWAPPED[known], right, left)
        for operand, side in zip((a, b), sides, strict=True):
            if side is None:
                return None
            if isinstance(operand, Reg) and state.get(operand.name) != ANY:
                state = {**state, operand.name: side}
        return state

    # ---- the entry

    def block_of(self, index: int) -> int:
        """Return the block of an instruction."""
        return bisect_right(self.starts, index) - 1

    def step(self, item: Instruction, state: State) -> bool:
        """Change a state to that behind an instruction that is no branch. False if the state is impossible."""
        targets = written(item)
        known = len(targets) == 1 and (is_pure(item) or root(item) in ("ld", "shfl"))
        value = self.evaluate(item, state) if known else None
        if known and value is None:
            return False
        for register in targets:
            own = value or every(BITS[register.bank])
            if item.guard is not None:
                own = hull(own, state.get(register.name, every(BITS[register.bank])))
            if self.once(register) is not None:
                self._found[register.name] = hull(own, self._found.get(register.name, own))
            state.pop(register.name, None)
            if own != every(BITS[register.bank]):
                state[register.name] = own
        return True

    def run(self, first: int, state: State, step: Callable[[Instruction, State], bool]) -> Iterator[tuple[int, State]]:
        """Run from an instruction to the end of its block; yield the blocks behind it, each with its state."""
        block = self.block_of(first)
        current = dict(state)
        for item in self.entry.instructions[first : self.starts[block + 1]]:
            if root(item) == "bra":
                (target,) = (operand for operand in item.operands if isinstance(operand, LabelRef))
                taken = self._branch(item, current, True)
                if taken is not None:
                    yield self.starts.index(self.entry.labels[target.name]), taken
            if root(item) in ("bra", *ENDS):
                left = self._branch(item, current, False)
                if left is None:
                    return
                current = left
            elif not step(item, current):
                return
        if block + 2 < len(self.starts):
            yield block + 1, current

    def _branch(self, item: Instruction, state: State, taken: bool) -> State | None:
        """Return the state where a branch is taken or not, None if that is impossible."""
        if item.guard is None:
            return dict(state) if taken else None
        register, negated = item.guard
        if state.get(register.name) == ANY:
            raise Noticed(item.line)
        place = self.indices[id(item)]
        narrower = self.narrow(state, register, taken != negated, place)
        return None if narrower is None else self._refreshed(narrower, place)

    def _refreshed(self, state: State, place: int) -> State | None:
        """Evaluate the results of a block anew at its end, where its branch has narrowed their sources."""
        block = self.block_of(place)
        if block not in self._lasting:
            items = self.entry.instructions[self.starts[block] : place]
            self._lasting[block] = [item for item in items if is_pure(item) and item.guard is None and self._lasts(item, place)]
        for item in self._lasting[block]:
            (target,) = written(item)
            if state.get(target.name) == ANY:
                continue
            value = self.evaluate(item, state)
            both = None if value is None else meet(value, state.get(target.name, value))
            if both is None:
                return None
            if both != every(BITS[target.bank]):
                state[target.name] = both
        return state

    def _lasts(self, item: Instruction, place: int) -> bool:
        """Return whether the one result of an instruction and its sources that are written twice are unchanged up to a place."""
        targets = written(item)
        later = self.entry.instructions[self.indices[id(item)] + 1 : place]
        sources = [source for operand in item.operands[1:] for source in registers(operand)]
        twice = {register for register in (*targets, *sources) if self.once(register) is None}
        if len(targets) != 1 or not twice or targets[0] in sources:
            return False
        return not any(twice.intersection(written(other)) for other in later)

    def _solve(self) -> None:
        """Find ranges that hold in front of all blocks, given those of registers everywhere; then the latter from the former."""
        count = len(self.starts) - 1
        before: list[State | None] = [{}] + [None] * (count - 1)
        changes = [0] * count
        work = [0]
        while work:
            block = min(work)  # inner loops first: blocks in the order of the text are revisited least
            work.remove(block)
            for target, reached in list(self.run(self.starts[block], before[block] or {}, self.step)):
                old = before[target]
                new = join(old, reached)
                if new == old:
                    continue
                changes[target] += 1
                before[target] = new if old is None or changes[target] < PATIENCE else widened(old, new)
                if target not in work:
                    work.append(target)
        self._found = {}
        after: list[State | None] = [{}] + [None] * (count - 1)
        for block, state in enumerate(before):
            for target, reached in self.run(self.starts[block], state, self.step) if state is not None else ():
                after[target] = join(after[target], reached)
        after[0] = {}
        self.before, self.everywhere, self._found = after, self._found, {}


def join(a: State | None, b: State) -> State:
    """Return the state where two paths meet."""
    if a is None:
        return b
    both = {name: hull(value, b[name]) for name, value in a.items() if name in b}
    changed = {name: ANY for state in (a, b) for name, value in state.items() if value == ANY}
    return {**both, **changed}


def widened(old: State, new: State) -> State:
    """Return a state whose ranges that grow end at one of a few numbers, so that loops come to an end."""
    return {name: value if value in (ANY, old.get(name)) else _stepped(old.get(name, value), value) for name, value in new.items()}


def _stepped(old: Range, new: Range) -> Range:
    low = new[0] if new[0] >= old[0] else next((-step for step in STEPS if -step <= new[0]), new[0])
    high = new[1] if new[1] <= old[1] else next((step - 1 for step in STEPS if step > new[1]), new[1])
    return low, high

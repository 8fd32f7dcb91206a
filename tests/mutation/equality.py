"""Proofs that a broken kernel equals the kernel as it ships.

A mutation changes the result of one instruction for some values of its sources. If no such values occur, the kernels are equal. Otherwise
the changed result is followed: if no branch, address, stored value or other thread ever depends on it, they are equal, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from cute_mla.manifest import KernelEntry
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.simulator.frontend.ptx import Imm, Instruction, Operand, parse_ptx
from tests.mutation.bounds import bounds
from tests.mutation.intervals import ANY, Analysis, Noticed, State, is_pure, join, registers, root, widened
from tests.mutation.ranges import FALSE, TRUE, Range, every, fits, product, unsigned
from tests.mutation.sites import Mutation

PATIENCE = 4


@lru_cache(2)
def analysis_of(name: str) -> Analysis:
    """Return the analysis of a kernel's PTX."""
    kernel = load_artifacts().manifest.kernels[name]
    entry = parse_ptx(load_artifacts().ptx(kernel))[kernel.entry]
    return Analysis(entry, bounds(kernel, entry))


def is_equal(kernel: KernelEntry, mutation: Mutation) -> bool:
    """Return whether a mutation is proved to change no result of a kernel."""
    analysis = analysis_of(kernel.name)
    sites = [item for item in analysis.entry.instructions if item.line == mutation.line]
    if len(sites) != 1 and not (len(sites) == 2 and root(sites[1]) == "bra"):
        return False
    return Proof(analysis, sites[0]).holds(mutation.kind)


@dataclass
class Proof:
    """The search for an effect of a changed instruction."""

    analysis: Analysis
    site: Instruction

    def holds(self, kind: str) -> bool:
        """Return whether the changed result has no effect."""
        index = self.analysis.indices[id(self.site)]
        block = self.analysis.block_of(index)
        before = self.analysis.before[block]
        if before is None:
            return True  # no path leads here
        state = dict(before)
        for item in self.analysis.entry.instructions[self.analysis.starts[block] : index]:
            if not self.analysis.step(item, state):
                return True
        if not is_pure(self.site) and not self.site.opcode.startswith("ld.param"):
            return False
        try:
            return all(self._without_effect(index, narrow) for narrow in _cases(self.analysis, self.site, kind, state))
        except Noticed:
            return False

    def _without_effect(self, index: int, state: State) -> bool:
        """Follow the changed result from a state to where nothing new is found; Noticed if it has an effect."""
        state = dict(state)
        if not self._step(self.site, state):
            return True
        before: dict[int, State] = {}
        changes: dict[int, int] = {}
        work = []
        reached = list(self.analysis.run(index + 1, state, self._step))
        while True:
            for target, found in reached:
                if ANY not in found.values():
                    continue  # nothing changed is left on this path
                old = before.get(target)
                new = join(old, found)
                if new != old:
                    changes[target] = changes.get(target, 0) + 1
                    before[target] = new if old is None or changes[target] < PATIENCE else widened(old, new)
                    if target not in work:
                        work.append(target)
            if not work:
                return True
            block = work.pop(0)
            reached = list(self.analysis.run(self.analysis.starts[block], before[block], self._step))

    def _step(self, item: Instruction, state: State) -> bool:
        """Change a state to that behind an instruction, changed registers marked. False if the state is impossible."""
        sources = item.operands[1:] if is_pure(item) else item.operands
        changed = any(state.get(source.name) == ANY for operand in sources for source in registers(operand))
        if item.guard is not None and state.get(item.guard[0].name) == ANY:
            raise Noticed(item.line)
        if changed and item.guard is not None and self.analysis.lookup(item.guard[0], state) == (TRUE if item.guard[1] else FALSE):
            return True  # it is not executed
        if changed and not is_pure(item):
            raise Noticed(item.line)
        kept = changed and self._absorbed(item, state)
        if not self.analysis.step(item, state):
            return False
        if (changed and not kept) or item is self.site:
            state.update({register.name: ANY for register in registers(item.operands[0])})
        return True

    def _absorbed(self, item: Instruction, state: State) -> bool:
        """Return whether a result does not depend on the changed sources."""
        same = [all(state.get(register.name) != ANY for register in registers(operand)) for operand in item.operands[1:]]
        values = [self.analysis.lookup(operand, state) for operand in item.operands[1:]]
        if root(item) == "selp" and same[2]:
            return (values[2] == TRUE and same[0]) or (values[2] == FALSE and same[1])
        absorbing = {"and.pred": FALSE, "or.pred": TRUE}.get(item.opcode)
        return absorbing is not None and any(alike and value == absorbing for alike, value in zip(same, values, strict=True))


Narrow = Iterator[State]


def _cases(analysis: Analysis, item: Instruction, kind: str, state: State) -> Narrow:
    """Yield states that together hold every value for which the mutation changes the result."""
    find = _DIFFERENT.get(kind)
    if find is None:
        yield state
        return
    yield from find(analysis, item, state)


def _within(analysis: Analysis, state: State, operand: Operand | None, low: int | None, high: int | None) -> Narrow:
    """Yield the state where an operand lies between two numbers, if it can."""
    current: State | None = state
    if low is not None:
        current = analysis.compare(state, "ge", "s64", operand, Imm(low))
    if high is not None and current is not None:
        current = analysis.compare(current, "le", "s64", operand, Imm(high))
    if current is not None:
        yield current


def _negative(analysis: Analysis, item: Instruction, state: State) -> Narrow:
    yield from _within(analysis, state, item.operands[1], None, -1)


def _too_large(analysis: Analysis, item: Instruction, state: State) -> Narrow:
    """Yield the states where a product does not fit into 32 bits."""
    a, b = item.operands[1], item.operands[2]
    left, right = analysis.lookup(a, state), analysis.lookup(b, state)
    if left is None or right is None:
        return
    without_sign = item.opcode == "mul.wide.u32"
    if without_sign:
        left, right = unsigned(left, 32), unsigned(right, 32)
    limits: Range = (0, (1 << 32) - 1) if without_sign else every(32)
    total = product(left, right)
    if limits[0] <= total[0] and total[1] <= limits[1]:
        return
    factor = right[0]
    if right[0] != right[1] or factor <= 0:
        yield state
        return
    if without_sign:
        yield from _within(analysis, state, a, None, -1)
    else:
        yield from _within(analysis, state, a, None, -(-limits[0] // factor) - 1)
    yield from _within(analysis, state, a, limits[1] // factor + 1, None)


def _shifted_too_far(analysis: Analysis, item: Instruction, state: State) -> Narrow:
    """Yield the states where a value shifted to the left does not fit into 32 bits."""
    value, count = analysis.lookup(item.operands[1], state), analysis.lookup(item.operands[2], state)
    if value is None or count is None:
        return
    if count[0] != count[1] or not 0 <= count[0] < 32:
        yield state
    elif not fits((value[0] << count[0], value[1] << count[0]), 32):
        yield from _within(analysis, state, item.operands[1], (every(32)[1] >> count[0]) + 1, None)
        yield from _within(analysis, state, item.operands[1], None, (every(32)[0] >> count[0]) - 1)


def _compared(name: str) -> Callable[[Analysis, Instruction, State], Narrow]:
    def where(analysis: Analysis, item: Instruction, state: State) -> Narrow:
        kind = item.opcode.rpartition(".")[2]
        if kind[0] not in "sub":
            yield state
        elif (narrower := analysis.compare(state, name, kind.replace("b", "s"), item.operands[1], item.operands[2])) is not None:
            yield narrower

    return where


def _beyond_bound(analysis: Analysis, item: Instruction, state: State) -> Narrow:
    """Yield the state where the minimum or maximum is not the first source."""
    name = "gt" if root(item) == "min" else "lt"
    yield from _compared(name)(analysis, item, state)


def _apart(analysis: Analysis, item: Instruction, state: State) -> Narrow:
    """Yield the states where two predicates differ."""
    place = analysis.indices[id(item)]
    for value in (False, True):
        first = analysis.narrow(state, item.operands[1], value, place)
        second = analysis.narrow(first, item.operands[2], not value, place) if first is not None else None
        if second is not None:
            yield second


def _masked(analysis: Analysis, item: Instruction, state: State) -> Narrow:
    """Yield the state unless all values lie below the bits in which a mask and its half differ."""
    value, mask = analysis.lookup(item.operands[1], state), analysis.lookup(item.operands[2], state)
    if value is None or mask is None:
        return
    exchanged = mask[0] ^ (mask[0] >> 1)
    if not (mask[0] == mask[1] > 0 and value[0] >= 0 and value[1] < exchanged & -exchanged):
        yield state


def _shifted_further(analysis: Analysis, item: Instruction, state: State) -> Narrow:
    """Yield the states where a shift by one bit more gives another number: unless none is left in either case."""
    count = analysis.lookup(item.operands[2], state)
    if count is None:
        return
    least = 1 << count[0] if root(item) == "shr" else 1
    yield from _within(analysis, state, item.operands[1], least, None)
    yield from _within(analysis, state, item.operands[1], None, -1)


def _with_next_constant(analysis: Analysis, item: Instruction, state: State) -> Narrow:
    """Yield the state where the result depends on a constant: of a minimum or maximum if it decides, else always."""
    name = {"min": "gt", "max": "le"}.get(root(item))
    if name is None:
        yield state
    else:
        yield from _compared(name)(analysis, item, state)


_DIFFERENT: dict[str, Callable[[Analysis, Instruction, State], Narrow]] = {
    "sign lost": _negative,
    "wide product cut": _too_large,
    "64-bit product cut": _too_large,
    "64-bit index cut": _too_large,
    "64-bit shift cut": _shifted_too_far,
    "comparison 1 off": _compared("eq"),
    "bound left out": _beyond_bound,
    "predicates joined the other way": _apart,
    "predicates met the other way": _apart,
    "mask halved": _masked,
    "shift 1 more": _shifted_further,
    "integer constant 1 more": _with_next_constant,
}

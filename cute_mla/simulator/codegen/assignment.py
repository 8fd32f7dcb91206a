"""Definite assignment and liveness of registers over the blocks of a kernel, as bit masks of register numbers.

A guarded write defines a register for reads under the same guard, until the predicate of the guard is written; writes under a guard and
under its opposite define it for all. Machine code keeps addresses and operands of predicated loads in such registers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..frontend.ptx import Reg
from ..isa.table import Decoded

Guard = tuple[str, bool]  # name of the predicate, and True for its negation
Code = Sequence[Sequence[Decoded]]


@dataclass(frozen=True)
class Usage:
    """undefined: registers that some path reads before it writes them, accumulators of wgmma aside. live: per block, read later."""

    undefined: int
    live: list[int]


@dataclass
class _Summary:
    """Registers of a block: read before written, surely written, and accumulated before written.

    exposed_under: read under a guard before they are written, while the predicate keeps the value that it has at entry. under: written
    under a guard. changed: guards whose predicate is written.
    """

    exposed: int = 0
    written: int = 0
    accumulated: int = 0
    exposed_under: dict[Guard, int] = field(default_factory=lambda: defaultdict(int))
    under: dict[Guard, int] = field(default_factory=lambda: defaultdict(int))
    changed: set[Guard] = field(default_factory=set)


def analyse(code: Code, successors: Sequence[Sequence[int]], numbers: Mapping[str, int]) -> Usage:
    """Return the usage of registers in blocks of instructions. numbers: of the registers by name."""
    guards = _guards(code, numbers)
    summaries = [_summarise(instructions, guards, numbers) for instructions in code]
    return Usage(_undefined(summaries, successors, guards, len(numbers)), _liveness(summaries, successors))


def mask_of(registers: Iterable[Reg], numbers: Mapping[str, int]) -> int:
    """Return the mask of registers."""
    mask = 0
    for register in registers:
        mask |= 1 << numbers[register.name]
    return mask


def _guard(item: Decoded) -> Guard | None:
    guard = item.instruction.guard
    return None if guard is None else (guard[0].name, guard[1])


def _guards(code: Code, numbers: Mapping[str, int]) -> frozenset[Guard]:
    """Return the guards under which some register is written that is read under the same guard, or written under the opposite one."""
    read: dict[Guard, int] = defaultdict(int)
    written: dict[Guard, int] = defaultdict(int)
    for instructions in code:
        for item in instructions:
            guard = _guard(item)
            if guard is not None:
                read[guard] |= mask_of(item.reads, numbers)
                written[guard] |= mask_of(item.writes, numbers)
    opposite = {(name, negated): written.get((name, not negated), 0) for name, negated in written}
    return frozenset(guard for guard, registers in written.items() if registers & (read[guard] | opposite[guard]))


def _summarise(instructions: Sequence[Decoded], guards: frozenset[Guard], numbers: Mapping[str, int]) -> _Summary:
    summary = _Summary()
    for item in instructions:
        guard = _guard(item)
        known = guard if guard in guards else None
        missing = mask_of(item.reads, numbers) & ~summary.written
        if known is None:
            summary.exposed |= _without_halves(summary, missing)
        elif known in summary.changed:
            summary.exposed |= missing & ~summary.under[known]
        else:
            summary.exposed_under[known] |= missing & ~summary.under[known]
        names = {register.name for register in item.writes if register.bank == "p"}
        for other in guards if names else ():
            if other[0] in names:
                summary.changed.add(other)
                summary.under[other] = 0
        results = mask_of(item.writes, numbers)
        accumulated = mask_of(item.accumulators, numbers)
        summary.accumulated |= accumulated & ~summary.written
        if guard is None:
            summary.written |= results | accumulated
        elif known is not None and known[0] not in names:
            summary.under[known] |= results
            summary.written |= summary.under[known] & summary.under[known[0], not known[1]]
    return summary


def _without_halves(summary: _Summary, missing: int) -> int:
    """Return the registers of a read without a guard that no write under a guard has defined; of the others the opposite is exposed."""
    for (name, negated), registers in list(summary.under.items()):
        if missing & registers and (name, negated) not in summary.changed:
            summary.exposed_under[name, not negated] |= missing & registers
            missing &= ~registers
    return missing


def _undefined(summaries: list[_Summary], successors: Sequence[Sequence[int]], guards: frozenset[Guard], count: int) -> int:
    """Follow what is surely written, always and under each guard, along all paths."""
    always: list[int] = [(1 << count) - 1] * (len(summaries) + 1)
    under: list[dict[Guard, int]] = [dict.fromkeys(guards, (1 << count) - 1) for _ in always]
    always[0], under[0] = 0, dict.fromkeys(guards, 0)
    seen: set[int] = set()
    work = [0]
    while work:
        index = work.pop()
        seen.add(index)
        summary = summaries[index]
        out = always[index] | summary.written
        kept = {guard: out | summary.under[guard] | (0 if guard in summary.changed else under[index][guard]) for guard in guards}
        for name, negated in guards:
            if (name, not negated) in guards:
                out |= kept[name, negated] & kept[name, not negated]
        for successor in successors[index]:
            joined = {guard: under[successor][guard] & kept[guard] for guard in guards}
            changed = always[successor] & ~out or joined != under[successor]
            always[successor] &= out
            under[successor] = joined
            if successor < len(summaries) and (successor not in seen or changed):
                work.append(successor)
    bad = 0
    for index in seen:
        bad |= summaries[index].exposed & ~always[index]
        for guard, exposed in summaries[index].exposed_under.items():
            bad |= exposed & ~under[index].get(guard, always[index])
    return bad


def _liveness(summaries: list[_Summary], successors: Sequence[Sequence[int]]) -> list[int]:
    """Follow backwards what is read later. A guarded write keeps the earlier value alive, if the register is."""
    used = []
    for summary in summaries:
        mask = summary.exposed | summary.accumulated
        for exposed in summary.exposed_under.values():
            mask |= exposed
        used.append(mask)
    live = [0] * (len(summaries) + 1)
    changed = True
    while changed:
        changed = False
        for index in reversed(range(len(summaries))):
            out = 0
            for successor in successors[index]:
                out |= live[successor]
            value = used[index] | (out & ~summaries[index].written)
            if value != live[index]:
                live[index] = value
                changed = True
    return live[:-1]

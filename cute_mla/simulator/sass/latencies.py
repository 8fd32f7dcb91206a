"""Static check of fixed latencies: no result of an instruction of fixed latency is used before its stall counts have passed.

Such a result has no scoreboard: the code that waits is made of the stall counts between producer and consumer. NVIDIA does not document
the latencies. The table below holds the smallest distances, in cycles between the two issues, that ptxas 13.5 leaves in this project's
cubins of sm_90a and sm_100f, by group of opcodes. A distance below them has been seen nowhere, so it is reported; the table proves nothing
beyond that.

A scoreboard is held some cycles after the issue of its instruction: a wait that comes earlier finds it free. Here, too, the smallest
distance seen counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..frontend.ptx import Reg
from .accesses import accesses, destinations
from .flow import is_never, spans
from .listing import BOARDS, NO_BOARD, Listing, Register, SassInstruction
from .scoreboards import PIPES, UNORDERED

HORIZON = 16  # cycles after which every result is there
LEAST_HOLD = 2  # cycles from the issue of an instruction to a wait that sees its scoreboard held

_INTEGER = ("IABS", "IADD3", "LEA", "LOP3", "MOV", "PRMT", "SEL", "SHF", "VIADDMNMX", "VIMNMX")
_GROUPS = {
    opcode: group
    for group, opcodes in {
        "multiply": "IMAD",
        "integer": " ".join(_INTEGER),
        "uniform move": "ELECT UMOV ULDC",
        "uniform vote": "VOTEU",
        "to uniform": "R2UR",
        "clear": "CS2R",
    }.items()
    for opcode in opcodes.split()
}
_TESTS = ("BRA", "BREAK", "EXIT", "LDGSTS", "VOTE")  # they read a source predicate as early as a guard


@dataclass(frozen=True)
class EarlyUse:
    """A result that is used too early. distance, least: cycles between the issues, and the smallest distance seen of such a pair."""

    ins: SassInstruction
    producer: SassInstruction
    register: str
    distance: int
    least: int

    @property
    def reason(self) -> str:
        """Return what the instruction does too early."""
        used = f"uses {self.register} {self.distance} cycles after {self.producer.place}"
        return f"{used}; the smallest distance seen is {self.least}"

    def __str__(self) -> str:
        return f"{self.ins.place}: {self.reason}"


Ages = dict[str, dict[int, int]]  # register -> index of the instruction that made it -> cycles since its issue


def least_distance(producer: SassInstruction, consumer: SassInstruction, item: Reg) -> int:
    """Return the smallest distance seen between a producer and a consumer of a register."""
    group = _GROUPS.get(producer.base, "")
    if item.name.startswith("UP"):
        if group == "uniform vote":
            return 1
        return 11 if is_guard(consumer, item) else 9 if consumer.base == "BRA" else 4
    if item.bank == "p":
        if is_guard(consumer, item) or consumer.base in _TESTS:
            return 13
        return 2 if consumer.base == "R2UR" else 4
    if item.name.startswith("UR"):
        early = {"uniform vote": 1, "uniform move": 2, "to uniform": 13}.get(group)
        return early if early is not None else 4 if consumer.base.startswith("U") else 6
    if group == "multiply":
        return 2 if consumer.base == "IMAD" else 3 if consumer.base in _INTEGER else 4
    if group == "integer":
        return 3 if consumer.base == "IMAD" else 4
    if group == "clear":
        return 5 if "32" in producer.modifiers else 7
    return 3 if is_upper_addend(consumer, item) else 4


def is_upper_addend(ins: SassInstruction, item: Reg) -> bool:
    """Return True for the upper half of the addend of an IMAD.WIDE, which it reads a cycle later than the rest."""
    if not ins.opcode.startswith("IMAD.WIDE"):
        return False
    *factors, addend = ins.operands[destinations(ins) : destinations(ins) + 3]
    upper = addend.registers(2)[1:] if isinstance(addend, Register) else ()
    return item in upper and not any(isinstance(operand, Register) and item in operand.registers() for operand in factors)


def is_guard(ins: SassInstruction, item: Reg) -> bool:
    """Return True for the predicate that guards an instruction."""
    return ins.guard is not None and item in ins.guard.registers()


def check_latencies(listing: Listing) -> tuple[EarlyUse, ...]:
    """Return every use of a result of fixed latency below the smallest distance seen, along all paths, in the order of the code."""
    code = listing.instructions
    blocks = spans(listing)
    entry: list[Ages | None] = [None] * len(blocks)
    entry[0] = {}
    found: dict[tuple[int, int, str], EarlyUse] = {}
    work = [0]
    while work:
        number = work.pop()
        ages = {name: dict(made) for name, made in (entry[number] or {}).items()}
        for index in range(blocks[number].start, blocks[number].stop):
            _issue(code, index, ages, found)
        for successor in blocks[number].successors:
            joined = _join(entry[successor], ages)
            if joined != entry[successor]:
                entry[successor] = joined
                work.append(successor)
    return tuple(found[key] for key in sorted(found))


def _issue(code: tuple[SassInstruction, ...], index: int, ages: Ages, found: dict[tuple[int, int, str], EarlyUse]) -> None:
    """Issue one instruction: look at the ages of its sources, add its results, and let its stall count pass."""
    ins = code[index]
    for board in range(BOARDS):
        for producer, age in ages.get(f"scoreboard {board}", {}).items() if ins.control.waits >> board & 1 else ():
            least = 1 if code[producer].base == "USETMAXREG" else LEAST_HOLD
            if age < least:
                found[index, producer, f"scoreboard {board}"] = EarlyUse(ins, code[producer], f"scoreboard {board}", age, least)
    if not is_never(ins):
        access = accesses(ins)
        for item in access.reads:
            for producer, age in ages.get(item.name, {}).items():
                least = least_distance(code[producer], ins, item)
                if age < least:
                    found[index, producer, item.name] = EarlyUse(ins, code[producer], item.name, age, least)
        for board in {ins.control.write_board, ins.control.read_board} - {NO_BOARD}:
            ages[f"scoreboard {board}"] = {index: 0}
        fixed = ins.base not in PIPES and ins.base not in UNORDERED
        for item in access.writes:
            if ins.guard is None:
                ages.pop(item.name, None)
            if fixed:
                ages.setdefault(item.name, {})[index] = 0
    for name, made in list(ages.items()):
        for producer, age in list(made.items()):
            if age + max(ins.control.stall, 1) < HORIZON:
                made[producer] = age + max(ins.control.stall, 1)
            else:
                del made[producer]
        if not made:
            del ages[name]


def _join(first: Ages | None, second: Ages) -> Ages:
    """Return the ages on either path, the smaller where both have made a register."""
    joined = {name: dict(made) for name, made in (first or {}).items()}
    for name, made in second.items():
        known = joined.setdefault(name, {})
        for producer, age in made.items():
            known[producer] = min(age, known.get(producer, age))
    return joined

"""Static check of scoreboards: no register is read or overwritten while an instruction of variable latency may still need it.

An instruction of variable latency, such as a load, names a write scoreboard that holds until its results are there, and a read
scoreboard that holds until its operands have been read. A later instruction that needs either waits with its mask. The check follows
all paths of the control flow and keeps what may be in flight. Seven rules come from the code that ptxas makes:

1. Guards and source predicates are read at issue.
2. Whoever waits for an instruction's results may also overwrite its operands.
3. The load-store unit and the mbarrier unit read uniform registers at issue; the TMA and bulk copies do not.
4. Instructions under @P and under @!P exclude each other while P does not change.
5. Instructions of one in-order pipe need no wait before one overwrites what an earlier one reads.
6. Without a scoreboard for its operands, an instruction has read them when a later one of its pipe has. Results without one come before
   those of a later instruction in the same order; loads from global memory have none. The guard of the later instruction may be false:
   ptxas lets loads under one predicate answer for those under another.
7. A fence, and the initialisation of an mbarrier, hold a scoreboard until they have taken effect. Barriers, mbarrier operations and the
   asynchronous units, which let others see it, wait for it.

Registers of wgmma are guarded by gsb0, not by scoreboards; the simulator checks them while it executes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..frontend.ptx import Reg
from .accesses import accesses
from .flow import is_never, spans
from .listing import BOARDS, NO_BOARD, Immediate, Listing, Register, SassInstruction

# In-order pipes by opcode; every opcode of variable latency stands in one of the two tables.
PIPES = {
    opcode: pipe
    for pipe, opcodes in {
        "memory": "ATOMG ATOMS LD LDG LDGSTS LDL LDS LDSM REDG SHFL ST STAS STG STL STS STSM SYNCS",
        "constant": "LDC",
        "tensor memory": "LDTM STTM",
        "transcendental": "BREV F2F F2I FCHK FLO I2F MUFU POPC",
        "tensor copy": "UTMACCTL UTMALDG UTMAPF UTMASTG",
        "tensor product": "UTCBAR UTCCP UTCHMMA UTCQMMA",
        "special register": "S2R",
        "uniform special register": "S2UR",
    }.items()
    for opcode in opcodes.split()
}
# Opcodes whose results also come in the order of their issue, by what orders them. Loads from global memory may overtake each other.
RESULT_ORDERS = {
    opcode: order
    for order, opcodes in {
        "shared memory": "LDS LDSM SHFL",
        "constant": "LDC",
        "tensor memory": "LDTM",
        "transcendental": "BREV F2F F2I FCHK FLO I2F MUFU POPC",
        "special register": "S2R",
        "uniform special register": "S2UR",
    }.items()
    for opcode in opcodes.split()
}
UNORDERED = frozenset({
    "ARRIVES", "BAR", "CCTL", "LDCU", "MATCH", "MOVM", "REDUX", "UBLKCP", "UBLKPF", "USETMAXREG", "UTCATOMSWS",
})  # fmt: skip
# Rule 7: what takes effect, as a register that its instruction writes and that those who let others see it read.
EFFECTS = {"MEMBAR": Reg("the memory barrier", "r"), "FENCE": Reg("the proxy fence", "r"), "SYNCS.EXCH": Reg("the mbarrier", "r")}
RELEASES = frozenset({
    "ARRIVES", "BAR", "HGMMA", "QGMMA", "STAS", "SYNCS", "UBLKCP", "UCGABAR_ARV", "UTCBAR", "UTCHMMA", "UTCQMMA", "UTMALDG", "WARPGROUP",
})  # fmt: skip
_READ_UNIFORMS_LATE = ("U",)  # first letters of the opcodes of units that fetch uniform registers themselves

Events = dict[tuple[int, bool], tuple[int, str | None]]


@dataclass(frozen=True)
class Hazard:
    """A register that an instruction touches too early. earlier: the instruction in flight. what: "result" or "operand" of it."""

    ins: SassInstruction
    earlier: SassInstruction
    registers: tuple[str, ...]
    what: str

    @property
    def reason(self) -> str:
        """Return what the instruction lacks."""
        done = "it waits for no scoreboard that guards" if self.what == "result" else "it overwrites, without a wait,"
        return f"{done} {', '.join(self.registers)}, {self.what} of {self.earlier.place}"

    def __str__(self) -> str:
        return f"{self.ins.place}: {self.reason}"


@dataclass(frozen=True)
class _Facts:
    """Effects of one instruction on the state. results, operands, reads, writes: bit masks of registers."""

    pipe: str | None
    results: int
    operands: int
    reads: int
    writes: int
    result_boards: int
    read_boards: int
    waits: int
    guard: str | None
    written_predicates: frozenset[str]


class ScoreboardCheck:
    """Check of one listing."""

    def __init__(self, listing: Listing) -> None:
        self.code = listing.instructions
        self.spans = spans(listing)
        self.names: list[str] = []
        self.bits: dict[str, int] = {}
        self.facts = [self._facts_of(ins) for ins in self.code]
        self.found: dict[tuple[int, int, str], Hazard] = {}

    def hazards(self) -> tuple[Hazard, ...]:
        """Return every hazard, in the order of the code."""
        entry: list[Events | None] = [None] * len(self.spans)
        entry[0] = {}
        work = [0]
        while work:
            number = work.pop()
            state = dict(entry[number] or {})
            for index in range(self.spans[number].start, self.spans[number].stop):
                self._step(state, index, False)
            for successor in self.spans[number].successors:
                joined = _join(entry[successor], state)
                if joined != entry[successor]:
                    entry[successor] = joined
                    work.append(successor)
        for number, span in enumerate(self.spans):
            known = entry[number]
            if known is not None:
                state = dict(known)
                for index in range(span.start, span.stop):
                    self._step(state, index, True)
        return tuple(self.found[key] for key in sorted(self.found))

    def _mask(self, registers: tuple[Reg, ...]) -> int:
        mask = 0
        for item in registers:
            if item.name not in self.bits:
                self.bits[item.name] = 1 << len(self.names)
                self.names.append(item.name)
            mask |= self.bits[item.name]
        return mask

    def _facts_of(self, ins: SassInstruction) -> _Facts:
        access = accesses(ins)
        control = ins.control
        pipe = PIPES.get(ins.base, ins.base if ins.base in UNORDERED else None)
        late = tuple(item for item in access.reads if _is_read_late(ins, item))
        own = 0 if control.write_board == NO_BOARD else 1 << control.write_board
        reading = 0 if control.read_board == NO_BOARD else 1 << control.read_board
        effect = _effect(ins) if own or reading else ()  # MEMBAR.ALL.GPU of older versions of ptxas holds none
        never = is_never(ins)
        return _Facts(
            pipe=None if never else pipe or (ins.base if effect else None),
            results=self._mask((*access.writes, *effect)),
            operands=self._mask(late),
            reads=0 if never else self._mask((*access.reads, *_awaited(ins))),
            writes=0 if never else self._mask(access.writes),
            result_boards=own or (reading if effect else 0),
            read_boards=reading,
            waits=control.waits | _emptied(ins),
            guard=None if ins.guard is None else f"{'!' if ins.guard.negative else ''}{ins.guard.kind}{ins.guard.number}",
            written_predicates=frozenset(item.name for item in access.writes if item.bank == "p"),
        )

    def _step(self, state: Events, index: int, report: bool) -> None:
        """Let an instruction wait, look at what is in flight, and join it."""
        facts = self.facts[index]
        if facts.waits:
            for key in [key for key, (boards, _) in state.items() if boards & facts.waits]:
                del state[key]
        if report:
            self._report(state, index)
        if facts.written_predicates:
            for key, (boards, guard) in state.items():
                if guard is not None and guard.lstrip("!") in facts.written_predicates:
                    state[key] = boards, None
        if facts.pipe is None:
            return
        self._cover(state, index)
        if facts.results:
            _issue(state, (index, True), facts.result_boards, facts.guard)
        if facts.operands:
            _issue(state, (index, False), facts.result_boards | facts.read_boards, facts.guard)

    def _cover(self, state: Events, index: int) -> None:
        """Apply rule 6: earlier instructions of the pipe without a scoreboard are covered by this one's."""
        facts = self.facts[index]
        if self.code[index].base not in PIPES:
            return
        for (earlier, is_result), (boards, guard) in state.items():
            other = self.facts[earlier]
            bare = not (other.result_boards if is_result else other.read_boards)
            if bare and (comes_before(self.code[earlier], self.code[index]) if is_result else other.pipe == facts.pipe):
                state[earlier, is_result] = boards | facts.result_boards | (0 if is_result else facts.read_boards), guard

    def _report(self, state: Events, index: int) -> None:
        facts = self.facts[index]
        touched = facts.reads | facts.writes
        for (earlier, is_result), (_, guard) in state.items():
            other = self.facts[earlier]
            hit = other.results & touched if is_result else other.operands & facts.writes
            if self.code[earlier].base == self.code[index].base == "LDTM":  # two halves of a register come in order
                hit &= ~facts.writes
            if not hit or (guard is not None and facts.guard == _opposite(guard)):
                continue
            if not is_result and other.pipe == facts.pipe and self.code[index].base in PIPES:
                continue
            names = tuple(name for number, name in enumerate(self.names) if hit >> number & 1)
            what = "result" if is_result else "operand"
            self.found[index, earlier, what] = Hazard(self.code[index], self.code[earlier], names, what)


def comes_before(earlier: SassInstruction, later: SassInstruction) -> bool:
    """Return True when the results of the earlier instruction come before those of the later one."""
    order = RESULT_ORDERS.get(earlier.base)
    return order is not None and order == RESULT_ORDERS.get(later.base)


def _issue(state: Events, key: tuple[int, bool], boards: int, guard: str | None) -> None:
    """Let an instruction join what is in flight. An earlier execution of it may have had another value of its predicate."""
    known = state.get(key)
    state[key] = boards, guard if known is None or known[1] == guard else None


def _effect(ins: SassInstruction) -> tuple[Reg, ...]:
    """Apply rule 7: return what takes effect some time after the issue of an instruction."""
    return tuple(what for opcode, what in EFFECTS.items() if f"{ins.opcode}.".startswith(f"{opcode}."))


def _awaited(ins: SassInstruction) -> tuple[Reg, ...]:
    """Apply rule 7: return what must have taken effect when an instruction issues."""
    if ins.base == "FENCE":
        return (EFFECTS["MEMBAR"],)
    if ins.base not in RELEASES:
        return ()
    return tuple(what for opcode, what in EFFECTS.items() if opcode != "SYNCS.EXCH" or not _effect(ins))


def _is_read_late(ins: SassInstruction, item: Reg) -> bool:
    """Apply rules 1 and 3: return True for an operand that the instruction may read long after its issue."""
    if item.bank == "p":
        return False
    return not item.name.startswith("UR") or ins.base.startswith(_READ_UNIFORMS_LATE)


def _emptied(ins: SassInstruction) -> int:
    """Return the mask of the scoreboard that a DEPBAR.LE SBn, 0 waits for."""
    if ins.base != "DEPBAR":
        return 0
    board, count = ins.operands[:2]
    assert isinstance(board, Register)
    assert isinstance(count, Immediate)
    return 1 << board.number if count.bits == 0 and board.number is not None and board.number < BOARDS else 0


def _opposite(guard: str) -> str:
    return guard[1:] if guard.startswith("!") else f"!{guard}"


def _join(first: Events | None, second: Events) -> Events:
    """Return what may be in flight on either path: covered by what covers it on both."""
    if first is None:
        return dict(second)
    joined = dict(first)
    for key, (boards, guard) in second.items():
        known = joined.get(key)
        joined[key] = (boards, guard) if known is None else (boards & known[0], guard if guard == known[1] else None)
    return joined


def check_scoreboards(listing: Listing) -> tuple[Hazard, ...]:
    """Return the hazards of a kernel's machine code; none for code whose control codes guard every register."""
    return ScoreboardCheck(listing).hazards()

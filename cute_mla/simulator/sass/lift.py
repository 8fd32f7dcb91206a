"""Lifting of machine code to the instructions that the translator takes.

Control flow becomes branches and exits: a branch under two predicates first joins them, a return compares its address with the places
behind calls, and a guard on an instruction that blocks or gathers becomes a branch around it. Instructions that never execute are dropped.
A wait for a scoreboard that loads of tensor memory release becomes an instruction of its own.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

from ..findings import SassError
from ..frontend.ptx import Instruction, LabelRef, Operand, Reg
from ..isa.table import Decoded
from ..isa.table import lookup as lookup_ptx
from .accesses import accesses
from .flow import is_conditional, is_foreign, is_never, spans
from .listing import INSTRUCTION_BYTES, NO_BOARD, Immediate, Listing, Register, SassInstruction, Target
from .listing import Operand as SassOperand
from .table import MachineInstruction, lookup
from .trace import traced

SCRATCH = Register("P", 7)  # PT's number, which no instruction writes
_TRUE = Register("P", None)
_PREDICATES = ("FSETP", "ISETP", "PLOP3")  # under a guard, poison of any source is poison of the result
_MOVES = ("MOV", "IMAD.MOV", "IMAD.U32", "NOP")
_MEETINGS = {"BAR.SYNC.DEFER_BLOCKING": "BAR.SYNC.LANES", "BAR.ARV": "BAR.ARV.LANES"}
_OWN_GUARD = ("ELECT", "R2UR", "REDUX", "VOTE", "VOTEU")  # their emitters look at the guard: it says which lanes take part

Guard = tuple[Reg, bool] | None


class Lift:
    """Lifting of one listing. is_traced: pseudo-instructions hand operands to a MachineTrace.

    decoded: the result. labels: name -> index in it. problems: unknown instructions -> their addresses.
    """

    def __init__(self, listing: Listing, is_traced: bool = False) -> None:
        self.listing = listing
        self.is_traced = is_traced
        self.decoded: list[Decoded] = []
        self.labels: dict[str, int] = {}
        self.problems: dict[str, list[int]] = {}
        self.returns = [ins.address + 16 for ins in listing.instructions if ins.base == "CALL"]
        self.has_regions = any(ins.base == "BSSY" for ins in listing.instructions)
        targets = {operand.label for ins in listing.instructions if ins.base in ("BRA", "BRX", "BRXU", "CALL") for operand in ins.operands
                   if isinstance(operand, Target)}  # fmt: skip
        boards = {ins.control.write_board for ins in listing.instructions if ins.base == "LDTM"}
        self.load_boards = sum(1 << board for board in boards if board != NO_BOARD)
        self.routines = checks_of_routines(listing)
        self.meetings = barriers_of_lanes(listing)
        self.places = {listing.instructions[listing.index(label)].address for label in targets} | set(self.returns)

    def run(self) -> Lift:
        """Lift every instruction."""
        for ins in self.listing.instructions:
            if ins.address in self.places:
                self.labels[label_at(ins.address)] = len(self.decoded)
            if ins.control.waits & self.load_boards:
                self._ordinary(replace(ins, opcode="AWAIT", operands=(), guard=None), None)
            if not is_never(ins):
                self._lift(ins)
        return self

    def _lift(self, ins: SassInstruction) -> None:
        if ins.base == "EXIT":
            self._exit(ins)
        elif ins.address in self.meetings:
            self._meet(ins)
        elif ins.opcode == "BRA.DIV":
            self._ordinary(replace(ins, opcode="CONVERGED", operands=ins.operands[:1]), None)
        elif is_foreign(ins):
            self._ordinary(replace(ins, opcode="FOREIGN", operands=()), guard_of(ins.guard))
        elif ins.base in ("BRA", "CALL"):
            self._branch(ins)
        elif ins.base in ("BRX", "BRXU"):
            self._jump_by_table(ins)
        elif ins.base == "LEPC":
            self._ordinary(replace(ins, operands=(ins.operands[0], Immediate(self._address(ins.operands[1])))), guard_of(ins.guard))
        elif ins.base == "RET":
            self._return(ins)
        else:
            self._ordinary(ins, guard_of(ins.guard))

    def _ordinary(self, ins: SassInstruction, guard: Guard) -> None:
        found = lookup(ins.opcode)
        if found is None:
            self.problems.setdefault(ins.opcode, []).append(ins.address)
            return
        spec, match = found
        if ins.base in _OWN_GUARD:
            guard = None
        if guard is not None and (spec.starts or spec.needs):
            skip = self._skip(ins, guard)
            self._ordinary(replace(ins, guard=None), None)
            self.labels[skip] = len(self.decoded)
            return
        if guard is not None and spec.taint == "own" and spec.pure and ins.base not in _PREDICATES:
            spec = replace(spec, pure=False)  # its own rule of poison runs on the lanes under the guard alone
        try:
            access = accesses(ins)
        except SassError as error:
            self.problems[str(error)] = []
            return
        record = traced(ins) if self.is_traced else None
        if record is not None:
            self.decoded.append(record)
        instruction = MachineInstruction(ins.opcode, [], guard, 0, f"{ins.address:#x} {ins.text}", ins)
        self.decoded.append(Decoded(instruction, spec, match, access.reads, access.writes, access.accumulators))

    def _skip(self, ins: SassInstruction, guard: Guard) -> str:
        """Branch over what follows unless a guard holds. Return the label to place behind it."""
        assert guard is not None
        name = f"skip {ins.address:#x}"
        self._jump(ins, name, (guard[0], not guard[1]))
        return name

    def _jump(self, ins: SassInstruction, label: str, guard: Guard) -> None:
        self._control(ins, "bra", [LabelRef(label)], guard)

    def _control(self, ins: SassInstruction, opcode: str, operands: list[Operand | None], guard: Guard) -> None:
        found = lookup_ptx(opcode)
        assert found is not None
        instruction = Instruction(opcode, operands, guard, 0, f"{ins.address:#x} {ins.text}")
        self.decoded.append(Decoded(instruction, *found, () if guard is None else (guard[0],), ()))

    def _exit(self, ins: SassInstruction) -> None:
        guard = guard_of(ins.guard)
        skip = None if guard is None else self._skip(ins, guard)
        if self.has_regions:
            self._ordinary(replace(ins, opcode="LEAVE", operands=(), guard=None), None)
        self._control(ins, "exit", [], None)
        if skip is not None:
            self.labels[skip] = len(self.decoded)

    def _branch(self, ins: SassInstruction) -> None:
        """Lift a branch or call under its guard and its predicate operand.

        A warp that takes BRA.U takes it whole: when all its lanes would, with ANY when some would. Behind a BRA.U that is not taken
        ptxas tests the predicate again.
        """
        *conditions, target = ins.operands
        supported = ins.opcode in ("BRA", "BRA.U", "BRA.U.ANY", "CALL.REL.NOINC") and isinstance(target, Target)
        if not supported or len(conditions) > 1 or not all(isinstance(item, Register) and item.is_predicate for item in conditions):
            self.problems.setdefault(ins.opcode, []).append(ins.address)
            return
        assert isinstance(target, Target)
        label = label_at(self._address(target))
        tests = [item for item in (ins.guard, *conditions) if isinstance(item, Register) and item != _TRUE]
        if len(tests) == 2:
            both: tuple[SassOperand, ...] = (SCRATCH, _TRUE, *tests, _TRUE, Immediate(0x80), Immediate(0))
            self._ordinary(replace(ins, opcode="PLOP3.LUT", operands=both, guard=None), None)
            tests = [SCRATCH]
        if tests and tests[0].kind == "P" and ins.opcode != "BRA" and ins.base == "BRA":
            vote = "VOTE.ANY" if ins.opcode == "BRA.U.ANY" else "VOTE.ALL"
            self._ordinary(replace(ins, opcode=vote, operands=(SCRATCH, *tests), guard=None), None)
            tests = [SCRATCH]
        if tests and ins.address in self.routines:
            jumps = self.routines[ins.address] != tests[0].negative  # as the predicate without its sign
            plain = replace(tests[0], negative=False)
            self._ordinary(replace(ins, opcode="QUICK", operands=(SCRATCH, plain, Immediate(int(jumps))), guard=None), None)
            tests = [replace(SCRATCH, negative=tests[0].negative)]
        self._jump(ins, label, guard_of(tests[0]) if tests else None)

    def _meet(self, ins: SassInstruction) -> None:
        """Lift a branch of lanes to a barrier that their warp may reach in different places, or that barrier, which counts lanes here."""
        if ins.base == "BAR":
            self._ordinary(replace(ins, opcode=_MEETINGS[ins.opcode]), guard_of(ins.guard))
        elif ins.opcode == "BRA.CONV":
            self._branch(replace(ins, opcode="BRA", operands=ins.operands[1:]))

    def _address(self, target: SassOperand) -> int:
        """Return the address of a label."""
        assert isinstance(target, Target)
        return self.listing.instructions[self.listing.index(target.label)].address

    def _jump_by_table(self, ins: SassInstruction) -> None:
        """Lift an indirect branch, to a register plus a literal behind it, as a comparison with each of the places that ptxas lists."""
        value, offset, *targets = ins.operands
        if ins.guard is not None or not isinstance(offset, Immediate) or not targets:
            self.problems.setdefault(ins.opcode, []).append(ins.address)
            return
        for target in targets:
            place = self._address(target)
            expected = place - (ins.address + INSTRUCTION_BYTES) - offset.bits & 0xFFFFFFFF
            self._ordinary(replace(ins, opcode="RETURN", operands=(SCRATCH, value, Immediate(expected))), None)
            self._jump(ins, label_at(place), guard_of(SCRATCH))
        self._ordinary(replace(ins, opcode="NOWHERE", operands=()), None)
        self._control(ins, "exit", [], None)

    def _return(self, ins: SassInstruction) -> None:
        """Lift a return as a comparison of its address with every place behind a call."""
        value = ins.operands[0]
        for place in self.returns:
            test = replace(ins, opcode="RETURN", operands=(SCRATCH, value, Immediate(place)), guard=None)
            self._ordinary(test, None)
            self._jump(ins, label_at(place), guard_of(SCRATCH))
        self._ordinary(replace(ins, opcode="NOWHERE", operands=(), guard=None), None)
        self._control(ins, "exit", [], None)


def checks_of_routines(listing: Listing) -> dict[int, bool]:
    """Return the branches that decide whether a routine of arithmetic is called: address -> whether taking the branch leaves it out.

    Such a branch leads to a block of moves that ends with the call, or steps over it.
    """
    code, blocks = listing.instructions, spans(listing)
    found: dict[int, bool] = {}
    for block in blocks:
        last = code[block.stop - 1]
        moves = all(ins.opcode.startswith(_MOVES) for ins in code[block.start : block.stop - 1])
        if last.base != "CALL" or not moves or not is_arithmetic(last):
            continue
        for other in blocks:
            branch = code[other.stop - 1]
            if branch.base == "BRA" and is_conditional(branch) and block in [blocks[number] for number in other.successors]:
                found[branch.address] = other.stop == block.start
    return found


def barriers_of_lanes(listing: Listing) -> set[int]:
    """Return the addresses of barriers that the lanes of a warp may reach in different places, and of the branches ahead of them.

    BRA.DIV leads diverged warps, and BRA.CONV others past, to code that gathers lanes from all such places (WARPSYNC.COLLECTIVE.ALL).
    """
    code = listing.instructions
    found: set[int] = set()
    for index, ins in enumerate(code):
        if ins.opcode not in ("BRA.DIV", "BRA.CONV"):
            continue
        (target,) = (listing.index(operand.label) for operand in ins.operands if isinstance(operand, Target))
        apart, together = (target, index + 1) if ins.opcode == "BRA.DIV" else (index + 1, target)
        gathered = [item.opcode for item in takewhile(lambda item: item.base != "ENDCOLLECTIVE", code[apart:])]
        meeting = next((opcode for opcode in gathered if opcode in _MEETINGS), None)
        if "WARPSYNC.COLLECTIVE.ALL" in gathered and meeting is not None:
            found |= {ins.address, next(item.address for item in code[together:] if item.opcode == meeting)}
    return found


def is_arithmetic(call: SassInstruction) -> bool:
    """Return True for the call of a routine of ptxas's that computes, and does not trap."""
    labels = [item.label for item in call.operands if isinstance(item, Target)]
    return all(label.startswith("$__internal_") and "trap" not in label for label in labels)


def label_at(address: int) -> str:
    """Return the label of an address."""
    return f"at {address:#x}"


def guard_of(guard: Register | None) -> Guard:
    """Return a guard as the translator takes it; None for PT."""
    if guard is None or guard.number is None:
        return None
    return guard.registers()[0], guard.negative

"""Control flow of machine code: basic blocks and the edges between them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..findings import SassError
from .listing import Listing, Register, SassInstruction, Target

JUMPS = ("BRA", "BRX", "BRXU", "CALL", "EXIT", "RET")
_REFUSED = ("JMP", "JMX", "JMXU", "KILL", "WARPSYNC.EXCLUSIVE")


@dataclass
class Span:
    """A basic block: instructions start to stop of a listing. successors: indices of the blocks that may follow."""

    start: int
    stop: int
    successors: list[int] = field(default_factory=list)


def is_never(ins: SassInstruction) -> bool:
    """Return True for an instruction guarded by !PT, which never executes."""
    return ins.guard is not None and ins.guard.number is None and ins.guard.negative


def is_conditional(ins: SassInstruction) -> bool:
    """Return True for a branch or exit that may fall through."""
    guarded = ins.guard is not None and not (ins.guard.number is None and not ins.guard.negative)
    return guarded or any(isinstance(operand, Register) for operand in ins.operands if ins.base == "BRA")


def is_foreign(ins: SassInstruction) -> bool:
    """Return True for a call of a function outside the cubin, which returns behind the call."""
    return ins.base == "CALL" and not any(isinstance(operand, Target) for operand in ins.operands)


def spans(listing: Listing) -> list[Span]:
    """Split a listing into basic blocks. A return goes to every place behind a call. SassError for indirect jumps."""
    code = listing.instructions
    jumps = {index: _targets(listing, ins) for index, ins in enumerate(code) if ins.base in JUMPS}
    for ins in code:
        if ins.base in _REFUSED:
            raise SassError(f"{ins.address:#x}: {ins.text!r}: indirect control flow is not supported")
    returns = [index + 1 for index, ins in enumerate(code) if ins.base == "CALL" and index + 1 < len(code)]
    starts = sorted({0, *(target for targets in jumps.values() for target in targets), *(index + 1 for index in jumps), *returns})
    starts = [start for start in starts if start < len(code)]
    number = {start: index for index, start in enumerate(starts)}
    blocks = [Span(start, stop) for start, stop in zip(starts, [*starts[1:], len(code)], strict=True)]
    for block in blocks:
        last = code[block.stop - 1]
        following = list(jumps.get(block.stop - 1, ()))
        if last.base == "RET":
            following += returns
        if (last.base not in JUMPS or is_conditional(last) or is_foreign(last)) and block.stop < len(code):
            following.append(block.stop)
        block.successors = [number[target] for target in dict.fromkeys(following)]
    return blocks


def _targets(listing: Listing, ins: SassInstruction) -> tuple[int, ...]:
    """Return where a jump leads, besides behind it. A return's label is the code that its address counts from."""
    if ins.base in ("EXIT", "RET") or is_foreign(ins):
        return ()
    found = [operand for operand in ins.operands if isinstance(operand, Target)]
    if ins.base in ("BRX", "BRXU"):
        if not found:
            raise SassError(f"{ins.address:#x}: {ins.text!r} without a list of its targets: indirect control flow is not supported")
        return tuple(listing.index(operand.label) for operand in found)
    if len(found) != 1:
        raise SassError(f"{ins.address:#x}: {ins.text!r} without one target")
    return (listing.index(found[0].label),)

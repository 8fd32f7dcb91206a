"""Static search for exposed loads: a main loop waits for a global load soon after it has issued it, so that nothing hides the latency.

A main loop runs once a tile in some role. By definition here, it is a natural loop that contains a wait for a phase of an mbarrier and no
smaller loop that does. Loops that do nothing but test a phase again are not counted as loops. Loops without such a wait inside a main loop
belong to it.

A load is exposed if, on some path inside the loop, an instruction waits for the load's scoreboard within MIN_CLOCKS stall clocks of it.
Stall clocks are what the warp's own stall counts add up to; other waits on the way are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .flow import Span, is_never, spans
from .listing import NO_BOARD, Listing, SassInstruction
from .loops import Loop, natural_loops

MIN_CLOCKS = 150  # half the latency of L2, 281 to 295 clocks
LOADS = ("LD", "LDG")
_POLLING = (
    *("BRA", "IMAD", "ISETP", "LOP3", "MOV", "NANOSLEEP", "NOP", "PLOP3", "R2UR", "SEL", "SHF", "SYNCS"),
    *("UISETP", "ULEA", "ULOP3", "UMOV", "USHF", "YIELD"),
)


@dataclass(frozen=True)
class ExposedLoad:
    """A global load in a main loop and the instruction that waits for it. clocks: the fewest stall clocks between them."""

    load: SassInstruction
    waiter: SassInstruction
    clocks: int

    def __str__(self) -> str:
        waits = f"{self.waiter.address:#x} {self.waiter.text} waits"
        return f"{waits} for {self.load.address:#x} {self.load.text} {self.clocks} stall clocks after its issue"


def exposed_loads(listing: Listing) -> tuple[ExposedLoad, ...]:
    """Return the exposed loads of all main loops, in the order of the code."""
    code, blocks = listing.instructions, spans(listing)
    found: dict[int, ExposedLoad] = {}
    for loop in main_loops(code, blocks):
        for number in sorted(loop.blocks):
            for index in range(blocks[number].start, blocks[number].stop):
                ins = code[index]
                if ins.base in LOADS and ins.control.write_board != NO_BOARD and not is_never(ins):
                    exposed = _first_wait(code, blocks, loop, number, index)
                    if exposed is not None:
                        found[index] = exposed
    return tuple(found[index] for index in sorted(found))


def main_loops(code: Sequence[SassInstruction], blocks: Sequence[Span]) -> tuple[Loop, ...]:
    """Return the main loops."""
    waiting = [loop for loop in natural_loops(blocks) if _waits(code, blocks, loop) and not _only_polls(code, blocks, loop)]
    return tuple(loop for loop in waiting if not any(other.blocks < loop.blocks for other in waiting))


def _waits(code: Sequence[SassInstruction], blocks: Sequence[Span], loop: Loop) -> bool:
    return any(ins.base == "SYNCS" and ins.modifiers[0] == "PHASECHK" for ins in _instructions(code, blocks, loop))


def _only_polls(code: Sequence[SassInstruction], blocks: Sequence[Span], loop: Loop) -> bool:
    """Return True for a loop that does nothing but test phases until one is complete."""
    inside = list(_instructions(code, blocks, loop))
    return all(ins.base in _POLLING and (ins.base != "SYNCS" or ins.modifiers[0] == "PHASECHK") for ins in inside)


def _instructions(code: Sequence[SassInstruction], blocks: Sequence[Span], loop: Loop) -> list[SassInstruction]:
    return [ins for number in loop.blocks for ins in code[blocks[number].start : blocks[number].stop] if not is_never(ins)]


def _first_wait(code: Sequence[SassInstruction], blocks: Sequence[Span], loop: Loop, number: int, index: int) -> ExposedLoad | None:
    """Return the earliest wait for a load inside its loop, or None if there is none within MIN_CLOCKS."""
    board = code[index].control.write_board
    best: ExposedLoad | None = None
    reached: dict[int, int] = {}  # block -> fewest clocks at its first instruction
    work = [(number, index + 1, max(1, code[index].control.stall))]
    while work:
        block, start, clocks = work.pop()
        for place in range(start, blocks[block].stop):
            ins = code[place]
            if clocks >= (MIN_CLOCKS if best is None else best.clocks):
                break
            if ins.control.waits >> board & 1:
                best = ExposedLoad(code[index], ins, clocks)
                break
            clocks += max(1, ins.control.stall)
        else:
            for successor in blocks[block].successors:
                if successor in loop.blocks and clocks < reached.get(successor, MIN_CLOCKS):
                    reached[successor] = clocks
                    work.append((successor, blocks[successor].start, clocks))
    return best

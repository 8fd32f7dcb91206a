"""Tensor memory, and operands of tcgen05 work in shared memory, that unfinished work still uses, and what must not touch them yet.

As in in_use.py, a check looks at the moment of access: as long as nobody has waited for the work, nothing can order the access after it.
Work on the queue of a tensor core is ordered among itself. For a tcgen05.ld or tcgen05.st the order needs two steps: the warp knows that
it is done, and then arrives somewhere. A store is done at tcgen05.wait::st. A load is done at tcgen05.wait::ld, or when one of its
registers is used: PTX respects that dependence (9.7.16.6.4.5), and the machine code waits for the whole load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .isa.table import Decoded
from .tensor_pipe import Cells, Work

if TYPE_CHECKING:
    from .blocks import Block
    from .cta import Cta, Origin
    from .groups import Group
    from .layout import Layout
    from .ptx import Reg
    from .registers import Window


@dataclass
class Move:
    """A tcgen05.ld or tcgen05.st of one warp. done: the warp knows that it is. fresh: issued in the block that runs now.

    holders: registers that hold what was loaded, a bit mask per bank.
    """

    warp: int
    write: bool
    cells: Cells
    origin: Origin
    holders: dict[str, int] = field(default_factory=dict)
    done: bool = False
    fresh: bool = True

    @property
    def what(self) -> str:
        """The instruction."""
        return f"a tcgen05.{'st' if self.write else 'ld'}{place(self.origin)}"

    def hinders(self, cta: Cta, warp: int) -> bool:
        """Whether an access by a warp can come before the end of this one."""
        return not self.done or warp != self.warp or cta is not self.cells.cta


# ---------------------------------------------------------------- when loads and stores are done


class Uses:
    """What a block does to registers: touched by more than a move (bit mask per bank), and the moves (from, to)."""

    def __init__(self, instructions: list[Decoded], layout: Layout) -> None:
        self.touched: dict[str, int] = {}
        self.moves: list[tuple[list[tuple[str, int]], list[tuple[str, int]]]] = []
        for item in instructions:
            reads, writes = bits(item.reads, layout), bits(item.writes, layout)
            if item.instruction.opcode.startswith("mov."):
                self.moves.append((reads, writes))
            elif not item.instruction.opcode.startswith("tcgen05.ld."):
                for bank, bit in (*reads, *writes):
                    self.touched[bank] = self.touched.get(bank, 0) | bit


def bits(registers: tuple[Reg, ...], layout: Layout) -> list[tuple[str, int]]:
    """Bank and bit of registers that can hold loaded values."""
    return [(register.bank, 1 << layout.slot(register)) for register in registers if register.bank != "p"]


def note_uses(cta: Cta, group: Group, block: Block) -> None:
    """A group has run a block: loads whose registers it used are done."""
    if block.uses is None:
        block.uses = Uses(block.instructions, cta.machine.entry.layout)
    uses = block.uses
    waiting = False
    for move in cta.moves:
        if move.write or move.done or move.warp not in group.lane_set.warp_set:
            waiting |= not (move.write or move.done)
        elif move.fresh:
            move.fresh, waiting = False, True
        else:
            for sources, targets in uses.moves:
                if any(move.holders.get(bank, 0) & bit for bank, bit in sources):
                    for bank, bit in targets:
                        move.holders[bank] = move.holders.get(bank, 0) | bit
            move.done = any(uses.touched.get(bank, 0) & mask for bank, mask in move.holders.items())
            waiting |= not move.done
    cta.loading = waiting


def publish(cta: Cta, group: Group) -> None:
    """Warps arrive somewhere: others may know from now on that what they have finished is done."""
    cta.moves = [move for move in cta.moves if not move.done or move.warp not in group.lane_set.warp_set]


# ---------------------------------------------------------------- unfinished work


def unseen_work(cta: Cta) -> Iterator[Work]:
    """Unfinished work of this CTA's and its peer's tensor cores."""
    for other in cta.cluster.ctas:
        if other.rank >> 1 == cta.rank >> 1 and other.tensor_pipe is not None:
            for work in other.tensor_pipe.unseen:
                if not work.seen:
                    yield work


def shared_readers(cta: Cta, low: int, high: int) -> Iterator[tuple[str, Origin, int, int]]:
    """Work that may still read bytes of [low, high) of a CTA's shared memory: (what, where issued, start, stop)."""
    for work in unseen_work(cta):
        for owner, ranges in work.sources():
            if owner is cta:
                for start, stop in ranges:
                    if start < high and low < stop:
                        yield work.what, work.origin, start, stop


# ---------------------------------------------------------------- checks


def check_move(w: Window, warp: int, cells: Cells, write: bool) -> None:
    """A finding when a warp loads or stores cells that work, or another load or store, may still use."""
    who = "a tcgen05.st writes" if write else "a tcgen05.ld reads"
    for work in unseen_work(cells.cta):
        touched = [*work.written(), *work.read()] if write else work.written()
        if any(cells.meets(other) for other in touched):
            report(w, f"{who} tensor memory that {work.what}{place(work.origin)} uses and nobody has waited for")
            return
    for move in cells.cta.moves:
        if (move.write or write) and move.hinders(cells.cta, warp) and move.cells.meets(cells):
            report(w, f"{who} tensor memory that {move.what} uses; {reason(move)}")
            return


def check_work(w: Window, read: Sequence[Cells], written: Sequence[Cells], what: str) -> None:
    """A finding when work is issued on cells that a load or store may still use."""
    for cells, writes in [(cells, True) for cells in written] + [(cells, False) for cells in read]:
        for move in cells.cta.moves:
            if (writes or move.write) and move.hinders(w.cta, w.warps[0]) and move.cells.meets(cells):
                report(w, f"{what} {'writes' if writes else 'reads'} tensor memory that {move.what} uses; {reason(move)}")
                return


def check_sources(w: Window, sources: Iterator[tuple[Cta, tuple[tuple[int, int], ...]]], what: str) -> None:
    """A finding when work is issued whose operands in shared memory a copy has not delivered."""
    pending = [(copy, *write) for copy in w.cta.machine.pending for write in copy.writes]
    if not pending:
        return
    for owner, ranges in sources:
        for copy, target, low, high in pending:
            if target is owner and any(start < high and low < stop for start, stop in ranges):
                report(w, f"{what} reads shared memory that an asynchronous copy{place(copy.origin)} still writes")
                return


def check_release(w: Window, cells: Cells) -> None:
    """A finding when columns are freed that anything still uses."""
    for work in unseen_work(cells.cta):
        if any(cells.meets(other) for other in (*work.written(), *work.read())):
            report(w, f"tcgen05.dealloc of tensor memory that {work.what}{place(work.origin)} uses and nobody has waited for")
            return
    for move in cells.cta.moves:
        if move.hinders(w.cta, w.warps[0]) and move.cells.meets(cells):
            report(w, f"tcgen05.dealloc of tensor memory that {move.what} uses; {reason(move)}")
            return


def reason(move: Move) -> str:
    """Why nobody can know that a load or store is done."""
    if move.done:
        return f"warp {move.warp} has not arrived anywhere since that was done"
    return f"warp {move.warp} has not executed tcgen05.wait::{'st' if move.write else 'ld'}"


def place(origin: Origin) -> str:
    """The PTX line of an instruction."""
    return "" if origin.instruction is None else f" (PTX line {origin.instruction.line})"


def report(w: Window, message: str) -> None:
    """The finding."""
    w.cta.report(w, "missing_wait", message)

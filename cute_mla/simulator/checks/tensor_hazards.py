"""Tensor memory, and operands of tcgen05 work in shared memory: findings where an access is not ordered after earlier ones.

order.py says who knows what. Work on the queue of a tensor core is ordered among itself. A tcgen05.ld or tcgen05.st is known to be done by
its own warp after tcgen05.wait, and by others when that warp has arrived somewhere and they have waited there. A load is also done when one
of its registers is used: PTX respects that dependence (9.7.16.6.4.5), and the machine code waits for the whole load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..isa.table import Decoded
from ..numerics.wgmma import overlapping
from ..units.tensor_pipe import Cells, TensorPipe, Work

if TYPE_CHECKING:
    from ..codegen.control_flow import Block
    from ..engine.groups import Group
    from ..frontend.layout import Layout
    from ..frontend.ptx import Reg
    from ..state.cta import Cta, Origin
    from ..state.registers import Window


@dataclass
class Move:
    """A tcgen05.ld or tcgen05.st of one warp. issued: time of the warp from which on this is behind it. time: when it knew that this was
    done; None before. fresh: issued in the block that runs now. holders: registers that hold what was loaded, a bit mask per bank.
    """

    warp: int
    write: bool
    cells: Cells
    origin: Origin
    issued: int
    holders: dict[str, int] = field(default_factory=dict)
    time: int | None = None
    fresh: bool = True

    @property
    def what(self) -> str:
        """The instruction."""
        return f"a tcgen05.{'st' if self.write else 'ld'}{place(self.origin)}"

    def hinders(self, cta: Cta, warp: int) -> bool:
        """Whether an access by a warp can come before the end of this one."""
        if self.time is None:
            return True
        clocks = cta.cluster.clocks
        return int(clocks.now[clocks.row(cta, warp), clocks.row(self.cells.cta, self.warp)]) < self.time


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
    for move in cta.moves.values():
        if move.write or move.time is not None:
            continue
        if move.warp not in group.lane_set.warp_set:
            waiting = True
        elif move.fresh:
            move.fresh, waiting = False, True
        else:
            for sources, targets in uses.moves:
                if any(move.holders.get(bank, 0) & bit for bank, bit in sources):
                    for bank, bit in targets:
                        move.holders[bank] = move.holders.get(bank, 0) | bit
            if any(uses.touched.get(bank, 0) & mask for bank, mask in move.holders.items()):
                move.time = cta.cluster.clocks.tick(cta, move.warp)
            else:
                waiting = True
    cta.loading = waiting


# ---------------------------------------------------------------- unfinished work


def pair_cores(target: Cta) -> Iterator[TensorPipe]:
    """The tensor cores that may work on a CTA's memory: its own and its peer's."""
    for other in target.cluster.ctas:
        if other.rank >> 1 == target.rank >> 1 and other.tensor_pipe is not None:
            yield other.tensor_pipe


def unknown_work(target: Cta, cta: Cta, warps: Sequence[int]) -> Iterator[Work]:
    """Work on a CTA's memory that some warps (of another CTA, perhaps) do not know to be done."""
    clocks = target.cluster.clocks
    for core in pair_cores(target):
        yield from core.unknown(clocks.least(cta, warps, clocks.core(core.cta)))


def shared_readers(target: Cta, low: int, high: int, cta: Cta, warps: Sequence[int]) -> Iterator[tuple[str, Origin, int, int]]:
    """Work that may still read bytes of [low, high) of a CTA's shared memory: (what, where issued, start, stop)."""
    for work in unknown_work(target, cta, warps):
        for owner, ranges in work.sources():
            if owner is target:
                for start, stop in overlapping(ranges, low, high):
                    yield work.what, work.origin, start, stop


# ---------------------------------------------------------------- checks


def check_move(w: Window, warp: int, cells: Cells, write: bool) -> None:
    """A finding when a warp loads or stores cells that work, or another load or store, may still use."""
    who = "a tcgen05.st writes" if write else "a tcgen05.ld reads"
    cta = cells.cta
    for work in unknown_work(cta, cta, (warp,)):
        if meet(work, cells, write):
            report(w, f"{who} tensor memory that {work.what}{place(work.origin)} uses, without a wait for a commit of it")
            return
    for move in cta.moves.values():
        if (move.write or write) and move.cells.meets(cells):
            if move.hinders(cta, warp):
                report(w, f"{who} tensor memory that {move.what} uses; {reason(move)}")
                return
            if check_fences(w, cta, warp, move, who):
                return
    clocks = cta.cluster.clocks
    if not clocks.tensor_fences:
        return
    for core in pair_cores(cta):
        for work in core.unknown(int(clocks.after[clocks.row(cta, warp), clocks.rows + core.cta.rank])):
            if meet(work, cells, write):
                what = f"{who} tensor memory that {work.what}{place(work.origin)} uses"
                message = f"{what}: no tcgen05.fence::after_thread_sync of warp {warp} since it has waited for that"
                w.cta.report(w, "missing_fence", message)
                return


def meet(work: Work, cells: Cells, write: bool) -> bool:
    """Whether work and a load or store of cells may not come together."""
    return any(cells.meets(other) for other in ([*work.written(), *work.read()] if write else work.written()))


def check_fences(w: Window, cta: Cta, warp: int, move: Move, who: str) -> bool:
    """A finding when an access of another warp to the cells of a load or store has been ordered, but without tcgen05.fence."""
    clocks = cta.cluster.clocks
    row, other = clocks.row(cta, warp), clocks.row(move.cells.cta, move.warp)
    if not clocks.tensor_fences or row == other or clocks.after[row, other] >= move.issued:
        return False
    missing = f"no tcgen05.fence::after_thread_sync of warp {warp} since it has waited for that"
    if clocks.now[row, clocks.handed + other] < move.issued:
        missing = f"no tcgen05.fence::before_thread_sync of warp {move.warp} between that and its arrival"
    w.cta.report(w, "missing_fence", f"{who} tensor memory that {move.what} uses: {missing}")
    return True


def check_work(w: Window, warp: int, read: Sequence[Cells], written: Sequence[Cells], what: str) -> None:
    """A finding when a warp issues work on cells that a load or store may still use."""
    for cells, writes in [(cells, True) for cells in written] + [(cells, False) for cells in read]:
        for move in cells.cta.moves.values():
            if (writes or move.write) and move.cells.meets(cells):
                who = f"{what} {'writes' if writes else 'reads'}"
                if move.hinders(w.cta, warp):
                    report(w, f"{who} tensor memory that {move.what} uses; {reason(move)}")
                    return
                if check_fences(w, w.cta, warp, move, who):
                    return


def check_release(w: Window, cells: Cells) -> None:
    """A finding when columns are freed that anything still uses."""
    for work in unknown_work(cells.cta, w.cta, w.warps):
        if any(cells.meets(other) for other in (*work.written(), *work.read())):
            report(w, f"tcgen05.dealloc of tensor memory that {work.what}{place(work.origin)} uses, without a wait for a commit of it")
            return
    for move in cells.cta.moves.values():
        if move.cells.meets(cells) and move.hinders(w.cta, w.warps[0]):
            report(w, f"tcgen05.dealloc of tensor memory that {move.what} uses; {reason(move)}")
            return


def reason(move: Move) -> str:
    """Why nobody can know that a load or store is done."""
    if move.time is not None:
        return f"nothing that warp {move.warp} arrived at since that was done has been waited for"
    return f"warp {move.warp} has not executed tcgen05.wait::{'st' if move.write else 'ld'}"


def place(origin: Origin) -> str:
    """The PTX line of an instruction."""
    return "" if origin.instruction is None else f" (PTX line {origin.instruction.line})"


def report(w: Window, message: str) -> None:
    """The finding."""
    w.cta.report(w, "missing_wait", message)

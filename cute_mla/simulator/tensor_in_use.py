"""Tensor memory, and operands of tcgen05 work in shared memory, that unfinished work still uses, and what must not touch them yet.

As in in_use.py, a check looks at the moment of access: as long as nobody has waited for the work, nothing can order the access after it.
Work on the queue of a tensor core is ordered among itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .tensor_pipe import Cells, Work

if TYPE_CHECKING:
    from .cta import Cta, Origin
    from .registers import Window


@dataclass(frozen=True)
class Move:
    """A tcgen05.ld or tcgen05.st of one warp that has not waited for it."""

    warp: int
    write: bool
    cells: Cells
    origin: Origin

    @property
    def what(self) -> str:
        """The instruction."""
        return "a tcgen05.st" if self.write else "a tcgen05.ld"


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


def check_move(w: Window, warp: int, cells: Cells, write: bool) -> None:
    """A finding when a warp loads or stores cells that work writes (or, for a store, reads) and nobody has waited for."""
    for work in unseen_work(cells.cta):
        touched = [*work.written(), *work.read()] if write else work.written()
        if any(cells.meets(other) for other in touched):
            who = "a tcgen05.st writes" if write else "a tcgen05.ld reads"
            report(w, f"{who} tensor memory that {work.what}{place(work.origin)} uses and nobody has waited for")
            return
    for move in cells.cta.moves:
        if move.cells.meets(cells) and (move.write or (write and move.warp != warp)):
            who = "a tcgen05.st writes" if write else "a tcgen05.ld reads"
            report(w, f"{who} tensor memory that {move.what}{place(move.origin)} uses, without a tcgen05.wait between")
            return


def check_work(w: Window, read: Sequence[Cells], written: Sequence[Cells], what: str) -> None:
    """A finding when work is issued on cells that a tcgen05.ld or tcgen05.st without a wait still uses."""
    for cells, writes in [(cells, True) for cells in written] + [(cells, False) for cells in read]:
        for move in cells.cta.moves:
            if (writes or move.write) and move.cells.meets(cells):
                verb = "writes" if writes else "reads"
                report(w, f"{what} {verb} tensor memory that {move.what}{place(move.origin)} uses, without a tcgen05.wait between")
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
        if move.cells.meets(cells):
            report(w, f"tcgen05.dealloc of tensor memory that {move.what}{place(move.origin)} uses, without a tcgen05.wait before")
            return


def place(origin: Origin) -> str:
    """The PTX line of an instruction."""
    return "" if origin.instruction is None else f" (PTX line {origin.instruction.line})"


def report(w: Window, message: str) -> None:
    """The finding."""
    w.cta.report(w, "missing_wait", message)

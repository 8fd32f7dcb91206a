"""Shared memory that asynchronous work still reads or writes, and what must not touch it yet.

These checks look at the moment of access: as long as no thread has waited for the work, nothing can order the access after it. So a
finding is never a false alarm, in any schedule; but an access that a lucky schedule puts after the wait is not found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from . import tensor_in_use, wgmma
from .async_units import Chain
from .registers import Window

if TYPE_CHECKING:
    from .cta import Cta, Origin


def operands(chain: Chain) -> Iterator[wgmma.Operand]:
    """The operands in shared memory that a chain of wgmmas reads."""
    yield wgmma.operand(tuple(chain.b), chain.form.n, chain.b_major)
    if not chain.from_registers:
        yield wgmma.operand(tuple(chain.a), wgmma.M, chain.a_major)


def operand_ranges(chain: Chain) -> Iterator[tuple[int, int]]:
    """The byte ranges of shared memory that a chain of wgmmas reads."""
    for where in operands(chain):
        yield from where.ranges


def readers(w: Window, target: Cta, low: int, high: int, warps: Sequence[int]) -> Iterator[tuple[str, Origin, int, int]]:
    """What may still read bytes of [low, high) in a CTA's shared memory as far as warps of the window know: (what, where issued,
    start, stop)."""
    for pipe in target.pipes.values():
        for chain in pipe.unwaited():
            for start, stop in operand_ranges(chain):
                if start < high and low < stop:
                    yield "a wgmma", chain.origin, start, stop
    if target.tensor is not None:
        yield from tensor_in_use.shared_readers(target, low, high, w.cta, warps)
    if target.reading:
        target.reading = [copy for copy in target.reading if not copy.waited]
        for copy in target.reading:
            if copy.source[0] < high and low < copy.source[1]:
                yield "a bulk store", copy.origin, *copy.source


def check_copy(w: Window, warp: int, targets: list[Cta], low: int, high: int) -> None:
    """A finding when a warp issues a copy to shared memory that unfinished work reads."""
    for target in targets:
        if target.pipes or target.reading or target.tensor is not None:
            for what, origin, _, _ in readers(w, target, low, high, (warp,)):
                report(w, "an asynchronous copy overwrites", what, origin)
                return


def check_store(w: Window, warps: np.ndarray, target: Cta, offsets: np.ndarray, nbytes: int, who: str = "a store") -> None:
    """A finding when warps (one of each store) store nbytes each at offsets that unfinished work reads."""
    if not (target.busy or target.reading or target.tensor is not None):
        return
    found = first_reader(w, target, offsets, nbytes, w.warps)
    if found is not None and len(w.warps) > 1:
        # warps that happen to be at the same place may be tiles apart, and know of different work
        shares = ((warp, own) for warp in w.warps if len(own := offsets[warps == warp]))
        found = next((hit for warp, own in shares if (hit := first_reader(w, target, own, nbytes, (warp,))) is not None), None)
    if found is not None:
        report(w, f"{who} overwrites", *found)


def first_reader(w: Window, target: Cta, offsets: np.ndarray, nbytes: int, warps: Sequence[int]) -> tuple[str, Origin] | None:
    """Some work that one of these warps does not know to have read what is stored."""
    low, high = int(offsets.min()), int(offsets.max()) + nbytes
    for what, origin, start, stop in readers(w, target, low, high, warps):
        if np.count_nonzero((offsets < stop) & (offsets + nbytes > start)):
            return what, origin
    return None


def check_operands(w: Window, chain: Chain) -> None:
    """A finding when a wgmma is issued whose operands a copy has not delivered."""
    cta = w.cta
    for copy in cta.machine.pending:
        for target, low, high in copy.writes:
            if target is cta and any(start < high and low < stop for start, stop in operand_ranges(chain)):
                place = "" if copy.origin.instruction is None else f" (PTX line {copy.origin.instruction.line})"
                cta.report(w, "missing_wait", f"a wgmma reads shared memory that an asynchronous copy{place} still writes")
                return


def report(w: Window, who: str, what: str, origin: Origin) -> None:
    """The finding about an overwritten source."""
    place = "" if origin.instruction is None else f" (PTX line {origin.instruction.line})"
    w.cta.report(w, "missing_wait", f"{who} shared memory that {what}{place} reads and nobody has waited for")

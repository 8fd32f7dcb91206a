"""Shared memory that asynchronous work reads, and what must not touch it before the end of that is known (order.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain as chain_both
from typing import TYPE_CHECKING

import numpy as np

from ..numerics import wgmma
from ..state.registers import WARP, Window
from ..units.async_units import Chain
from . import tensor_hazards

if TYPE_CHECKING:
    from ..state.access import SharedPattern
    from ..state.cta import Cta, Origin


def operands(chain: Chain) -> Iterator[wgmma.Operand]:
    """The operands in shared memory that a chain of wgmmas reads."""
    yield wgmma.operand(tuple(chain.b), chain.form.n, chain.b_major)
    if not chain.from_registers:
        yield wgmma.operand(tuple(chain.a), wgmma.M, chain.a_major)


def operand_ranges(chain: Chain, low: int, high: int) -> Iterator[tuple[int, int]]:
    """The byte ranges of shared memory that a chain of wgmmas reads, as far as they meet [low, high)."""
    for where in operands(chain):
        yield from wgmma.overlapping(where.ranges, low, high)


def readers(w: Window, target: Cta, low: int, high: int, warps: Sequence[int]) -> Iterator[tuple[str, Origin, int, int]]:
    """What may still read bytes of [low, high) in a CTA's shared memory as far as warps of the window know: (what, where issued,
    start, stop)."""
    clocks = target.cluster.clocks
    for first, pipe in target.pipes.items():
        done = clocks.least(w.cta, warps, clocks.matrix_core(target, first // WARP))
        for chain in chain_both(pipe.unwaited(), pipe.unknown(done)):
            for start, stop in operand_ranges(chain, low, high):
                yield "a wgmma", chain.origin, start, stop
    for (start, stop), (column, serial, origin) in target.outgoing.items():
        if start < high and low < stop and clocks.least(w.cta, warps, column) < serial:
            yield "a bulk copy", origin, start, stop
    if target.tensor is not None:
        yield from tensor_hazards.shared_readers(target, low, high, w.cta, warps)
    if target.reading:
        target.reading = [copy for copy in target.reading if not copy.waited]
        for copy in target.reading:
            if copy.source[0] < high and low < copy.source[1]:
                yield "a bulk store", copy.origin, *copy.source


def check_copy(w: Window, warp: int, targets: list[Cta], low: int, high: int) -> None:
    """A finding when a warp issues a copy to shared memory that unfinished work reads."""
    for target in targets:
        if target.has_readers:
            for what, origin, _, _ in readers(w, target, low, high, (warp,)):
                report(w, "an asynchronous copy overwrites", what, origin)
                return


def check_store(w: Window, warps: np.ndarray, target: Cta, pattern: SharedPattern, nbytes: int, who: str = "a store") -> None:
    """A finding when warps (one of each store) store nbytes each where unfinished work reads."""
    if not target.has_readers:
        return
    found = first_reader(w, target, pattern, nbytes, w.warps)
    if found is not None and len(w.warps) > 1:
        # warps that happen to be at the same place may be tiles apart, and know of different work
        shares = ((warp, pattern.part(warps == warp)) for warp in w.warps if np.count_nonzero(warps == warp))
        found = next((hit for warp, own in shares if (hit := first_reader(w, target, own, nbytes, (warp,))) is not None), None)
    if found is not None:
        report(w, f"{who} overwrites", *found)


def first_reader(w: Window, target: Cta, pattern: SharedPattern, nbytes: int, warps: Sequence[int]) -> tuple[str, Origin] | None:
    """Some work that one of these warps does not know to have read what is stored."""
    offsets = pattern.offsets
    for what, origin, start, stop in readers(w, target, pattern.low, pattern.high + nbytes, warps):
        if np.count_nonzero((offsets < stop) & (offsets + nbytes > start)):
            return what, origin
    return None


def check_operands(w: Window, chain: Chain) -> None:
    """A finding when a wgmma is issued whose operands a copy has not delivered."""
    cta = w.cta
    for copy in cta.machine.pending:
        for target, low, high in copy.writes:
            if target is cta and next(operand_ranges(chain, low, high), None) is not None:
                place = "" if copy.origin.instruction is None else f" (PTX line {copy.origin.instruction.line})"
                cta.report(w, "missing_wait", f"a wgmma reads shared memory that an asynchronous copy{place} still writes")
                return


def report(w: Window, who: str, what: str, origin: Origin) -> None:
    """The finding about an overwritten source."""
    place = "" if origin.instruction is None else f" (PTX line {origin.instruction.line})"
    w.cta.report(w, "missing_wait", f"{who} shared memory that {what}{place} reads, without a wait for it")

"""Hazards on shared memory that asynchronous work reads: stores and copies over it before the end of the read is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain as chain_both

import numpy as np

from ..numerics import wgmma
from ..state.access import SharedPattern
from ..state.cta import Cta
from ..state.origin import Origin
from ..state.registers import WARP
from ..state.wgmma_queue import WgmmaChain
from ..state.window import Window
from . import tensor_hazards


def operands(chain: WgmmaChain) -> Iterator[wgmma.Operand]:
    """Yield the operands in shared memory that a chain of wgmmas reads."""
    yield wgmma.operand(tuple(chain.b), chain.form.n, chain.b_major)
    if not chain.from_registers:
        yield wgmma.operand(tuple(chain.a), wgmma.M, chain.a_major)


def operand_ranges(chain: WgmmaChain, low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of shared memory that a chain of wgmmas reads and that meet [low, high)."""
    for where in operands(chain):
        yield from wgmma.overlapping(where.ranges, low, high)


def readers(w: Window, target: Cta, low: int, high: int, warps: Sequence[int]) -> Iterator[tuple[str, Origin, int, int]]:
    """Yield the work that may still read bytes of [low, high) in target's shared memory, as far as warps of the window know.

    Items are (what, origin, start, stop).
    """
    clocks = target.cluster.clocks
    for first, queue in target.wgmma.items():
        done = clocks.least(w.cta.rank, warps, clocks.matrix_core(target.rank, first // WARP))
        for chain in chain_both(queue.unwaited(), queue.later_than(done)):
            for start, stop in operand_ranges(chain, low, high):
                yield "a wgmma", chain.origin, start, stop
    for (start, stop), (column, serial, origin) in target.outgoing.items():
        if start < high and low < stop and clocks.least(w.cta.rank, warps, column) < serial:
            yield "a bulk copy", origin, start, stop
    if target.tensor is not None:
        yield from tensor_hazards.smem_readers(target, low, high, w.cta, warps)
    if target.reading:
        target.reading = [copy for copy in target.reading if not copy.waited]
        for copy in target.reading:
            if copy.source[0] < high and low < copy.source[1]:
                yield "a bulk store", copy.origin, *copy.source


def check_copy(w: Window, warp: int, targets: list[Cta], low: int, high: int) -> None:
    """Report when a warp issues a copy to shared memory that unfinished work reads."""
    for target in targets:
        if target.has_readers:
            for what, origin, _, _ in readers(w, target, low, high, (warp,)):
                report(w, "an asynchronous copy overwrites", what, origin)
                return


def check_store(w: Window, warps: np.ndarray, target: Cta, pattern: SharedPattern, nbytes: int, who: str = "a store") -> None:
    """Report when stores of nbytes touch bytes that unfinished work reads. warps: the warp of each store."""
    if not target.has_readers:
        return
    found = first_reader(w, target, pattern, nbytes, w.warps)
    if found is not None and len(w.warps) > 1:
        # Warps of a convoy may be tiles apart and know of different work: look at each alone.
        shares = ((warp, pattern.part(warps == warp)) for warp in w.warps if np.count_nonzero(warps == warp))
        found = next((hit for warp, own in shares if (hit := first_reader(w, target, own, nbytes, (warp,))) is not None), None)
    if found is not None:
        report(w, f"{who} overwrites", *found)


def first_reader(w: Window, target: Cta, pattern: SharedPattern, nbytes: int, warps: Sequence[int]) -> tuple[str, Origin] | None:
    """Return some work (what, origin) that one of these warps does not know to have read the stored bytes; None for none."""
    offsets = pattern.offsets
    for what, origin, start, stop in readers(w, target, pattern.low, pattern.high + nbytes, warps):
        if np.count_nonzero((offsets < stop) & (offsets + nbytes > start)):
            return what, origin
    return None


def check_operands(w: Window, chain: WgmmaChain) -> None:
    """Report when a wgmma is issued whose operands a copy has not delivered."""
    cta = w.cta
    for copy in w.engine.pending:
        for smem, low, high in copy.writes:
            if smem is cta.smem and next(operand_ranges(chain, low, high), None) is not None:
                message = f"a wgmma reads shared memory that an asynchronous copy{copy.origin.place} still writes"
                w.report("missing_wait", message)
                return


def report(w: Window, who: str, what: str, origin: Origin) -> None:
    """Report an overwritten source."""
    w.report("missing_wait", f"{who} shared memory that {what}{origin.place} reads, without a wait for it")

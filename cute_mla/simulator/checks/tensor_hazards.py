"""Hazards on tensor memory, and on shared memory that tcgen05 work reads: accesses that are not ordered after earlier ones.

Work on the queue of a tensor core is ordered among itself. A tcgen05.ld or tcgen05.st is known to be done by its own warp after
tcgen05.wait, and by other warps when that warp has arrived somewhere and they have waited there. A load is also done when one of its
registers is used: PTX respects that dependence (PTX ISA, 9.7.16.6.4.5), and the machine code waits for the whole load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ..numerics.wgmma import overlapping
from ..state.cta import Cta
from ..state.origin import Origin
from ..state.tensor_queue import Cells, TensorMove, TensorQueue, Work
from ..state.window import Window

# ---------------------------------------------------------------- when loads and stores are done


@dataclass(frozen=True)
class RegisterUses:
    """Register uses of a block: registers touched by more than a move (bit mask per bank), the sources of moves, and the moves.

    Each move has the (bank, bit) of its sources and of its targets.
    """

    touched: dict[str, int] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)
    moves: list[tuple[list[tuple[str, int]], list[tuple[str, int]]]] = field(default_factory=list)


def note_uses(cta: Cta, warps: frozenset[int], uses: RegisterUses) -> None:
    """Mark loads of tensor memory as done whose registers were used by the block that warps have run."""
    waiting = False
    for move in cta.moves.values():
        if move.write or move.time is not None:
            continue
        if move.warp not in warps:
            waiting = True
        elif move.fresh:
            move.fresh, waiting = False, True
        else:
            if _share_a_register(move.holders, uses.moved):
                _follow(move, uses)
            if _share_a_register(move.holders, uses.touched):
                move.time = cta.cluster.clocks.tick(cta.rank, move.warp)
            else:
                waiting = True
    cta.loading = waiting


def _share_a_register(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Return whether two bit masks per bank have a bit in common. A loop, as this runs for every load at the end of every block."""
    for bank, mask in one.items():  # noqa: SIM110
        if mask & other.get(bank, 0):
            return True
    return False


def add_bits(masks: dict[str, int], bits: Iterable[tuple[str, int]]) -> None:
    """Add (bank, bit) pairs to bit masks per bank."""
    for bank, bit in bits:
        masks[bank] = masks.get(bank, 0) | bit


def _follow(move: TensorMove, uses: RegisterUses) -> None:
    """Add the registers that a block copies loaded values to, move by move in its order, to those that hold them."""
    for sources, targets in uses.moves:
        if any(move.holders.get(bank, 0) & bit for bank, bit in sources):
            add_bits(move.holders, targets)


# ---------------------------------------------------------------- unfinished work


def pair_queues(target: Cta) -> Iterator[TensorQueue]:
    """Yield the queues of the tensor cores that may work on a CTA's memory: its own and its peer's."""
    for other in target.cluster.ctas:
        if other.rank >> 1 == target.rank >> 1 and other.tensor_queue is not None:
            yield other.tensor_queue


def unknown_work(target: Cta, cta: Cta, warps: Sequence[int]) -> Iterator[Work]:
    """Yield the work on target's memory that some warps of a CTA do not know to be done."""
    clocks = target.cluster.clocks
    for queue in pair_queues(target):
        yield from queue.later_than(clocks.least(cta.rank, warps, clocks.core(queue.rank)))


def smem_readers(target: Cta, low: int, high: int, cta: Cta, warps: Sequence[int]) -> Iterator[tuple[str, Origin, int, int]]:
    """Yield the work that may still read bytes of [low, high) of target's shared memory: (what, origin, start, stop)."""
    for work in unknown_work(target, cta, warps):
        for rank, ranges in work.sources():
            if rank == target.rank:
                for start, stop in overlapping(ranges, low, high):
                    yield work.what, work.origin, start, stop


# ---------------------------------------------------------------- checks


def conflicting(target: Cta, cells: Cells, write: bool) -> list[TensorMove]:
    """Return the loads and stores of target's tensor memory that conflict with an access to cells, in the order of their first issue.

    Only cells that a warp has used since the last such access are compared: kernels use a few cells again and again.
    """
    moves = target.moves
    seen, keys = target.conflicts.get((cells, write), (0, []))
    if seen < len(moves):
        keys += [key for key in islice(moves, seen, None) if (write or key[1]) and key[2].meets(cells)]
        target.conflicts[cells, write] = len(moves), keys
    return [moves[key] for key in keys]


def hinders(move: TensorMove, cta: Cta, warp: int) -> bool:
    """Return True when an access by a warp of a CTA can come before the end of a load or store."""
    if move.time is None:
        return True
    clocks = cta.cluster.clocks
    return int(clocks.now[clocks.row(cta.rank, warp), clocks.row(move.cells.rank, move.warp)]) < move.time


def check_move(w: Window, warp: int, cells: Cells, write: bool) -> None:
    """Report when a warp loads or stores cells of its CTA that work, or another load or store, may still use."""
    who = "a tcgen05.st writes" if write else "a tcgen05.ld reads"
    cta = w.cta
    for work in unknown_work(cta, cta, (warp,)):
        if meet(work, cells, write):
            report(w, f"{who} tensor memory that {work.what}{work.origin.place} uses, without a wait for a commit of it")
            return
    for move in conflicting(cta, cells, write):
        if hinders(move, cta, warp):
            report(w, f"{who} tensor memory that {move.what} uses; {reason(move)}")
            return
        if check_fences(w, cta, warp, move, who):
            return
    clocks = cta.cluster.clocks
    if not clocks.tensor_fences:
        return
    for queue in pair_queues(cta):
        for work in queue.later_than(int(clocks.after[clocks.row(cta.rank, warp), clocks.rows + queue.rank])):
            if meet(work, cells, write):
                what = f"{who} tensor memory that {work.what}{work.origin.place} uses"
                message = f"{what}: no tcgen05.fence::after_thread_sync of warp {warp} since it has waited for that"
                w.report("missing_fence", message)
                return


def meet(work: Work, cells: Cells, write: bool) -> bool:
    """Return True when work and a load (write: store) of cells conflict."""
    return any(cells.meets(other) for other in ([*work.written(), *work.read()] if write else work.written()))


def check_fences(w: Window, cta: Cta, warp: int, move: TensorMove, who: str) -> bool:
    """Report an access to the cells of another warp's load or store that is ordered, but without tcgen05.fence. Return True for that."""
    clocks = cta.cluster.clocks
    row, other = clocks.row(cta.rank, warp), clocks.row(move.cells.rank, move.warp)
    if not clocks.tensor_fences or row == other or clocks.after[row, other] >= move.issued:
        return False
    missing = f"no tcgen05.fence::after_thread_sync of warp {warp} since it has waited for that"
    if clocks.now[row, clocks.handed + other] < move.issued:
        missing = f"no tcgen05.fence::before_thread_sync of warp {move.warp} between that and its arrival"
    w.report("missing_fence", f"{who} tensor memory that {move.what} uses: {missing}")
    return True


def check_work(w: Window, warp: int, read: Sequence[Cells], written: Sequence[Cells], what: str) -> None:
    """Report when a warp issues work on cells that a load or store may still use."""
    for cells, writes in [(cells, True) for cells in written] + [(cells, False) for cells in read]:
        for move in conflicting(w.cta.cluster.ctas[cells.rank], cells, writes):
            who = f"{what} {'writes' if writes else 'reads'}"
            if hinders(move, w.cta, warp):
                report(w, f"{who} tensor memory that {move.what} uses; {reason(move)}")
                return
            if check_fences(w, w.cta, warp, move, who):
                return


def check_release(w: Window, cells: Cells) -> None:
    """Report when columns of the CTA are freed that work, a load or a store may still use."""
    for work in unknown_work(w.cta, w.cta, w.warps):
        if any(cells.meets(other) for other in (*work.written(), *work.read())):
            report(w, f"tcgen05.dealloc of tensor memory that {work.what}{work.origin.place} uses, without a wait for a commit of it")
            return
    for move in w.cta.moves.values():
        if move.cells.meets(cells) and hinders(move, w.cta, w.warps[0]):
            report(w, f"tcgen05.dealloc of tensor memory that {move.what} uses; {reason(move)}")
            return


def reason(move: TensorMove) -> str:
    """Return in words why a load or store is not known to be done."""
    if move.time is not None:
        return f"nothing that warp {move.warp} arrived at since that was done has been waited for"
    return f"warp {move.warp} has not executed tcgen05.wait::{'st' if move.write else 'ld'}"


def report(w: Window, message: str) -> None:
    """Report a missing wait."""
    w.report("missing_wait", message)

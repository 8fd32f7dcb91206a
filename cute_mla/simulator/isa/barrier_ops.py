"""mbarrier, bar/barrier and barrier.cluster instructions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..checks import order, phases
from ..findings import Fault
from ..frontend.ptx import Imm, Instruction, Operand
from ..state.access import all_true
from ..state.barriers import MAX_COUNT, Mbarrier, NamedBarrier
from ..state.registers import WARP, Window
from .emitter import Unsupported
from .memory_ops import place_shared
from .table import op, registers_of, runtime

if TYPE_CHECKING:
    from ..state.cta import Cta
    from .emitter import Emitter

Match = re.Match[str]

SEM = r"(.(release|relaxed))?(.(cta|cluster))?"
OWN = r".shared(::cta)?"
SHARED = r".shared(::cta|(?P<cluster>::cluster))?"


def address_of(e: Emitter, ins: Instruction, index: int) -> str:
    """The checked address expression of a barrier operand."""
    e.check_taint(registers_of(ins.operands[index]), "a barrier address")
    return e.memory_address(ins.operands[index], 32)


def value_of(e: Emitter, operand: Operand | None, default: str = "None") -> str:
    """A checked 32-bit operand."""
    if operand is None:
        return default
    e.check_taint(registers_of(operand), "a barrier operand")
    return e.src(operand, "u32")


@op(rf"mbarrier.init{OWN}.b64", writes=(), pure=False, taint="own")
def init(e: Emitter, ins: Instruction, m: Match) -> None:
    """Make a barrier of count arrivals."""
    e.line(f"mbarrier_init(w, {address_of(e, ins, 0)}, {value_of(e, ins.operands[1])})")


@op(rf"mbarrier.inval{OWN}.b64", writes=(), pure=False, taint="own")
def inval(e: Emitter, ins: Instruction, m: Match) -> None:
    """Give the memory of a barrier back."""
    e.line(f"mbarrier_inval(w, {address_of(e, ins, 0)})")


@op(rf"mbarrier.arrive{SEM}{SHARED}.b64", pure=False, taint="own")
def arrive(e: Emitter, ins: Instruction, m: Match) -> None:
    """Each lane arrives count times (default 1)."""
    count = ins.operands[2] if len(ins.operands) > 2 else Imm(1)
    emit_arrive(e, ins, m, value_of(e, count), "None")


@op(rf"mbarrier.arrive.expect_tx{SEM}{SHARED}.b64", pure=False, taint="own")
def arrive_expect(e: Emitter, ins: Instruction, m: Match) -> None:
    """Expect bytes, then arrive."""
    emit_arrive(e, ins, m, e.src(Imm(1), "u32"), value_of(e, ins.operands[2]))


def emit_arrive(e: Emitter, ins: Instruction, m: Match, count: str, nbytes: str) -> None:
    """Run an arrival; the state it returns is the phase it counted in."""
    temp = e.temp()
    e.line(f"{temp} = mbarrier_arrive(w, {address_of(e, ins, 1)}, {count}, {nbytes}, {bool(m['cluster'])})")
    if ins.operands[0] is not None:
        if m["cluster"]:
            raise Unsupported("an arrival on .shared::cluster returns no state")
        e.line(f"{e.dst(ins.operands[0], 'b64')}[...] = {temp}")
        if e.tainted:
            e.line(f"{e.taint(ins.operands[0])}.fill(False)")


@op(rf"mbarrier.expect_tx(.relaxed)?(.(cta|cluster))?{SHARED}.b64", writes=(), pure=False, taint="own")
def expect(e: Emitter, ins: Instruction, m: Match) -> None:
    """Expect bytes without arriving."""
    e.line(f"mbarrier_expect(w, {address_of(e, ins, 0)}, {value_of(e, ins.operands[1])}, {bool(m['cluster'])})")


@op(
    rf"mbarrier.(?P<f>try_wait|test_wait)(?P<p>.parity)?(.(acquire|relaxed))?(.(cta|cluster))?{OWN}.b64",
    pure=False, taint="own", starts=True,
)  # fmt: skip
def wait(e: Emitter, ins: Instruction, m: Match) -> None:
    """Test a phase; where it is not complete, block (try_wait with a time hint) or fail once and then block."""
    hint = len(ins.operands) > 3
    if hint and m["f"] == "test_wait":
        raise Unsupported("test_wait with a time hint")
    state = ins.operands[2]
    e.check_taint(registers_of(state), "a barrier phase")
    address = address_of(e, ins, 1)
    expected = e.src(state, "u32") if m["p"] else e.src(state, "u64")
    d = e.dst(ins.operands[0], "pred")
    if e.tainted and ins.operands[0] is not None:
        e.line(f"{e.taint(ins.operands[0])}.fill(False)")
    e.line(f"if not mbarrier_wait(w, {address}, {expected}, {d}, {bool(m['p'])}, {hint}): return BLOCKED")


# ---------------------------------------------------------------- runtime


def is_same(value: np.ndarray) -> bool:
    """Whether a value does not differ between lanes."""
    return value.size == 1 or all_true(value == value[0])


@dataclass
class Share:
    """Lanes of a window that do the same to one mbarrier, their number, and the warps that they belong to."""

    cta: Cta
    offset: int
    lanes: int
    warps: Sequence[int]
    values: list[int]


def each_lane(w: Window, address: np.ndarray, cluster: bool, *values: np.ndarray | None) -> list[Share]:
    """Lanes with equal address and values, in order of first lane."""
    shares: dict[tuple[int, ...], Share] = {}
    for target, index, pattern in place_shared(w, address, cluster):
        lanes, offsets = range(w.n) if index is None else index, pattern.offsets
        if index is None and pattern.is_same and all(v is None or is_same(v) for v in values):
            return [Share(target, pattern.low, w.n, w.warps, [0 if v is None else v.item(0) for v in values])]
        for position, lane in enumerate(lanes):
            offset = int(offsets[position])
            numbers = [0 if v is None else int(v) if v.ndim == 0 else int(v[lane]) for v in values]
            share = shares.setdefault((target.rank, offset, *numbers), Share(target, offset, 0, [], numbers))
            share.lanes += 1
            warp = int(w.lanes[lane]) // WARP
            if warp not in share.warps:
                share.warps = [*share.warps, warp]
    return list(shares.values())


@runtime
def mbarrier_init(w: Window, address: np.ndarray, count: np.ndarray) -> None:
    """mbarrier.init"""
    for share in each_lane(w, address, False, count):
        cta, offset, (number,) = share.cta, share.offset, share.values
        if offset % 8:
            raise Fault("misaligned", f"mbarrier at {offset:#x}")
        if not 1 <= number <= MAX_COUNT:
            raise Fault("barrier_count", f"mbarrier.init with a count of {number}", cta.barrier_name(offset))
        cta.smem.check(offset, offset + 8, "mbarrier.init")
        old = cta.mbarriers.get(offset)
        if old is not None and old.waiters:
            raise Fault("barrier_reinit", "mbarrier.init while somebody waits", old.name)
        if old is not None:
            raise Fault("barrier_reinit", "mbarrier.init of a live barrier without mbarrier.inval", old.name)
        cta.mbarriers[offset] = Mbarrier(cta.barrier_name(offset), number, cta.cluster.clocks.copier(cta.rank, offset))
        cta.smem.valid[offset : offset + 8] = 0
        phases.note_init(w, cta.mbarriers[offset])
        if w.slot.cta is not None and w.cta.observer is not None:
            w.cta.observer.barrier(w, cta.mbarriers[offset], "init", number)


@runtime
def mbarrier_inval(w: Window, address: np.ndarray) -> None:
    """mbarrier.inval"""
    for share in each_lane(w, address, False):
        cta, offset = share.cta, share.offset
        if cta.mbarrier(offset).waiters:
            raise Fault("barrier_reinit", "mbarrier.inval while somebody waits", cta.barrier_name(offset))
        del cta.mbarriers[offset]


@runtime
def mbarrier_arrive(w: Window, address: np.ndarray, count: np.ndarray, nbytes: np.ndarray | None, cluster: bool) -> np.ndarray:
    """mbarrier.arrive, with expect_tx when nbytes is given. Returns the phase that each lane has arrived in."""
    parts = each_lane(w, address, cluster, count, nbytes)
    state = np.array(parts[0].cta.mbarrier(parts[0].offset).phase, np.uint64)
    if len(parts) > 1:
        state = lane_phases(w, address, cluster)
    order.hand_over(w.cta, w.warps)  # once: what one instruction signals, it signals together
    for share in parts:
        barrier, (number, expected) = share.cta.mbarrier(share.offset), share.values
        if w.cta.observer is not None:
            w.cta.observer.barrier(w, barrier, "arrive", number * share.lanes)
        if nbytes is not None:
            barrier.expect(expected * share.lanes)
        if number < 1:
            raise Fault("barrier_count", f"mbarrier.arrive with a count of {number}", barrier.name)
        phases.check_use(w, share.warps, barrier, share.cta is not w.cta)
        phases.check_arrival(w, share.warps, barrier)
        order.arrive(w.cta, share.warps, barrier, release=False)
        if share.cta is not w.cta:
            note_visit(w, share)
        w.cta.machine.arrive(barrier, number * share.lanes)
    return state


def note_visit(w: Window, share: Share) -> None:
    """Warps have arrived at an mbarrier of another CTA, which must not exit before that."""
    cluster, origin = w.cta.cluster, w.cta.machine.origin(w)
    for warp in share.warps:
        row = cluster.clocks.row(w.cta, warp)
        cluster.visits[row, share.cta.rank] = (int(cluster.clocks.now[row, row]), origin)


def lane_phases(w: Window, address: np.ndarray, cluster: bool) -> np.ndarray:
    """The phase of each lane's barrier."""
    phases = np.zeros(w.n, np.uint64)
    for target, index, pattern in place_shared(w, address, cluster):
        phases[slice(None) if index is None else index] = [target.mbarrier(offset).phase for offset in pattern.offsets.tolist()]
    return phases


@runtime
def mbarrier_expect(w: Window, address: np.ndarray, nbytes: np.ndarray, cluster: bool) -> None:
    """mbarrier.expect_tx"""
    for share in each_lane(w, address, cluster, nbytes):
        barrier = share.cta.mbarrier(share.offset)
        phases.check_use(w, share.warps, barrier, share.cta is not w.cta)
        barrier.expect(share.values[0] * share.lanes)
        w.cta.machine.progress += 1


@runtime
def mbarrier_wait(w: Window, address: np.ndarray, expected: np.ndarray, out: np.ndarray, parity: bool, hint: bool) -> bool:
    """try_wait and test_wait. False: the group is blocked and executes this again when the phase may have changed."""
    cta = w.cta
    group = cta.machine.running
    ready = np.zeros(w.n, bool)
    blocked: list[Mbarrier] = []
    users: list[Sequence[int]] = []  # the warps that wait for each
    places: list[np.ndarray | slice] = []  # and their lanes
    parts = place_shared(w, address, False)
    if len(parts) == 1 and parts[0][2].is_same:
        target, _, pattern = parts[0]
        barrier = target.mbarrier(pattern.low)
        ready[...] = (barrier.phase & 1) != expected if parity else barrier.phase != expected
        blocked.append(barrier)
        users.append(w.warps)
        places.append(slice(None))
    else:
        wanted = np.broadcast_to(expected, (w.n,))
        for target, index, pattern in parts:
            lanes, offsets = np.arange(w.n) if index is None else index, pattern.offsets
            for offset in np.unique(offsets):
                barrier = target.mbarrier(int(offset))
                where = lanes[offsets == offset]
                ready[where] = (barrier.phase & 1) != wanted[where] if parity else barrier.phase != wanted[where]
                blocked.append(barrier)
                users.append(warps_of(w, where))
                places.append(where)
    for barrier, warps in zip(blocked, users, strict=True):
        group.check_lapped(barrier)
        phases.check_use(w, warps, barrier, False)
    if ready.any():
        group.waited = {}
        out[...] = ready
        for barrier, warps, where in zip(blocked, users, places, strict=True):
            # lanes of a warp that have come apart may wait for different barriers: one of them says nothing of another
            done = warps if ready.all() else warps_of(w, np.arange(w.n)[where][ready[where]])
            if parity:
                phases.check_wait(w, done, barrier)
            order.wait(cta, done, barrier)
            phases.note_wait(cta, done, barrier)
            if cta.observer is not None and done:
                cta.observer.barrier(w, barrier, "wait", 0)
        return True
    return refuse_wait(w, out, blocked, hint)


def warps_of(w: Window, lanes: np.ndarray) -> tuple[int, ...]:
    """The warps that these positions in the window belong to."""
    return tuple(int(warp) for warp in np.unique(w.lanes[lanes] // WARP))


def refuse_wait(w: Window, out: np.ndarray, blocked: list[Mbarrier], hint: bool) -> bool:
    """No lane may pass: answer false once where that is allowed, else block."""
    group = w.cta.machine.running
    if group.timed_out:
        group.timed_out = False
        group.waited = {}
        out[...] = False
        return True
    key = tuple((id(barrier), barrier.phase) for barrier in blocked)
    if not hint and group.last_failed != key:
        group.last_failed = key
        out[...] = False
        return True
    group.block(blocked)
    return False


# ---------------------------------------------------------------- named barriers


@op(
    r"bar(.cta)?.sync", r"barrier(.cta)?.sync(.aligned)?",
    writes=(), pure=False, taint="own", needs="warp", starts=True, ends=True,
)  # fmt: skip
def sync(e: Emitter, ins: Instruction, m: Match) -> None:
    """Arrive and wait. Without .aligned the lanes of a warp may come apart: they gather first, and count once."""
    e.line(f"if not named_sync(w, {barrier_operands(e, ins.operands)}): return BLOCKED")


@op(r"bar(.cta)?.arrive", r"barrier(.cta)?.arrive.aligned", writes=(), pure=False, taint="own", needs="warp")
def arrive_only(e: Emitter, ins: Instruction, m: Match) -> None:
    """Arrive without waiting."""
    if len(ins.operands) != 2:
        raise Unsupported("bar.arrive without a thread count")
    e.line(f"named_arrive(w, {barrier_operands(e, ins.operands)})")


@op(
    r"bar(.cta)?.red.(?P<f>popc).u32", r"bar(.cta)?.red.(?P<f>and|or).pred",
    pure=False, needs="warp", starts=True, ends=True,
)  # fmt: skip
def reduce(e: Emitter, ins: Instruction, m: Match) -> None:
    """Arrive, wait, and combine a predicate over all threads."""
    source = e.src(ins.operands[-1], "pred")
    d = e.dst(ins.operands[0], "u32" if m["f"] == "popc" else "pred")
    e.line(f"if not named_sync(w, {barrier_operands(e, ins.operands[1:-1])}, {m['f']!r}, {source}, {d}): return BLOCKED")


def barrier_operands(e: Emitter, operands: list[Operand | None]) -> str:
    """Barrier id and thread count."""
    count = value_of(e, operands[1]) if len(operands) > 1 else "None"
    return f"{value_of(e, operands[0])}, {count}"


def uniform(w: Window, value: np.ndarray | None, what: str) -> int | None:
    """The single value of an operand that must not differ between lanes."""
    if value is None:
        return None
    if value.ndim == 0:
        return int(value)
    first = int(value[0])
    if not bool((value == first).all()):
        raise Fault("divergence", f"{what} differs between the lanes of a convoy")
    return first


def named(w: Window, number: np.ndarray, count: np.ndarray | None) -> tuple[NamedBarrier, int]:
    """The barrier and its thread count (all live threads of the CTA by default)."""
    cta = w.cta
    barrier_id = uniform(w, number, "a barrier id")
    assert barrier_id is not None
    if not 0 <= barrier_id < 16:
        raise Fault("barrier_count", f"barrier id {barrier_id}: must be 0 to 15")
    given = uniform(w, count, "a barrier thread count")
    threads = cta.live_threads if given is None else given
    return cta.named_barrier(barrier_id), -(-threads // WARP) * WARP if given is None else threads


@runtime
def named_sync(
    w: Window,
    number: np.ndarray,
    count: np.ndarray | None,
    function: str = "",
    source: np.ndarray | None = None,
    out: np.ndarray | None = None,
) -> bool:
    """bar.sync and bar.red: True for the convoy that completes the round; the others are moved on by it."""
    cta = w.cta
    if cta.machine.must_separate(w, number):
        return False
    barrier, threads = named(w, number, count)
    if source is not None:
        barrier.results.append((function, np.broadcast_to(source, (w.n,)).copy(), out, w))
    if cta.observer is not None:
        cta.observer.barrier(w, barrier, "sync", len(w.warps) * WARP)
    phases.note_arrival(w, w.warps, barrier)
    order.arrive(cta, w.warps, barrier)
    if barrier.arrive(len(w.warps) * WARP, threads):
        release(cta, barrier)
        order.wait(cta, w.warps, barrier)
        phases.note_round(cta, w.warps, barrier)
        return True
    group = cta.machine.running
    barrier.waiting.append(group)
    group.block_at(barrier)
    return False


@runtime
def named_arrive(w: Window, number: np.ndarray, count: np.ndarray) -> None:
    """bar.arrive"""
    cta = w.cta
    flat = np.broadcast_to(number, (w.n,))
    for value in np.unique(flat):
        lanes = int(np.count_nonzero(flat == value))
        warps = w.warps if lanes == w.n else tuple(int(warp) for warp in np.unique(w.lanes[flat == value] // WARP))
        barrier, threads = named(w, np.array(value), count)
        if cta.observer is not None:
            cta.observer.barrier(w, barrier, "arrive", lanes)
        phases.note_arrival(w, warps, barrier)
        order.arrive(cta, warps, barrier)
        if barrier.arrive(-(-lanes // WARP) * WARP, threads):
            release(cta, barrier)
    cta.machine.progress += 1


def release(cta: Cta, barrier: NamedBarrier) -> None:
    """Let everybody inside go on."""
    if barrier.results:
        votes = np.concatenate([part[1] for part in barrier.results])  # type: ignore[misc]
        for function, _, out, window in barrier.results:
            value = {"popc": int(np.count_nonzero(votes)), "and": bool(votes.all()), "or": bool(votes.any())}[str(function)]
            out[...] = value  # type: ignore[index]
            if isinstance(window, Window):
                window.write_back()
        barrier.results.clear()
    barrier.next_round()
    waiting, barrier.waiting = barrier.waiting, []
    cta.machine.progress += 1
    for group in waiting:
        cta.machine.executed.add(cta.machine.blocks[group.pc], group.warps)
        group.pc += 1
        order.wait(cta, group.warps, barrier)
        phases.note_round(cta, group.warps, barrier)
    cta.machine.wake(waiting)


# ---------------------------------------------------------------- cluster barrier


@op(r"barrier.cluster.arrive(.(release|relaxed))?(.aligned)?", writes=(), pure=False, taint="own", needs="warp")
def cluster_arrive(e: Emitter, ins: Instruction, m: Match) -> None:
    """Arrive at the cluster barrier."""
    e.line(f"cluster_barrier_arrive(w, {'.relaxed' in ins.opcode})")


@op(r"barrier.cluster.wait(.acquire)?(.aligned)?", writes=(), pure=False, taint="own", needs="warp", starts=True, ends=True)
def cluster_wait(e: Emitter, ins: Instruction, m: Match) -> None:
    """Wait for the round one has arrived in."""
    e.line("if not cluster_barrier_wait(w): return BLOCKED")


@runtime
def cluster_barrier_arrive(w: Window, relaxed: bool) -> None:
    """barrier.cluster.arrive"""
    cta = w.cta
    barrier = cta.cluster.barrier
    if bool((cta.cluster_arrived[w.lanes] >= 0).any()):
        raise Fault("barrier_arrivals", "a second barrier.cluster.arrive without a wait between", "cluster barrier")
    cta.cluster_arrived[w.lanes] = barrier.phase
    if cta.observer is not None:
        cta.observer.barrier(w, barrier, "cluster_arrive_relaxed" if relaxed else "cluster_arrive", w.n)
    if not relaxed:
        phases.note_fence(cta, w.warps)
    order.arrive(cta, w.warps, barrier, not relaxed)
    if barrier.arrive(w.n):
        cta.machine.wake(barrier.waiters)
    cta.machine.progress += 1


@runtime
def cluster_barrier_wait(w: Window) -> bool:
    """barrier.cluster.wait"""
    cta = w.cta
    barrier = cta.cluster.barrier
    rounds = cta.cluster_arrived[w.lanes]
    if bool((rounds < 0).any()):
        raise Fault("barrier_arrivals", "barrier.cluster.wait without an arrive", "cluster barrier")
    if bool((rounds < barrier.phase).all()):
        cta.cluster_arrived[w.lanes] = -1
        order.wait(cta, w.warps, barrier)
        if cta.observer is not None:
            cta.observer.barrier(w, barrier, "cluster_wait", w.n)
        return True
    group = cta.machine.running
    barrier.waiters.append(group)
    group.block_at(barrier)
    return False

"""mbarrier, bar/barrier and barrier.cluster instructions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..checks import order, phases
from ..findings import Fault
from ..frontend.ptx import Imm, Instruction, Operand
from ..state.access import all_true
from ..state.barriers import MAX_COUNT, Mbarrier, NamedBarrier
from ..state.cta import Cta
from ..state.engine_protocol import Engine
from ..state.registers import WARP
from ..state.window import Window
from .emitter import Emitter, Unsupported
from .memory_ops import place_shared
from .table import op, registers_of, runtime

Match = re.Match[str]

SEM = r"(.(release|relaxed))?(.(cta|cluster))?"
OWN = r".shared(::cta)?"
SHARED = r".shared(::cta|(?P<cluster>::cluster))?"


def address_of(e: Emitter, ins: Instruction, index: int) -> str:
    """Return the checked address expression of a barrier operand."""
    e.check_taint(registers_of(ins.operands[index]), "a barrier address")
    return e.memory_address(ins.operands[index], 32)


def value_of(e: Emitter, operand: Operand | None) -> str:
    """Return the expression of a checked 32-bit operand."""
    if operand is None:
        return "None"
    e.check_taint(registers_of(operand), "a barrier operand")
    return e.src(operand, "u32")


@op(rf"mbarrier.init{OWN}.b64", writes=(), pure=False, taint="own")
def init(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit the initialisation of a barrier of count arrivals."""
    e.line(f"mbarrier_init(w, {address_of(e, ins, 0)}, {value_of(e, ins.operands[1])})")


@op(rf"mbarrier.inval{OWN}.b64", writes=(), pure=False, taint="own")
def inval(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit the end of a barrier, whose memory is then free."""
    e.line(f"mbarrier_inval(w, {address_of(e, ins, 0)})")


@op(rf"mbarrier.arrive{SEM}{SHARED}.b64", pure=False, taint="own")
def arrive(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit arrivals: each lane arrives count times (default 1)."""
    count = ins.operands[2] if len(ins.operands) > 2 else Imm(1)
    emit_arrive(e, ins, m, value_of(e, count), "None")


@op(rf"mbarrier.arrive.expect_tx{SEM}{SHARED}.b64", pure=False, taint="own")
def arrive_expect(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit an expectation of bytes, then an arrival."""
    emit_arrive(e, ins, m, e.src(Imm(1), "u32"), value_of(e, ins.operands[2]))


def emit_arrive(e: Emitter, ins: Instruction, m: Match, count: str, nbytes: str) -> None:
    """Emit an arrival. The state that it returns is the phase in which it counted."""
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
    """Emit an expectation of bytes without an arrival."""
    e.line(f"mbarrier_expect(w, {address_of(e, ins, 0)}, {value_of(e, ins.operands[1])}, {bool(m['cluster'])})")


@op(rf"mbarrier.complete_tx(.relaxed)?(.(cta|cluster))?{SHARED}.b64", writes=(), pure=False, taint="own")
def complete(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit the arrival of bytes that no copy brings."""
    e.line(f"mbarrier_complete(w, {address_of(e, ins, 0)}, {value_of(e, ins.operands[1])}, {bool(m['cluster'])})")


@op(
    rf"mbarrier.(?P<f>try_wait|test_wait)(?P<p>.parity)?(.(acquire|relaxed))?(.(cta|cluster))?{OWN}.b64",
    pure=False, taint="own", starts=True,
)  # fmt: skip
def wait(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a test of a phase. While the phase is not complete, try_wait with a time hint blocks; other forms fail once and then block."""
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
    """Return whether all lanes have the same value."""
    return value.size == 1 or all_true(value == value[0])


@dataclass
class Share:
    """Lanes of a window that do the same to one mbarrier. lanes: their number. warps: the warps that they belong to."""

    cta: Cta
    offset: int
    lanes: int
    warps: Sequence[int]
    values: list[int]


def each_lane(w: Window, address: np.ndarray, cluster: bool, *values: np.ndarray | None) -> list[Share]:
    """Group the lanes with equal address and values, in order of first lane."""
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
    """Execute mbarrier.init."""
    for share in each_lane(w, address, False, count):
        cta, offset, (number,) = share.cta, share.offset, share.values
        if offset % 8:
            raise Fault("misaligned", f"mbarrier at {offset:#x}")
        if not 1 <= number <= MAX_COUNT:
            raise Fault("barrier_count", f"mbarrier.init with a count of {number}", cta.barrier_name(offset))
        cta.smem.check(offset, offset + 8, "mbarrier.init")
        old = cta.mbarriers.get(offset)
        if old is not None and w.engine.is_awaited(old):
            raise Fault("barrier_reinit", "mbarrier.init while somebody waits", old.name)
        if old is not None:
            raise Fault("barrier_reinit", "mbarrier.init of a live barrier without mbarrier.inval", old.name)
        cta.mbarriers[offset] = Mbarrier(cta.barrier_name(offset), number, cta.cluster.clocks.copier(cta.rank, offset))
        cta.smem.valid[offset : offset + 8] = 0
        phases.note_init(w, cta.mbarriers[offset])
        if w.observer is not None:
            w.observer.barrier(w, cta.mbarriers[offset], "init", number)


@runtime
def mbarrier_inval(w: Window, address: np.ndarray) -> None:
    """Execute mbarrier.inval."""
    for share in each_lane(w, address, False):
        cta, offset = share.cta, share.offset
        if w.engine.is_awaited(cta.mbarrier(offset)):
            raise Fault("barrier_reinit", "mbarrier.inval while somebody waits", cta.barrier_name(offset))
        del cta.mbarriers[offset]


@runtime
def mbarrier_arrive(w: Window, address: np.ndarray, count: np.ndarray, nbytes: np.ndarray | None, cluster: bool) -> np.ndarray:
    """Execute mbarrier.arrive, with expect_tx when nbytes is given. Return the phase in which each lane has arrived."""
    parts = each_lane(w, address, cluster, count, nbytes)
    state = np.array(parts[0].cta.mbarrier(parts[0].offset).phase, np.uint64)
    if len(parts) > 1:
        state = lane_phases(w, address, cluster)
    order.hand_over(w.cta, w.warps)  # once: all signals of one instruction are one event
    for share in parts:
        barrier, (number, expected) = share.cta.mbarrier(share.offset), share.values
        if w.observer is not None:
            w.observer.barrier(w, barrier, "arrive", number * share.lanes)
        if nbytes is not None:
            barrier.expect(expected * share.lanes)
        if number < 1:
            raise Fault("barrier_count", f"mbarrier.arrive with a count of {number}", barrier.name)
        phases.check_use(w, share.warps, barrier, share.cta is not w.cta)
        phases.check_arrival(w, share.warps, barrier)
        order.arrive(w.cta, share.warps, barrier, release=False)
        if share.cta is not w.cta:
            note_visit(w, share)
        w.engine.arrive(barrier, number * share.lanes)
    return state


def note_visit(w: Window, share: Share) -> None:
    """Record that warps arrive at an mbarrier of another CTA, which must not exit before that."""
    cluster, origin = w.cta.cluster, w.origin()
    for warp in share.warps:
        row = cluster.clocks.row(w.cta.rank, warp)
        cluster.visits[row, share.cta.rank] = (int(cluster.clocks.now[row, row]), origin)


def lane_phases(w: Window, address: np.ndarray, cluster: bool) -> np.ndarray:
    """Return the phase of each lane's barrier."""
    phases = np.zeros(w.n, np.uint64)
    for target, index, pattern in place_shared(w, address, cluster):
        phases[slice(None) if index is None else index] = [target.mbarrier(offset).phase for offset in pattern.offsets.tolist()]
    return phases


@runtime
def mbarrier_expect(w: Window, address: np.ndarray, nbytes: np.ndarray, cluster: bool) -> None:
    """Execute mbarrier.expect_tx."""
    for share in each_lane(w, address, cluster, nbytes):
        barrier = share.cta.mbarrier(share.offset)
        phases.check_use(w, share.warps, barrier, share.cta is not w.cta)
        barrier.expect(share.values[0] * share.lanes)
        w.engine.note_progress()


@runtime
def mbarrier_complete(w: Window, address: np.ndarray, nbytes: np.ndarray, cluster: bool) -> None:
    """Execute mbarrier.complete_tx, which is relaxed: who waits for the phase learns nothing of this warp."""
    for share in each_lane(w, address, cluster, nbytes):
        barrier = share.cta.mbarrier(share.offset)
        phases.check_use(w, share.warps, barrier, share.cta is not w.cta)
        if share.cta is not w.cta:
            note_visit(w, share)
        w.engine.complete_tx(barrier, share.values[0] * share.lanes)


@runtime
def mbarrier_wait(w: Window, address: np.ndarray, expected: np.ndarray, out: np.ndarray, parity: bool, hint: bool) -> bool:
    """Execute try_wait or test_wait. Return False when the group is blocked and executes this again, once the phase may have changed."""
    cta = w.cta
    ready = np.zeros(w.n, bool)
    blocked: list[Mbarrier] = []
    users: list[Sequence[int]] = []  # warps that wait for each barrier
    places: list[np.ndarray | slice] = []  # lanes that wait for each barrier
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
        phases.check_lapped(w, barrier)
        phases.check_use(w, warps, barrier, False)
    if ready.any():
        w.engine.end_wait()
        out[...] = ready
        for barrier, warps, where in zip(blocked, users, places, strict=True):
            # Lanes of a warp that have come apart may wait for different barriers: passing one says nothing about another.
            done = warps if ready.all() else warps_of(w, np.arange(w.n)[where][ready[where]])
            if parity:
                phases.check_wait(w, done, barrier)
            order.wait(cta, done, barrier)
            phases.note_wait(cta, done, barrier)
            if w.observer is not None and done:
                w.observer.barrier(w, barrier, "wait", 0)
        return True
    if w.engine.refuse_wait(blocked, hint):
        out[...] = False
        return True
    return False


def warps_of(w: Window, lanes: np.ndarray) -> tuple[int, ...]:
    """Return the warps of these positions in the window."""
    return tuple(int(warp) for warp in np.unique(w.lanes[lanes] // WARP))


# ---------------------------------------------------------------- named barriers


@op(r"bar(.cta)?.sync", r"barrier(.cta)?.sync.aligned", writes=(), pure=False, taint="own", needs="warp", starts=True, ends=True)
@op(r"barrier(.cta)?.sync", writes=(), pure=False, taint="own", starts=True, ends=True)
def sync(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit an arrival and a wait. Without .aligned the lanes of a warp may come apart, even from different places, and count once."""
    e.line(f"if not named_sync(w, {barrier_operands(e, ins.operands)}): return BLOCKED")


@op(r"bar(.cta)?.arrive", r"barrier(.cta)?.arrive.aligned", writes=(), pure=False, taint="own", needs="warp")
@op(r"barrier(.cta)?.arrive", writes=(), pure=False, taint="own")
def arrive_only(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit an arrival without a wait. Without .aligned the lanes of a warp may come apart, and count once."""
    if len(ins.operands) != 2:
        raise Unsupported("bar.arrive without a thread count")
    e.line(f"named_arrive(w, {barrier_operands(e, ins.operands)})")


@op(
    r"bar(.cta)?.red.(?P<f>popc).u32", r"bar(.cta)?.red.(?P<f>and|or).pred",
    pure=False, needs="warp", starts=True, ends=True,
)  # fmt: skip
def reduce(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit an arrival, a wait, and the combination of a predicate over all threads."""
    source = e.src(ins.operands[-1], "pred")
    d = e.dst(ins.operands[0], "u32" if m["f"] == "popc" else "pred")
    e.line(f"if not named_sync(w, {barrier_operands(e, ins.operands[1:-1])}, {m['f']!r}, {source}, {d}): return BLOCKED")


def barrier_operands(e: Emitter, operands: list[Operand | None]) -> str:
    """Return the expressions of barrier id and thread count."""
    count = value_of(e, operands[1]) if len(operands) > 1 else "None"
    return f"{value_of(e, operands[0])}, {count}"


def uniform(w: Window, value: np.ndarray | None, what: str) -> int | None:
    """Return the value of an operand that must be the same in all lanes. Raises Fault where lanes differ."""
    if value is None:
        return None
    if value.ndim == 0:
        return int(value)
    first = int(value[0])
    if not bool((value == first).all()):
        raise Fault("divergence", f"{what} differs between the lanes of a convoy")
    return first


def named(w: Window, number: np.ndarray, count: np.ndarray | None) -> tuple[NamedBarrier, int]:
    """Return the barrier and its thread count (all live threads of the CTA by default)."""
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
    """Execute bar.sync or bar.red. Return True for the convoy that completes the round; it moves the others behind the barrier."""
    cta = w.cta
    if w.engine.must_separate(number):
        return False
    barrier, threads = named(w, number, count)
    if source is not None:
        barrier.results.append((function, np.broadcast_to(source, (w.n,)).copy(), out, w))
    warps = w.warps if w.whole else arriving(w, barrier, w.lanes)
    if w.observer is not None:
        w.observer.barrier(w, barrier, "sync", len(warps) * WARP)
    phases.note_arrival(w, warps, barrier, True)
    order.arrive(cta, w.warps, barrier)
    if barrier.arrive(len(warps) * WARP, threads):
        release(w.engine, cta, barrier)
        order.wait(cta, w.warps, barrier)
        phases.note_round(cta, w.warps, barrier)
        return True
    w.engine.block([barrier])
    return False


def arriving(w: Window, barrier: NamedBarrier, lanes: np.ndarray) -> tuple[int, ...]:
    """Return the warps that arrive at a barrier with some lanes: those whose last live lanes are among them."""
    for lane in lanes.tolist():
        barrier.lanes.setdefault(lane // WARP, set()).add(lane)
    warps = tuple(warp for warp in np.unique(lanes // WARP).tolist() if len(barrier.lanes[warp]) >= w.cta.live[warp])
    for warp in warps:
        del barrier.lanes[warp]
    return warps


@runtime
def named_arrive(w: Window, number: np.ndarray, count: np.ndarray) -> None:
    """Execute bar.arrive."""
    cta = w.cta
    flat = np.broadcast_to(number, (w.n,))
    for value in np.unique(flat):
        barrier, threads = named(w, np.array(value), count)
        lanes = w.lanes[flat == value]
        warps = w.warps if w.whole and len(lanes) == w.n else arriving(w, barrier, lanes)
        if w.observer is not None:
            w.observer.barrier(w, barrier, "arrive", len(warps) * WARP)
        phases.note_arrival(w, warps, barrier, False)
        order.arrive(cta, tuple(np.unique(lanes // WARP).tolist()), barrier)
        if barrier.arrive(len(warps) * WARP, threads):
            release(w.engine, cta, barrier)
    w.engine.note_progress()


def leave(engine: Engine, cta: Cta, warps: Iterable[int], lanes: np.ndarray) -> None:
    """Let warps whose last other lanes have exited arrive at the named barriers where the rest of their lanes are, or have been."""
    for barrier in cta.named.values():
        for warp in warps:
            if barrier.expected is None or warp not in barrier.lanes:
                continue
            barrier.lanes[warp].difference_update(lanes.tolist())
            if len(barrier.lanes[warp]) >= cta.live[warp]:
                del barrier.lanes[warp]
                if barrier.arrive(WARP, barrier.expected):
                    release(engine, cta, barrier)


def release(engine: Engine, cta: Cta, barrier: NamedBarrier) -> None:
    """Complete the round: store the results of bar.red, and let all groups inside go on."""
    if barrier.results:
        votes = np.concatenate([part[1] for part in barrier.results])  # type: ignore[misc]
        for function, _, out, window in barrier.results:
            value = {"popc": int(np.count_nonzero(votes)), "and": bool(votes.all()), "or": bool(votes.any())}[str(function)]
            out[...] = value  # type: ignore[index]
            if isinstance(window, Window):
                window.write_back()
        barrier.results.clear()
    barrier.next_round()
    for warps in engine.release(barrier):
        order.wait(cta, warps, barrier)
        phases.note_round(cta, warps, barrier)


# ---------------------------------------------------------------- cluster barrier


@op(r"barrier.cluster.arrive(.(release|relaxed))?(.aligned)?", writes=(), pure=False, taint="own", needs="warp")
def cluster_arrive(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit an arrival at the cluster barrier."""
    e.line(f"cluster_barrier_arrive(w, {'.relaxed' in ins.opcode})")


@op(r"barrier.cluster.wait(.acquire)?(.aligned)?", writes=(), pure=False, taint="own", needs="warp", starts=True, ends=True)
def cluster_wait(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a wait for the round in which the lanes have arrived."""
    e.line("if not cluster_barrier_wait(w): return BLOCKED")


@runtime
def cluster_barrier_arrive(w: Window, relaxed: bool) -> None:
    """Execute barrier.cluster.arrive."""
    cta = w.cta
    barrier = cta.cluster.barrier
    if bool((cta.cluster_arrived[w.lanes] >= 0).any()):
        raise Fault("barrier_arrivals", "a second barrier.cluster.arrive without a wait between", "cluster barrier")
    cta.cluster_arrived[w.lanes] = barrier.phase
    if w.observer is not None:
        w.observer.barrier(w, barrier, "cluster_arrive_relaxed" if relaxed else "cluster_arrive", w.n)
    if not relaxed:
        phases.note_fence(cta, w.warps)
    order.arrive(cta, w.warps, barrier, not relaxed)
    if barrier.arrive(w.n):
        w.engine.wake(barrier)
    w.engine.note_progress()


@runtime
def cluster_barrier_wait(w: Window) -> bool:
    """Execute barrier.cluster.wait. Return False when the group is blocked."""
    cta = w.cta
    barrier = cta.cluster.barrier
    rounds = cta.cluster_arrived[w.lanes]
    if bool((rounds < 0).any()):
        raise Fault("barrier_arrivals", "barrier.cluster.wait without an arrive", "cluster barrier")
    if bool((rounds < barrier.phase).all()):
        cta.cluster_arrived[w.lanes] = -1
        order.wait(cta, w.warps, barrier)
        if w.observer is not None:
            w.observer.barrier(w, barrier, "cluster_wait", w.n)
        return True
    w.engine.block([barrier])
    return False

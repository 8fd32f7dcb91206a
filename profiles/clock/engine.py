"""Event loop of the clock: the warps of a cluster issue their programs in order, under scoreboards, pipes and units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from .barriers import Mbarrier, NamedBarrier
from .constants import Constants
from .instructions import PIPE_NUMBERS, SCHEDULERS, TimedInstruction
from .program import WARP, Arrival, GlobalAccess, Issue, Product, Request, TensorLoad, TensorProduct
from .spans import ISSUE, PORT, TENSOR_CORE, TENSOR_MEMORY, TMA, Span, mbarrier_track
from .units import WARPGROUP, At, CopyEngine, Hbm, Memory, Port, QueuedProduct, Server, TensorCore, TensorQueue

FOREVER = 1 << 60


class StandstillError(RuntimeError):
    """Warps that wait for something that never comes; the message names them."""


@dataclass(frozen=True)
class Setting:
    """Circumstances of a run.

    hbm_bytes: a clock, of each SM. cold: the first load of a line comes from HBM. order: of warpgroups in the tensor core.
    spans: whether to keep what a timeline shows. rows: query rows of a cluster of decode; 0: all that it has room for.
    """

    hbm_bytes: float
    cold: bool = True
    order: str = "fifo"
    spans: bool = False
    rows: int = 0


@dataclass
class Result:
    """Times of a run, in clocks. end: the last exit. stalls: clocks by (role's warp, address, cause) of the first CTA.

    product_clocks: of the tensor core of the first CTA. spans: of all CTAs, when asked for.
    """

    end: int
    exits: dict[tuple[int, int], int]
    stalls: Counter[tuple[int, int, str]]
    issued: Counter[tuple[int, int]]
    product_clocks: int
    port_clocks: float
    spans: list[Span] = field(default_factory=list)


class Scheduler:
    """One of the four schedulers of an SM: issues an instruction a clock. pipes: when each is free."""

    __slots__ = ("free", "pipes")

    def __init__(self) -> None:
        self.free = 0
        self.pipes = [0] * len(PIPE_NUMBERS)


class Sm:
    """Units of one SM, with the state of the CTA that runs on it."""

    def __init__(self, rank: int, constants: Constants, setting: Setting, at: At, hbm: Hbm) -> None:
        self.rank = rank
        self.schedulers = [Scheduler() for _ in range(SCHEDULERS)]
        self.port = Port(constants)
        self.memory = Memory(constants, setting.cold, hbm)
        self.tensor = TensorCore(constants, self.port, at, setting.order, setting.spans)
        self.copies = CopyEngine(constants)
        self.remote = Server()
        self.queue = TensorQueue(constants, at, setting.spans)
        self.tensor_memory = [Server() for _ in range(SCHEDULERS)]
        self.mbarriers: dict[int, Mbarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.warpgroups: dict[int, Warpgroup] = {}
        self.threads = 0


class Warpgroup:
    """Matrix products of four warps. issued: products by warp. groups: the products that end a group."""

    def __init__(self) -> None:
        self.issued = [0] * WARPGROUP
        self.products: list[QueuedProduct] = []
        self.groups: list[int] = []
        self.closed = [0] * WARPGROUP


class Warp:
    """A warp and its place in its program. ready: when it may issue by its stall count. pending: unresolved results by scoreboard."""

    __slots__ = (
        "boards",
        "causes",
        "copy_groups",
        "last_copy",
        "pc",
        "pending",
        "program",
        "rank",
        "ready",
        "scheduler",
        "sm",
        "starved",
        "stopped",
        "warp",
        "why",
    )  # fmt: skip

    def __init__(self, sm: Sm, warp: int) -> None:
        self.sm = sm
        self.rank = sm.rank
        self.warp = warp
        self.program: list[Issue] = []
        self.starved = True  # its program has ended, or is not known further
        self.scheduler = sm.schedulers[warp % SCHEDULERS]
        self.pc = 0
        self.ready = 0
        self.boards = [0] * 6
        self.pending = [0] * 6
        self.causes = [""] * 6
        self.stopped = False  # until a scoreboard resolves
        self.why = ""
        self.copy_groups: list[int] = []
        self.last_copy = 0

    def place(self) -> str:
        """Return where the warp is, for messages."""
        if not self.program:
            return f"CTA {self.rank} warp {self.warp} has no program"
        op = self.program[min(self.pc, len(self.program) - 1)][0]
        waited = sorted({cause for cause, number in zip(self.causes, self.pending, strict=True) if number})
        return f"CTA {self.rank} warp {self.warp} is at {op.address:#x} {op.text}{' and waits for ' if waited else ''}{', '.join(waited)}"


class Engine:
    """A cluster of CTAs, one on each SM. ctas: their number. warps: of each CTA. Programs grow while the kernel is executed (extend)."""

    def __init__(self, ctas: int, warps: int, constants: Constants, setting: Setting) -> None:
        self.constants = constants
        self.setting = setting
        self.heap: list[tuple[int, int, Callable[..., None], Any]] = []
        self.serial = 0
        hbm = Hbm(ctas * setting.hbm_bytes)
        self.sms = [Sm(rank, constants, setting, self.at, hbm) for rank in range(ctas)]
        self.warps = {(sm.rank, number): Warp(sm, number) for sm in self.sms for number in range(warps)}
        self.answer: tuple[int, int, bool] | None = None
        self.cluster = NamedBarrier()
        self.exits: dict[tuple[int, int], int] = {}
        self.stalls: Counter[tuple[int, int, str]] = Counter()
        self.issued: Counter[tuple[int, int]] = Counter()
        self.spans: list[Span] = []
        self.handlers = {name[4:].replace("_", " "): getattr(self, name) for name in dir(self) if name.startswith("_do_")}
        for sm in self.sms:
            sm.threads = WARP * warps

    # ------------------------------------------------------------ events

    def at(self, clock: float, call: Callable[[int], None]) -> None:
        """Call a function with the clock, at that clock."""
        self.serial += 1
        heappush(self.heap, (int(clock), self.serial, _call, call))

    def resume(self, warp: Warp, clock: float) -> None:
        """Let a warp go on at a clock."""
        self.serial += 1
        heappush(self.heap, (int(clock), self.serial, self._issue, warp))

    def extend(self, rank: int, warp: int, program: Sequence[Issue]) -> None:
        """Append to the program of a warp."""
        target = self.warps[rank, warp]
        if program:
            target.program.extend(program)
            if target.starved:
                target.starved = False
                target.why = "mbarrier" if target.program[target.pc][0].kind == "phase wait" else ""
                self.resume(target, target.ready)

    def has_events(self) -> bool:
        """Return True if anything is to come but instructions of warps."""
        return any(function is _call for _, _, function, _ in self.heap)

    def run(self) -> tuple[int, int, bool] | None:
        """Run until a warp asks whether a phase is complete, or nothing is left to do. Return rank, warp and answer of a question."""
        heap = self.heap
        self.answer = None
        while heap and self.answer is None:
            clock, _, function, argument = heappop(heap)
            function(clock, argument)
        return self.answer

    def result(self) -> Result:
        """Return the times once all programs are whole and have run. StandstillError if a warp never got to its end."""
        left = [warp.place() for place, warp in self.warps.items() if not warp.starved or any(warp.pending) or place not in self.exits]
        if left:
            lacking = [f"CTA {sm.rank} {mbarrier_track(offset)} {lack}" for sm in self.sms for offset, item in sm.mbarriers.items()
                       if (lack := item.lack())]  # fmt: skip
            raise StandstillError("the clock stands still: " + "; ".join([*left, *lacking]))
        first = self.sms[0]
        end = max(self.exits.values())
        busy = first.tensor.busy or first.queue.busy
        products = [Span(sm.rank, TENSOR_CORE, *span) for sm in self.sms for span in (*sm.tensor.spans, *sm.queue.spans)]
        spans = [*self.spans, *products] if self.setting.spans else []
        return Result(end, self.exits, self.stalls, self.issued, busy, first.port.queue.busy, spans)

    def _issue(self, clock: int, warp: Warp) -> None:
        """Issue instructions of a warp until another event comes first, or it has to wait."""
        heap, program, scheduler = self.heap, warp.program, warp.scheduler
        boards, pending, pipes = warp.boards, warp.pending, scheduler.pipes
        while True:
            if warp.pc == len(program):
                warp.starved = True
                return
            op, operands = program[warp.pc]
            time = clock
            for board in op.waits:
                if pending[board]:
                    warp.stopped = True
                    warp.why = warp.causes[board]
                    return
                if boards[board] > time:
                    time = boards[board]
                    warp.why = warp.causes[board]
            if scheduler.free > time:
                time = scheduler.free
                warp.why = warp.why or "issue"
            if pipes[op.pipe] > time:
                time = pipes[op.pipe]
                warp.why = "pipe"
            if heap and heap[0][0] < time:
                self.resume(warp, time)
                return
            if op.kind and operands is not None:
                following = self.handlers[op.kind](time, warp, op, operands)
                if following is None:  # not issued: it will be tried again
                    return
            else:
                following = time + op.stall
                if op.write_board >= 0:
                    self.hold(warp, op.write_board, time + op.latency, op.base)
                if op.read_board >= 0:
                    self.hold(warp, op.read_board, time + op.read, op.base)
            scheduler.free = time + 1
            pipes[op.pipe] = time + op.occupancy
            if time > warp.ready and warp.rank == 0:
                self.stalls[warp.warp, op.address, warp.why or "issue"] += time - warp.ready
            if warp.rank == 0:
                self.issued[warp.warp, op.address] += 1
            if self.setting.spans:
                if time > warp.ready:
                    self.record(warp.rank, str(warp.warp), warp.why or "issue", warp.ready, time, op.address)
                self.record(warp.rank, str(warp.warp), ISSUE, time, time + op.stall, op.address)
            warp.why = ""
            warp.pc += 1
            if following >= FOREVER:  # whoever lets it go on says when
                return
            warp.ready = clock = following
            if self.answer is not None:
                self.resume(warp, following)
                return
            if heap and heap[0][0] < clock:
                self.resume(warp, clock)
                return

    def record(self, rank: int, track: str, name: str, start: float, end: float, address: int) -> None:
        """Keep a span for the timeline, if one was asked for."""
        if self.setting.spans:
            self.spans.append(Span(rank, track, name, int(start), int(end), address))

    def hold(self, warp: Warp, board: int, until: float, cause: str) -> None:
        """Let a scoreboard hold until a clock. board: -1 for none."""
        if board >= 0 and until > warp.boards[board]:
            warp.boards[board] = int(until)
            warp.causes[board] = cause

    def hold_both(self, warp: Warp, op: TimedInstruction, until: float) -> None:
        """Let both scoreboards of an instruction hold until a clock."""
        self.hold(warp, op.read_board, until, op.base)
        self.hold(warp, op.write_board, until, op.base)

    def hold_open(self, warp: Warp, board: int, cause: str) -> Callable[[float], None]:
        """Let a scoreboard hold until the function that is returned has been called with the clock at which it is free."""
        warp.pending[board] += 1
        warp.causes[board] = cause

        def release(clock: float) -> None:
            warp.pending[board] -= 1
            self.hold(warp, board, clock, cause)
            if warp.stopped and not warp.pending[board]:
                warp.stopped = False
                self.resume(warp, max(clock, warp.ready))

        return release

    # ------------------------------------------------------------ instructions: each returns when the warp may issue again

    def _do_branch(self, clock: int, warp: Warp, op: TimedInstruction, taken: bool) -> int:
        return clock + op.stall + (self.constants.branch_clocks if taken else 0)

    def _do_exit(self, clock: int, warp: Warp, op: TimedInstruction, is_last: bool) -> int | None:
        if is_last:
            self.exits[warp.rank, warp.warp] = clock
        return clock + op.stall

    def _do_shared(self, clock: int, warp: Warp, op: TimedInstruction, turns: int) -> int | None:
        return self._through_port(clock, warp, op, turns, self.constants.shared_latency)

    def _do_local(self, clock: int, warp: Warp, op: TimedInstruction, turns: int) -> int | None:
        """Spill or reload registers, always within L1."""
        return self._through_port(clock, warp, op, turns, self.constants.l1_latency)

    def _through_port(self, clock: int, warp: Warp, op: TimedInstruction, turns: int, latency: int) -> int | None:
        port, constants = warp.sm.port, self.constants
        if port.queue.free - clock > constants.memory_queue_clocks:
            warp.why = "memory queue"
            self.resume(warp, port.queue.free - constants.memory_queue_clocks)
            return None
        end = port.access(clock, turns)
        self.record(warp.rank, PORT, op.base, end - turns, end, op.address)
        self.hold(warp, op.write_board, end + latency - 1, op.base)
        self.hold(warp, op.read_board, end + constants.store_read_clocks - 1, op.base)
        return clock + op.stall

    def _do_global_load(self, clock: int, warp: Warp, op: TimedInstruction, access: GlobalAccess) -> int | None:
        constants, sm = self.constants, warp.sm
        sm.port.access(clock, access.wavefronts * 128 / constants.l1_bytes)
        end = sm.memory.arrival(clock, access.request, constants.l2_latency, constants.hbm_latency)
        self.hold(warp, op.write_board, end, op.base)
        self.hold(warp, op.read_board, clock + op.read, op.base)
        return clock + op.stall

    def _do_generic_load(self, clock: int, warp: Warp, op: TimedInstruction, access: GlobalAccess | int) -> int | None:
        if isinstance(access, GlobalAccess):
            return self._do_global_load(clock, warp, op, access)
        end = warp.sm.remote.serve(clock, access / self.constants.remote_bytes)
        self.hold(warp, op.write_board, end + self.constants.remote_latency, op.base)
        self.hold(warp, op.read_board, clock + op.read, op.base)
        return clock + op.stall

    def _do_global_store(self, clock: int, warp: Warp, op: TimedInstruction, access: GlobalAccess) -> int | None:
        end = warp.sm.port.queue.serve(clock, access.wavefronts * 128 / self.constants.l1_bytes)
        warp.sm.memory.link.serve(clock, access.request.nbytes / self.constants.l2_bytes)
        self.hold_both(warp, op, end + self.constants.store_read_clocks)
        return clock + op.stall

    def _do_copy(self, clock: int, warp: Warp, op: TimedInstruction, access: GlobalAccess) -> int:
        constants, sm = self.constants, warp.sm
        sm.port.queue.serve(clock, access.wavefronts)
        end = sm.memory.arrival(clock, access.request, constants.l2_latency, constants.hbm_latency)
        sm.port.write(access.wavefronts * 128)
        warp.last_copy = max(warp.last_copy, int(end))
        self.hold(warp, op.read_board, clock + op.read, op.base)
        return clock + op.stall

    def _do_copies_arrive(self, clock: int, warp: Warp, op: TimedInstruction, arrivals: Sequence[Arrival]) -> int:
        for arrival in arrivals:
            self._signal(max(clock, warp.last_copy) + self.constants.arrive_latency, arrival)
        return clock + op.stall

    def _do_copies_commit(self, clock: int, warp: Warp, op: TimedInstruction, operands: Any) -> int:
        warp.copy_groups.append(warp.last_copy)
        self.hold(warp, op.write_board, clock + op.latency, op.base)
        return clock + op.stall

    def _do_copies_wait(self, clock: int, warp: Warp, op: TimedInstruction, remaining: int) -> int | None:
        done = warp.copy_groups[: len(warp.copy_groups) - remaining] if remaining < len(warp.copy_groups) else []
        until = max(done, default=0)
        if until > clock:
            warp.why = "cp.async"
            self.resume(warp, until)
            return None
        return clock + op.stall

    # barriers

    def _signal(self, clock: float, arrival: Arrival) -> None:
        """Let arrivals or bytes reach an mbarrier at a clock."""
        barrier = self.sms[arrival.rank].mbarriers.setdefault(arrival.offset, Mbarrier(1))

        def take(now: int) -> None:
            begin = barrier.completed_at
            if barrier.signal(now, arrival.number, arrival.tx) and self.setting.spans:
                self.record(arrival.rank, mbarrier_track(arrival.offset), f"phase {barrier.phase - 1}", begin, now, -1)

        self.at(clock, take)

    def _do_initialise(self, clock: int, warp: Warp, op: TimedInstruction, barriers: Sequence[tuple[int, int]]) -> int:
        for offset, count in barriers:
            warp.sm.mbarriers[offset] = Mbarrier(count)
        return clock + op.stall

    def _do_arrive(self, clock: int, warp: Warp, op: TimedInstruction, arrivals: Sequence[Arrival]) -> int:
        for arrival in arrivals:
            latency = self.constants.arrive_latency if arrival.rank == warp.rank else self.constants.remote_latency
            self._signal(clock + latency, arrival)
        self.hold_both(warp, op, clock + op.read)
        return clock + op.stall

    def _do_phase_wait(self, clock: int, warp: Warp, op: TimedInstruction, waits: Sequence[tuple[int, int]]) -> int:
        latency = self.constants.phase_latency
        for offset, parity in waits:
            barrier = warp.sm.mbarriers.setdefault(offset, Mbarrier(1))  # the one in reserved shared memory is never initialised
            if barrier.is_complete(parity):
                self.hold(warp, op.write_board, clock + latency, "mbarrier")
            else:
                release = self.hold_open(warp, op.write_board, "mbarrier")
                barrier.wait(parity, lambda now, release=release: release(max(now, clock) + latency))  # type: ignore[misc]
        return clock + op.stall

    def _do_phase_test(self, clock: int, warp: Warp, op: TimedInstruction, waits: Sequence[tuple[int, int]]) -> int:
        complete = all(warp.sm.mbarriers[offset].is_complete(parity) for offset, parity in waits)
        self.answer = warp.rank, warp.warp, complete
        self.hold(warp, op.write_board, clock + self.constants.phase_latency, "mbarrier")
        return clock + op.stall

    def _do_barrier_arrive(self, clock: int, warp: Warp, op: TimedInstruction, operands: tuple[int, int]) -> int:
        number, threads = operands
        warp.sm.named.setdefault(number, NamedBarrier()).arrive(clock, WARP, threads or warp.sm.threads)
        return clock + op.stall

    def _do_barrier_sync(self, clock: int, warp: Warp, op: TimedInstruction, operands: tuple[int, int]) -> int:
        number, threads = operands
        barrier = warp.sm.named.setdefault(number, NamedBarrier())
        barrier.arrive(clock, WARP, threads or warp.sm.threads, self._restart(clock, warp, op, "barrier", self.constants.barrier_latency))
        return FOREVER

    def _restart(self, clock: int, warp: Warp, op: TimedInstruction, cause: str, latency: int) -> Callable[[int], None]:
        """Return a function that lets a warp go on `latency` after the clock that it is called with."""

        def go(now: int) -> None:
            until = max(now + latency, clock + op.stall)
            if warp.rank == 0:
                self.stalls[warp.warp, op.address, cause] += until - clock - op.stall
            if until > clock + op.stall:
                self.record(warp.rank, str(warp.warp), cause, clock + op.stall, until, op.address)
            warp.ready = until
            self.resume(warp, until)

        return go

    def _do_cluster_arrive(self, clock: int, warp: Warp, op: TimedInstruction, operands: Any) -> int:
        self.cluster.arrive(clock, 1, len(self.warps))
        return clock + op.stall

    def _do_cluster_wait(self, clock: int, warp: Warp, op: TimedInstruction, operands: Any) -> int:
        # The arrival stands before: the round may be over, and then nobody is left to wake this warp.
        if self.cluster.arrived == 0:
            return clock + max(op.stall, self.constants.barrier_latency)
        self.cluster.arrive(clock, 0, len(self.warps), self._restart(clock, warp, op, "cluster barrier", self.constants.cluster_latency))
        return FOREVER

    # products

    def _do_product(self, clock: int, warp: Warp, op: TimedInstruction, product: Product) -> int | None:
        sm, lane = warp.sm, warp.warp % WARPGROUP
        group = sm.warpgroups.setdefault(warp.warp // WARPGROUP, Warpgroup())
        number = group.issued[lane]
        if number == max(group.issued):  # the first of the four warps: the queue must have room
            if not sm.tensor.has_room(product):
                warp.why = "tensor core queue"
                sm.tensor.when_room(lambda now: self.resume(warp, max(now, clock)))
                return None
            sm.tensor.in_flight += 1
            group.products.append(QueuedProduct(warp.warp // WARPGROUP, product, clock, op.address))
            if product.ends:
                group.groups.append(number)
        group.issued[lane] += 1
        if min(group.issued) > number:
            item = group.products[number]
            item.clock = clock
            sm.tensor.issue(clock, item)
        if product.ends:
            group.closed[lane] += 1
        return clock + op.stall

    def _do_products_wait(self, clock: int, warp: Warp, op: TimedInstruction, remaining: int) -> int:
        group = warp.sm.warpgroups.get(warp.warp // WARPGROUP)
        closed = 0 if group is None else group.closed[warp.warp % WARPGROUP] - remaining
        if group is None or closed <= 0:
            return clock + op.stall
        item = group.products[group.groups[closed - 1]]
        go = self._restart(clock, warp, op, "products", 0)
        if item.end >= 0:
            if item.end <= clock:
                return clock + op.stall
            go(item.end)
        else:
            item.wakes.append(go)
        return FOREVER

    def _do_tensor_product(self, clock: int, warp: Warp, op: TimedInstruction, product: TensorProduct) -> int:
        ports = [self.sms[warp.rank & ~1 | index].port for index in range(2)] if product.ctas == 2 else [warp.sm.port]
        warp.sm.queue.issue(clock, (product, ports, op.address))
        self.hold_both(warp, op, clock + op.read)
        return clock + op.stall

    def _do_commit(self, clock: int, warp: Warp, op: TimedInstruction, arrivals: Sequence[Arrival]) -> int:
        def signal(now: int) -> None:
            for arrival in arrivals:
                self._signal(now + (0 if arrival.rank == warp.rank else self.constants.remote_latency), arrival)

        warp.sm.queue.issue(clock, signal)
        self.hold_both(warp, op, clock + op.read)
        return clock + op.stall

    def _do_tensor_move(self, clock: int, warp: Warp, op: TimedInstruction, registers: int) -> int:
        """Move registers from or to the lanes of tensor memory that belong to the warp's scheduler."""
        lanes = warp.sm.tensor_memory[warp.warp % SCHEDULERS]
        clocks = registers * WARP * 4 / (self.constants.tensor_bytes / SCHEDULERS)
        end = lanes.serve(clock, clocks)
        if self.setting.spans:
            self.record(warp.rank, f"{TENSOR_MEMORY} {warp.warp % SCHEDULERS}", op.base, end - clocks, end, op.address)
        self.hold(warp, op.write_board, end + self.constants.tensor_latency, op.base)
        self.hold(warp, op.read_board, end, op.base)
        return clock + op.stall

    def _do_tensor_stores_wait(self, clock: int, warp: Warp, op: TimedInstruction, operands: Any) -> int:
        """Wait until the warp's stores to tensor memory are done."""
        until = max(clock, warp.sm.tensor_memory[warp.warp % SCHEDULERS].free) + self.constants.tensor_latency
        self.hold_both(warp, op, until)
        return clock + op.stall

    # copies

    def _do_prefetch(self, clock: int, warp: Warp, op: TimedInstruction, request: Request) -> int:
        """Bring the lines of a warp's prefetch to L2."""
        warp.sm.memory.prefetch(clock, request, self.constants.hbm_latency - self.constants.l2_latency)
        self.hold_both(warp, op, clock + op.read)
        return clock + op.stall

    def _do_tensor_prefetch(self, clock: int, warp: Warp, op: TimedInstruction, request: Request) -> int:
        """Bring boxes or contiguous bytes to L2 by TMA."""
        constants, sm = self.constants, warp.sm
        sent = sm.copies.accept(clock)
        self.hold_both(warp, op, sent)
        end = sm.memory.prefetch(sent, request, constants.copy_hbm_latency - constants.copy_l2_latency)
        if self.setting.spans:
            self.record(warp.rank, TMA, f"prefetch {request.nbytes} bytes", sent, end, op.address)
        return clock + op.stall

    _do_bulk_prefetch = _do_tensor_prefetch

    def _do_tensor_copy(self, clock: int, warp: Warp, op: TimedInstruction, load: TensorLoad) -> int:
        constants, sm = self.constants, warp.sm
        sent = sm.copies.accept(clock, load.gathers)
        self.hold(warp, op.read_board, sent, op.base)
        if load.signals:
            end = sm.memory.arrival(sent, load.request, constants.copy_l2_latency, constants.copy_hbm_latency)
            if len(load.signals) > 1:
                end += constants.multicast_latency
            for rank, arrival in load.signals:
                self.sms[rank].port.write(load.nbytes)
                self._signal(end, arrival)
            if self.setting.spans:
                self.record(warp.rank, TMA, f"load {load.nbytes} bytes", sent, end, op.address)
        return clock + op.stall

    _do_bulk_load = _do_tensor_copy

    def _do_tensor_store(self, clock: int, warp: Warp, op: TimedInstruction, operands: Any) -> int:
        """Store a box: it has been read from shared memory some time after the unit has taken it."""
        sent = warp.sm.copies.accept(clock)
        self.hold(warp, op.read_board, sent, op.base)
        warp.last_copy = max(warp.last_copy, int(sent) + self.constants.remote_latency)
        self.record(warp.rank, TMA, "store", sent, warp.last_copy, op.address)
        return clock + op.stall

    def _do_bulk_copy(self, clock: int, warp: Warp, op: TimedInstruction, arrival: Arrival) -> int:
        sent = warp.sm.copies.accept(clock)
        self.hold(warp, op.read_board, sent, op.base)
        warp.sm.port.write(-arrival.tx)
        self.sms[arrival.rank].port.write(-arrival.tx)
        end = warp.sm.remote.serve(sent, -arrival.tx / self.constants.remote_bytes) + self.constants.remote_latency
        if self.setting.spans:
            self.record(warp.rank, TMA, f"copy {-arrival.tx} bytes to CTA {arrival.rank}", sent, end, op.address)
        self._signal(end, arrival)
        return clock + op.stall

    def _do_remote_store(self, clock: int, warp: Warp, op: TimedInstruction, arrivals: Sequence[Arrival]) -> int:
        for arrival in arrivals:
            end = warp.sm.remote.serve(clock, -arrival.tx / self.constants.remote_bytes)
            self.sms[arrival.rank].port.write(-arrival.tx)
            self._signal(end + self.constants.remote_latency, arrival)
        self.hold_both(warp, op, warp.sm.remote.free + op.read)
        return clock + op.stall


def _call(clock: int, function: Callable[[int], None]) -> None:
    function(clock)

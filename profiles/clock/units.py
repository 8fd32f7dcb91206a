"""Units of an SM in time: the port of shared memory, the tensor core, TMA, and the way to L2 and HBM."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .constants import Constants
from .program import SECTOR, Product, Request, TensorProduct

WARPGROUP = 4

At = Callable[[int, Callable[[int], None]], None]  # calls a function at a clock


class Server:
    """A resource that serves one piece after the other. free: when it is done with all of them. busy: clocks of service so far."""

    def __init__(self) -> None:
        self.free = 0.0
        self.busy = 0.0

    def serve(self, clock: float, clocks: float) -> float:
        """Return the end of a piece that comes at a clock."""
        self.free = max(self.free, clock) + clocks
        self.busy += clocks
        return self.free


class Port:
    """The port of shared memory, which loads, stores, copies and the operands of the tensor core share.

    owed: turns of the others that have not been fitted in yet beside the operands. They take the turns that the tensor core leaves; what
    is owed beyond port_slack_clocks makes it wait. fetched: turns of operands so far.
    """

    def __init__(self, constants: Constants) -> None:
        self.bytes = constants.shared_bytes
        self.slack = constants.port_slack_clocks
        self.queue = Server()
        self.owed = 0.0
        self.fetched = 0.0

    def access(self, clock: int, turns: float) -> float:
        """Return the end of an access of a warp that takes so many turns."""
        self.owed += turns
        return self.queue.serve(clock, turns)

    def write(self, nbytes: int) -> None:
        """Take the turns of a copy that arrives."""
        self.owed += nbytes / self.bytes
        self.queue.busy += nbytes / self.bytes

    def needed(self, idle: float, operands: float) -> float:
        """Return the least clocks of a product that fetches operands for so many turns, after the tensor core was idle."""
        self.owed = max(0.0, self.owed - max(0.0, idle))
        return operands + max(0.0, self.owed - self.slack)

    def fetch(self, clocks: float, operands: float) -> None:
        """Take the turns of a product's operands; the turns that are left in its clocks are those of what is owed."""
        self.fetched += operands
        self.owed = max(0.0, self.owed - (clocks - operands))


def share(ports: Sequence[Port], idle: float, clocks: float, operands: float) -> float:
    """Return the clocks of a product of at least so many, which fetches operands through each of some ports.

    All its CTAs take the same time, so what one port has to catch up with gives the others turns, too.
    """
    clocks = max(clocks, *(port.needed(idle, operands) for port in ports))
    for port in ports:
        port.fetch(clocks, operands)
    return clocks


class Hbm(Server):
    """The way of a cluster to HBM, which has the shares of its SMs together. nbytes: a clock.

    there: sectors that were brought to L2, with the clock from which on a load finds them.
    """

    def __init__(self, nbytes: float) -> None:
        super().__init__()
        self.nbytes = nbytes
        self.there: dict[int, float] = {}

    def bring(self, clock: float, sectors: Sequence[int], gain: int) -> float:
        """Bring sectors to L2, each once. Return when they are there for a load; gain: latency of HBM beyond that of L2."""
        found = [self.there[sector] for sector in sectors if sector in self.there]
        end = max(found, default=0.0)
        if len(found) < len(sectors):
            new = [sector for sector in sectors if sector not in self.there]
            brought = self.serve(clock, len(new) * SECTOR / self.nbytes) + gain
            self.there.update(dict.fromkeys(new, brought))
            end = max(end, brought)
        return end


class Memory:
    """The way of one SM to L2 and HBM.

    cold: whether sectors come from HBM at first. hbm: the cluster's way to it.
    """

    def __init__(self, constants: Constants, cold: bool, hbm: Hbm) -> None:
        self.constants = constants
        self.cold = cold
        self.hbm = hbm
        self.link = Server()

    def arrival(self, clock: float, request: Request, l2_latency: int, hbm_latency: int) -> float:
        """Return when the last of the bytes that an access asks for is there."""
        end = self.link.serve(clock, request.nbytes / self.constants.l2_bytes) + l2_latency
        if not self.cold:
            return end
        wanted = request.sectors()
        if request.unit > 1:
            wanted = [*dict.fromkeys(sector - sector % request.unit + index for sector in wanted for index in range(request.unit))]
        return max(end, self.hbm.bring(clock, wanted, hbm_latency - l2_latency) + l2_latency)

    def prefetch(self, clock: float, request: Request, gain: int) -> float:
        """Bring sectors to L2. Return when they are there for a load; gain: latency of HBM beyond that of L2."""
        if not self.cold:
            return clock
        return max(clock, self.hbm.bring(clock, request.sectors(), gain))


@dataclass
class QueuedProduct:
    """A matrix product of a warpgroup in the tensor core. end: when its result is there, -1 until it has started."""

    warpgroup: int
    product: Product
    clock: int
    address: int
    end: int = -1
    start: int = -1
    wakes: list[Callable[[int], None]] = field(default_factory=list)


class TensorCore:
    """The tensor cores of an SM as one unit for products of warpgroups. order: "fifo" or "alternate" among warpgroups.

    spans: (name, start, end, address) of the products, when they are kept.

    Operands of the next product are fetched from shared memory while one runs, so a product takes the longer of the two.
    """

    def __init__(self, constants: Constants, port: Port, at: At, order: str, keeps_spans: bool) -> None:
        self.constants = constants
        self.port = port
        self.at = at
        self.order = order
        self.keeps_spans = keeps_spans
        self.queues: dict[int, deque[QueuedProduct]] = {}
        self.in_flight = 0
        self.busy_until = 0
        self.busy = 0
        self._last_warpgroup = -1
        self._waiting: list[Callable[[int], None]] = []
        self.spans: list[tuple[str, int, int, int]] = []

    def has_room(self, product: Product) -> bool:
        """Return True if another product may be issued."""
        constants = self.constants
        return self.in_flight < (constants.product_depth_registers if product.from_registers else constants.product_depth)

    def when_room(self, wake: Callable[[int], None]) -> None:
        """Call wake when a product has left the queue."""
        self._waiting.append(wake)

    def issue(self, clock: int, item: QueuedProduct) -> None:
        """Queue a product that all four warps have issued."""
        self.queues.setdefault(item.warpgroup, deque()).append(item)
        if clock >= self.busy_until:
            self._start(clock)

    def _next(self) -> QueuedProduct | None:
        waiting = [queue[0] for queue in self.queues.values() if queue]
        if not waiting:
            return None
        if self.order == "alternate":
            others = [item for item in waiting if item.warpgroup != self._last_warpgroup]
            waiting = others or waiting
        return min(waiting, key=lambda item: item.clock)

    def _start(self, clock: int) -> None:
        item = self._next()
        if item is None:
            return
        self.queues[item.warpgroup].popleft()
        self._last_warpgroup = item.warpgroup
        product, constants = item.product, self.constants
        flops = 2 * 64 * product.n * product.k
        rate = constants.product_flops * 2 // product.element_bytes
        nbytes = (product.n + (0 if product.from_registers else 64)) * product.k * product.element_bytes
        clocks = share([self.port], clock - self.busy_until, flops / rate, nbytes / self.port.bytes)
        end = int(clock + clocks)
        item.start = clock
        self.busy += end - clock
        self.busy_until = end
        if self.keeps_spans:
            warp = WARPGROUP * item.warpgroup
            self.spans.append((f"{product.name} of warps {warp} to {warp + WARPGROUP - 1}", clock, end, item.address))
        tail = constants.product_tail_registers if product.from_registers else constants.product_tail
        item.end = end + tail
        for wake in item.wakes:
            wake(item.end)
        item.wakes.clear()
        self.at(end, self._finish)

    def _finish(self, clock: int) -> None:
        self.in_flight -= 1
        waiting, self._waiting = self._waiting, []
        if clock >= self.busy_until:  # else a product that was issued at this clock has begun
            self._start(clock)
        for wake in waiting:
            wake(clock)


class CopyEngine:
    """The TMA unit of an SM: takes one instruction every copy_issue_clocks, a gather of four rows every gather_issue_clocks."""

    def __init__(self, constants: Constants) -> None:
        self.constants = constants
        self.queue = Server()

    def accept(self, clock: int, gathers: bool = False) -> float:
        """Return when the unit sends the requests of an instruction."""
        return self.queue.serve(clock, self.constants.gather_issue_clocks if gathers else self.constants.copy_issue_clocks)


QueuedTensorProduct = tuple[TensorProduct, list[Port], int]  # with the ports of the CTAs that give operands, and its address


class TensorQueue:
    """The tensor core of Blackwell, in the order of issue: products of one CTA or a pair, and commits that signal behind them.

    A product waits for the one before, a commit for its results. spans: (name, start, end, address) of the products, when they are kept.
    """

    def __init__(self, constants: Constants, at: At, keeps_spans: bool) -> None:
        self.constants = constants
        self.at = at
        self.keeps_spans = keeps_spans
        self.queue: deque[QueuedTensorProduct | Callable[[int], None]] = deque()
        self.busy_until = 0
        self.busy = 0
        self.running = False
        self.spans: list[tuple[str, int, int, int]] = []

    def issue(self, clock: int, item: QueuedTensorProduct | Callable[[int], None]) -> None:
        """Queue a product, or the function that a commit calls with the clock of its arrival."""
        self.queue.append(item)
        if not self.running:
            self._next(max(clock, self.busy_until))

    def _next(self, clock: int) -> None:
        self.running = False
        while self.queue:
            item = self.queue.popleft()
            if isinstance(item, tuple):
                self._start(clock, *item)
                return
            done = self.busy_until + self.constants.product_tail if self.busy else clock
            item(max(clock, done) + self.constants.commit_latency)

    def _start(self, clock: int, product: TensorProduct, ports: list[Port], address: int) -> None:
        """Run a product on all tensor cores that it takes."""
        rate = self.constants.product_flops * 2 // product.element_bytes
        needed = 2 * product.rows * product.n * product.k / rate
        idle = clock - self.busy_until
        end = int(clock + share(ports, idle, needed, product.operands / self.constants.shared_bytes))
        self.busy += end - clock
        self.busy_until = end
        self.running = True
        if self.keeps_spans:
            self.spans.append((product.name, clock, end, address))
        self.at(end, self._next)

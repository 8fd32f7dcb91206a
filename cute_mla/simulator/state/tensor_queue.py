"""tcgen05 work: the queue of a tensor core, and the loads and stores of tensor memory by warps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from .async_work import PendingCopy
from .barriers import Mbarrier
from .clocks import Clock
from .origin import Origin

MAX_RECENT = 64


class Cells(NamedTuple):
    """Cells of the tensor memory of the CTA of a rank. blocks: bit mask of blocks of 16 lanes. Columns [low, high)."""

    rank: int
    blocks: int
    low: int
    high: int

    def meets(self, other: Cells) -> bool:
        """Return True when two sets of cells have some in common."""
        return self.rank == other.rank and bool(self.blocks & other.blocks) and self.low < other.high and other.low < self.high


class Work(Protocol):
    """Work of a tensor core. thread: its issuer. serial: its number on this tensor core (of the last step of a chain)."""

    origin: Origin
    thread: int
    serial: int
    what: str

    def key(self) -> object:
        """Return the same key for work on the same operands."""

    def extends(self, other: Any) -> bool:
        """Return True when other work may be appended."""

    def append(self, other: Any) -> None:
        """Add the steps of other work."""

    def execute(self) -> None:
        """Take effect."""

    def written(self) -> Sequence[Cells]:
        """Return the cells of tensor memory that it writes."""

    def read(self) -> Sequence[Cells]:
        """Return the cells of tensor memory that it only reads."""

    def sources(self) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
        """Yield the shared memory that it reads: CTA rank, byte ranges."""


@dataclass
class Commit:
    """An arrival on mbarriers once everything before it is done. clock: the knowledge that it hands over."""

    barriers: list[Mbarrier]
    clock: Clock
    pending: PendingCopy


class TensorQueue:
    """The queue of the tensor core of one issuing CTA.

    recent: the latest work on each set of operands, oldest first. last: number of each thread's last work.
    collector: by the name of a collector buffer, the operand that it holds; None where a product has discarded it.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.items: list[Work | Commit] = []
        self.recent: dict[object, Work] = {}
        self.serial = 0
        self.last: dict[int, int] = {}
        self.collector: dict[str, object] = {}

    def issue(self, work: Work) -> None:
        """Queue work; a product joins the one before it where it can."""
        self.serial += 1
        self.last[work.thread] = work.serial = self.serial
        chain = self.open_chain(work)
        if chain is not None:
            self.recent.popitem()
            chain.append(work)
            chain.serial = self.serial
            work = chain
        else:
            self.items.append(work)
        key = work.key()
        self.recent.pop(key, None)
        self.recent[key] = work
        if len(self.recent) > MAX_RECENT:
            del self.recent[next(iter(self.recent))]

    def open_chain(self, work: Work) -> Work | None:
        """Return the work at the end of the queue that new work continues, None for none."""
        last = self.items[-1] if self.items else None
        return None if last is None or isinstance(last, Commit) or not last.extends(work) else last

    def later_than(self, serial: int) -> Iterator[Work]:
        """Yield the recent work behind a number, newest first."""
        for work in reversed(self.recent.values()):
            if work.serial <= serial:
                return
            yield work

    def uncommitted(self) -> Iterator[Work]:
        """Yield the work that is still in the queue."""
        return (item for item in self.items if not isinstance(item, Commit))


@dataclass
class TensorMove:
    """A tcgen05.ld or tcgen05.st of one warp.

    issued: time of the warp from which on it is behind this move. time: when the warp knew the move to be done; None before.
    fresh: issued in the block that runs now. holders: registers that hold what was loaded, a bit mask per bank. boards: in machine code
    the mask of the scoreboards that a load releases; to wait for one of them is to wait for the load.
    """

    warp: int
    write: bool
    cells: Cells
    origin: Origin
    issued: int
    holders: dict[str, int] = field(default_factory=dict)
    time: int | None = None
    fresh: bool = True
    boards: int = 0

    @property
    def what(self) -> str:
        """Return the instruction in words."""
        return f"a tcgen05.{'st' if self.write else 'ld'}{self.origin.place}"

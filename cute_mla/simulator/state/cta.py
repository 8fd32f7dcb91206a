"""State of a running CTA and of its cluster: memory, barriers, asynchronous work, and what its warps know."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..findings import Fault
from ..frontend.layout import RANK_SHIFT
from .async_work import CopyGroups, GroupedCopy
from .barriers import BarrierInit, ClusterBarrier, Mbarrier, NamedBarrier
from .clocks import Clocks
from .local_memory import LocalMemory
from .memory import SharedMemory
from .names import Names
from .origin import Origin
from .registers import WARP, RegisterFile
from .shared_trace import SharedTrace
from .tensor_memory import TensorMemory
from .tensor_queue import Cells, TensorMove, TensorQueue
from .wgmma_queue import WARPGROUP, WgmmaQueue


@dataclass
class Cluster:
    """CTAs that run together.

    number: how many clusters started before. unfenced: mbarrier.inits without a fence so far. copies: where each agent's last copy was
    issued. visits: (agent, CTA rank) -> when and where the agent last signalled an mbarrier of that other CTA.
    """

    index: tuple[int, int, int]
    size: int
    barrier: ClusterBarrier
    clocks: Clocks
    ctas: list[Cta] = field(default_factory=list)
    number: int = 0
    unfenced: list[BarrierInit] = field(default_factory=list)
    copies: dict[int, Origin] = field(default_factory=dict)
    visits: dict[tuple[int, int], tuple[int, Origin]] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Return True when all threads have exited."""
        return all(cta.exited for cta in self.ctas)


@dataclass
class Storage:
    """Memory of a CTA, which successive CTAs use in turn. trace: history of the shared memory. tensor: allocated on first use."""

    registers: RegisterFile
    smem: SharedMemory
    trace: SharedTrace
    tensor: TensorMemory | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of its arrays."""
        return self.registers.nbytes + 2 * self.smem.nbytes + self.trace.nbytes


@dataclass(frozen=True)
class Constants:
    """Values that do not change while a CTA runs: parameters, special registers that are the same for all threads, names."""

    params: bytes
    specials: dict[str, int]
    names: Names


class Cta:
    """State of one CTA.

    live: threads of each warp that have not exited. cluster_arrived: the cluster barrier's phase that each thread has arrived in, -1 for
    none. wgmma: queues by first thread of the warpgroup. busy, sources: registers that unfinished wgmmas write / read (bit masks).
    bulk: copy groups by thread; copies: cp.async groups by warp. reading: bulk stores that may still read shared memory.
    outgoing: sources [start, stop) of copies to other CTAs -> agent, its number there, origin.
    moves: the latest load and store of tensor memory, by warp and cells. loading: some load of tensor memory may not be done.
    conflicts: by cells and whether they are written, the number of moves compared so far, and those in conflict.
    awaited: in machine code, loads of tensor memory whose scoreboard nobody has waited for.
    poison: poison of the values that the last load returned, None for none. local: local memory of the threads, made on first use.
    """

    def __init__(self, storage: Storage, constants: Constants, cluster: Cluster, rank: int, index: tuple[int, int, int]) -> None:
        self.registers = storage.registers
        self.smem = storage.smem
        self.trace = storage.trace
        self.params = constants.params
        self.specials = constants.specials
        self.names = constants.names
        self.cluster = cluster
        self.rank = rank
        self.index = index
        threads = storage.registers.threads
        self.live = [min(WARP, threads - start) for start in range(0, threads, WARP)]
        self.live_threads = threads
        self.cluster_arrived = np.full(threads, -1, np.int64)
        self.mbarriers: dict[int, Mbarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.wgmma: dict[int, WgmmaQueue] = {}
        self.busy = 0
        self.sources = 0
        self.bulk: dict[int, CopyGroups] = {}
        self.copies: dict[int, CopyGroups] = {}
        self.reading: list[GroupedCopy] = []
        self.outgoing: dict[tuple[int, int], tuple[int, int, Origin]] = {}
        self.saw_failed_cancel = False
        self.tensor: TensorMemory | None = None
        self.tensor_queue: TensorQueue | None = None
        self.moves: dict[tuple[int, bool, Cells], TensorMove] = {}
        self.conflicts: dict[tuple[Cells, bool], tuple[int, list[tuple[int, bool, Cells]]]] = {}
        self.loading = False
        self.awaited: list[TensorMove] = []
        self.poison: np.ndarray | None = None
        self.local: LocalMemory | None = None
        self._storage = storage

    @property
    def exited(self) -> bool:
        """Return True when all threads have exited."""
        return self.live_threads == 0

    def shared_address(self, offset: int, dtype: np.dtype[Any]) -> np.ndarray:
        """Return the address of a shared variable, a 0-d array."""
        return np.array(self.rank << RANK_SHIFT | offset, dtype)

    def param(self, offset: int, dtype: np.dtype[Any]) -> np.ndarray:
        """Return a kernel parameter, a 0-d array."""
        return np.frombuffer(self.params[offset : offset + dtype.itemsize], dtype).reshape(())

    def peer(self, rank: int) -> Cta:
        """Return a CTA of the cluster. Raises Fault when there is none of that rank, or it has exited."""
        if rank == self.rank:
            return self
        if rank >= self.cluster.size:
            raise Fault("out_of_bounds", f"shared address of CTA rank {rank} in a cluster of {self.cluster.size}")
        other = self.cluster.ctas[rank]
        if other.exited:
            raise Fault("exited_cta", f"access to the shared memory of CTA rank {rank}, which has exited")
        return other

    def live_lanes(self, warps: Iterable[int]) -> int:
        """Return the number of live lanes of some warps together."""
        live = self.live
        return sum(live[warp] for warp in warps)

    # ------------------------------------------------------------ barriers

    def barrier_name(self, offset: int) -> str:
        """Return the name of the mbarrier at an offset."""
        return self.names.mbarrier(offset, self.rank, self.cluster.size)

    def mbarrier(self, offset: int) -> Mbarrier:
        """Return the mbarrier at an offset. Raises Fault when none was initialised there."""
        barrier = self.mbarriers.get(offset)
        if barrier is None:
            raise Fault("barrier_uninitialised", "use of an mbarrier that is not initialised", self.barrier_name(offset))
        return barrier

    def named_barrier(self, number: int) -> NamedBarrier:
        """Return the named barrier of an id."""
        if number not in self.named:
            self.named[number] = NamedBarrier(self.names.named_barrier(number))
        return self.named[number]

    # ------------------------------------------------------------ tensor cores

    def wgmma_queue(self, thread: int) -> WgmmaQueue:
        """Return the wgmma queue of a thread's warpgroup."""
        first = thread // WARPGROUP * WARPGROUP
        if first not in self.wgmma:
            self.wgmma[first] = WgmmaQueue(first)
        return self.wgmma[first]

    def refresh_busy(self) -> None:
        """Recompute busy and sources from the queues of all warpgroups."""
        self.busy = self.sources = 0
        for queue in self.wgmma.values():
            self.busy |= queue.busy
            self.sources |= queue.sources

    def tensor_memory(self) -> TensorMemory:
        """Return the tensor memory; reset it on first use."""
        if self.tensor is None:
            if self._storage.tensor is None:
                self._storage.tensor = TensorMemory()
            self.tensor = self._storage.tensor
            self.tensor.reset()
        return self.tensor

    def tensor_core(self) -> TensorQueue:
        """Return the queue of tcgen05 work that this CTA issues."""
        if self.tensor_queue is None:
            self.tensor_queue = TensorQueue(self.rank)
        return self.tensor_queue

    @property
    def has_readers(self) -> bool:
        """Return True when asynchronous work may ever have read this CTA's shared memory."""
        return bool(self.wgmma or self.reading or self.outgoing or self.tensor is not None)

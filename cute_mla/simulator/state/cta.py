"""One running CTA and its cluster."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checks.order import Clocks
from ..checks.races import Trace
from ..engine.groups import Group
from ..engine.lane_sets import LaneSets
from ..engine.launch import RANK_SHIFT
from ..findings import Fault
from ..frontend.ptx import Instruction
from ..isa.conversions import PARAM_WINDOW, WINDOW_MASK
from ..numerics import tma
from ..units.async_units import WARPGROUP, CopyGroups, GroupedCopy, Pipe
from ..units.tensor_pipe import Cells, TensorPipe
from .barriers import ClusterBarrier, Made, Mbarrier, NamedBarrier
from .memory import SharedMemory
from .registers import WARP, CtaSlot, Window
from .tensor_memory import TensorMemory

if TYPE_CHECKING:
    from ..checks.tensor_hazards import Move
    from ..engine.machine import Machine


@dataclass(frozen=True)
class Origin:
    """Where something was issued."""

    cta: tuple[int, int, int]
    warp: int
    instruction: Instruction | None

    @property
    def line(self) -> int:
        """The PTX line, 0 for none."""
        return 0 if self.instruction is None else self.instruction.line


@dataclass
class Cluster:
    """CTAs that run together. number: of clusters started before. unfenced: mbarrier.inits without a fence so far. copies: where each
    agent's last copy was issued. visits: (agent, CTA rank) -> when and where the agent last signalled an mbarrier of that other CTA.
    """

    index: tuple[int, int, int]
    size: int
    barrier: ClusterBarrier
    clocks: Clocks
    ctas: list[Cta] = field(default_factory=list)
    number: int = 0
    unfenced: list[Made] = field(default_factory=list)
    copies: dict[int, Origin] = field(default_factory=dict)
    visits: dict[tuple[int, int], tuple[int, Origin]] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """True when all threads have exited."""
        return all(not cta.groups for cta in self.ctas)


class Home:
    """What successive CTAs of a launch use in turn: registers, shared memory, lane sets."""

    def __init__(self, block: tuple[int, int, int], sizes: dict[str, int], shared_bytes: int) -> None:
        self.slot = CtaSlot(block, sizes)
        self.smem = SharedMemory(shared_bytes)
        self.lane_sets = LaneSets(self.slot)
        self.tensor: TensorMemory | None = None  # made by the first tcgen05.alloc
        self.trace = Trace(shared_bytes, len(range(0, self.slot.threads, WARP)))

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self.slot.nbytes + 2 * self.smem.nbytes + self.trace.nbytes


class Cta:
    """State of one CTA: memory, barriers, groups of lanes, asynchronous work."""

    def __init__(self, machine: Machine, home: Home, cluster: Cluster, rank: int, index: tuple[int, int, int]) -> None:
        self.machine = machine
        self.home = home
        self.slot = slot = home.slot
        self.smem = home.smem
        lane_sets = home.lane_sets
        self.cluster = cluster
        self.rank = rank
        self.index = index
        self.observer = machine.observer
        self.poison: np.ndarray | None = None
        self.mbarriers: dict[int, Mbarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.groups: list[Group] = []
        self.live = [min(WARP, slot.threads - start) for start in range(0, slot.threads, WARP)]
        self.lane_sets = lane_sets
        self.live_threads = slot.threads
        self.cluster_arrived = np.full(slot.threads, -1, np.int64)
        self.pipes: dict[int, Pipe] = {}
        self.busy = 0
        self.sources = 0
        self.bulk: dict[int, CopyGroups] = {}
        self.copies: dict[int, CopyGroups] = {}
        self.reading: list[GroupedCopy] = []
        self.outgoing: dict[tuple[int, int], tuple[int, int, Origin]] = {}  # sources of copies to other CTAs: agent, its number, where
        self.saw_failed_cancel = False
        self.tensor: TensorMemory | None = None
        self.tensor_pipe: TensorPipe | None = None
        self.moves: dict[tuple[int, bool, Cells], Move] = {}  # the latest load and store of tensor memory, by warp and cells
        self.trace = home.trace
        self.loading = False
        self._specials = self._make_specials()
        slot.occupy(self)

    # ------------------------------------------------------------ values

    def _make_specials(self) -> dict[str, int]:
        launch = self.machine.launch
        values: dict[str, int] = {}
        inner = tuple(place % extent for place, extent in zip(self.index, launch.cluster, strict=True))
        triples = {
            "ctaid": self.index,
            "nctaid": launch.grid,
            "ntid": launch.block,
            "clusterid": self.cluster.index,
            "nclusterid": tuple(extent // part for extent, part in zip(launch.grid, launch.cluster, strict=True)),
            "cluster_ctaid": inner,
            "cluster_nctaid": launch.cluster,
        }
        for name, triple in triples.items():
            for axis, value in zip("xyz", triple, strict=True):
                values[f"{name}.{axis}"] = value
        linear = self.index[0] + launch.grid[0] * (self.index[1] + launch.grid[1] * self.index[2])
        values.update(
            cluster_ctarank=self.rank, cluster_nctarank=self.cluster.size, nwarpid=len(self.live), smid=linear, nsmid=1 << 10,
            is_explicit_cluster=int(self.cluster.size > 1), dynamic_smem_size=launch.smem_bytes, total_smem_size=self.smem.nbytes,
            gridid=0,
        )  # fmt: skip
        return values

    def special(self, name: str) -> np.ndarray:
        """A special register that is the same for all threads of the CTA."""
        wide = name in ("clock64", "globaltimer", "gridid")
        value = self._specials.get(name)
        if value is None:  # clocks and timers: instructions executed so far
            value = self.machine.executed.instructions & ((1 << 64) - 1 if wide else 0xFFFFFFFF)
        return np.array(value, np.uint64 if wide else np.uint32)

    def shared_address(self, offset: int, dtype: np.dtype[Any]) -> np.ndarray:
        """The address of a shared variable."""
        return np.array(self.rank << RANK_SHIFT | offset, dtype)

    def param(self, offset: int, dtype: np.dtype[Any]) -> np.ndarray:
        """A kernel parameter."""
        data = self.machine.params
        return np.frombuffer(data[offset : offset + dtype.itemsize], dtype).reshape(())

    def tensor_map(self, address: int) -> tma.BoxPlan:
        """The tensor map at a generic (parameter) or global address."""
        return self.machine.tensor_map(address & WINDOW_MASK if address >= PARAM_WINDOW else None, address)

    def peer(self, rank: int) -> Cta:
        """A CTA of the cluster. Raises Fault when there is none of that rank, or it has exited."""
        if rank == self.rank:
            return self
        if rank >= self.cluster.size:
            raise Fault("out_of_bounds", f"shared address of CTA rank {rank} in a cluster of {self.cluster.size}")
        other = self.cluster.ctas[rank]
        if not other.groups:
            raise Fault("exited_cta", f"access to the shared memory of CTA rank {rank}, which has exited")
        return other

    # ------------------------------------------------------------ barriers

    def barrier_name(self, offset: int) -> str:
        """The name of the mbarrier at an offset."""
        return self.machine.launch.names.mbarrier(offset, self.rank, self.cluster.size)

    def mbarrier(self, offset: int) -> Mbarrier:
        """The mbarrier at an offset. Raises Fault when none was initialised there."""
        barrier = self.mbarriers.get(offset)
        if barrier is None:
            raise Fault("barrier_uninitialised", "use of an mbarrier that is not initialised", self.barrier_name(offset))
        return barrier

    def named_barrier(self, number: int) -> NamedBarrier:
        """The named barrier of an id."""
        if number not in self.named:
            self.named[number] = NamedBarrier(self.machine.launch.names.named_barrier(number))
        return self.named[number]

    def live_lanes(self, warps: Iterable[int]) -> int:
        """Live lanes of some warps together."""
        live = self.live
        return sum(live[warp] for warp in warps)

    # ------------------------------------------------------------ tensor core

    def pipe(self, thread: int) -> Pipe:
        """The pipe of a thread's warpgroup."""
        first = thread // WARPGROUP * WARPGROUP
        if first not in self.pipes:
            self.pipes[first] = Pipe(first)
        return self.pipes[first]

    def tensor_memory(self) -> TensorMemory:
        """The tensor memory, made on first use."""
        if self.tensor is None:
            if self.home.tensor is None:
                self.home.tensor = TensorMemory()
            self.tensor = self.home.tensor
            self.tensor.reset()
        return self.tensor

    def tensor_core(self) -> TensorPipe:
        """The queue of tcgen05 work that this CTA issues."""
        if self.tensor_pipe is None:
            self.tensor_pipe = TensorPipe(self)
        return self.tensor_pipe

    @property
    def has_readers(self) -> bool:
        """Whether asynchronous work may ever have read this CTA's shared memory."""
        return bool(self.pipes or self.reading or self.outgoing or self.tensor is not None)

    def note_outgoing(self, source: tuple[int, int], agent: tuple[int, int], origin: Origin) -> None:
        """A copy reads bytes [start, stop) of this CTA's shared memory; agent: who does it (column of the clocks), and its number there."""
        self.outgoing[source] = (*agent, origin)

    def refresh_busy(self) -> None:
        """Recompute the union of all pipes' masks."""
        self.busy = self.sources = 0
        for pipe in self.pipes.values():
            self.busy |= pipe.busy
            self.sources |= pipe.sources

    # ------------------------------------------------------------ poison

    def become_tainted(self, w: Window) -> None:
        """The running group meets poison: from now on its poison rows are meaningful."""
        group = self.machine.running
        if not group.tainted:
            self.clear_taint(group.lanes)
            window: Window | None = w
            while window is not None:
                for shadow in window.taints.values():
                    shadow[...] = False
                window = window.parent
            group.tainted = True

    def clear_taint(self, lanes: np.ndarray) -> None:
        """Reset the poison rows of lanes."""
        window = self.slot.window(lanes)
        if window is not None:  # strided views: much faster than an index array
            for shadow in window.taints.values():
                shadow.fill(False)
            return
        for shadow in self.slot.taints.values():
            shadow[:, lanes] = False

    def is_tainted(self, thread: int) -> bool:
        """Whether the group of a thread is tainted."""
        return any(group.tainted for group in self.groups if thread // WARP in group.warps)

    def taint_warps(self, warps: Iterable[int]) -> None:
        """Make all groups with lanes of these warps tainted."""
        wanted = set(warps)
        for group in self.groups:
            if not group.tainted and wanted & set(group.warps):
                self.clear_taint(group.lanes)
                group.tainted = True

    def report(self, w: Window | None, kind: str, message: str, barrier: str | None = None) -> None:
        """A finding at the instruction that is running."""
        self.machine.report_here(self, w, kind, message, barrier)

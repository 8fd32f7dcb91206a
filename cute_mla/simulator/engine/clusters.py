"""Clusters of a launch: started one after the other, each CTA in a home that earlier CTAs have left."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..state.barriers import ClusterBarrier
from ..state.clocks import Clocks
from ..state.cta import Cluster, Constants, Cta, Storage
from ..state.engine_protocol import Engine
from ..state.memory import SharedMemory
from ..state.registers import WARP, RegisterFile
from ..state.shared_trace import SharedTrace
from ..state.window import CtaSlot, Observer
from .arguments import pack_params
from .groups import Group
from .lane_sets import LaneSets
from .launch import Launch
from .pool import Pool


class Home:
    """Place where successive CTAs run: storage, the slot with its windows, lane sets, and the groups of the CTA that is in."""

    def __init__(self, launch: Launch) -> None:
        layout = launch.target.layout
        shared_bytes = layout.dynamic_base + launch.smem_bytes
        registers = RegisterFile(launch.block, layout.sizes)
        warps = len(range(0, registers.threads, WARP))
        self.storage = Storage(registers, SharedMemory(shared_bytes), SharedTrace(shared_bytes, warps))
        self.slot = CtaSlot(registers)
        self.lane_sets = LaneSets(self.slot)
        self.groups: list[Group] = []

    def reset(self, launch: Launch) -> None:
        """Forget the contents of the storage."""
        flow = launch.target.flow
        self.storage.registers.undefine(flow.accumulators)
        self.storage.registers.undefine(flow.undefined)
        self.storage.smem.reset()
        self.storage.trace.reset()
        self.groups = []

    def dissolve(self) -> None:
        """Part what refers to each other, so that the memory is free at once and not when a garbage collection runs."""
        self.slot.windows.clear()
        self.slot.compacts.clear()
        self.lane_sets.clear()


MAX_HOME_BYTES = 64 << 20  # of unused homes: 3 of the largest kernel, 8 of a middling one
HOMES: Pool[Home] = Pool(MAX_HOME_BYTES)


class Clusters:
    """The clusters of one launch. running: those that have started and not finished."""

    def __init__(self, engine: Engine, launch: Launch, observer: Observer | None, splits_convoys: bool) -> None:
        self.engine = engine
        self.launch = launch
        self.observer = observer
        self.splits_convoys = splits_convoys
        self.running: list[Cluster] = []
        self.started = 0
        self.params = pack_params(launch)
        self._waiting = self._indices()
        layout = launch.target.layout
        self._shape = (launch.block, *layout.sizes.values(), layout.dynamic_base + launch.smem_bytes)
        self._homes: dict[Cta, Home] = {}

    def close(self) -> None:
        """Let go of the engine, and of the copies of registers that unused homes hold: the launch has ended."""
        self.engine = None  # type: ignore[assignment]
        for home in HOMES.items(self._shape):
            home.slot.compacts.clear()

    def _indices(self) -> Iterator[tuple[int, int, int]]:
        extents = [extent // part for extent, part in zip(self.launch.grid, self.launch.cluster, strict=True)]
        return ((x, y, z) for z in range(extents[2]) for y in range(extents[1]) for x in range(extents[0]))

    def start(self) -> list[Group]:
        """Start the next cluster. Return its groups, none when all clusters have started."""
        index = next(self._waiting, None)
        if index is None:
            return []
        launch = self.launch
        cx, cy, cz = launch.cluster
        size = cx * cy * cz
        clocks = Clocks(size, -(-launch.threads // WARP), launch.target.flow.tensor_fences)
        cluster = Cluster(index, size, ClusterBarrier(size * launch.threads), clocks, number=self.started)
        self.started += 1
        groups: list[Group] = []
        for rank in range(size):
            place = (index[0] * cx + rank % cx, index[1] * cy + rank // cx % cy, index[2] * cz + rank // (cx * cy))
            groups += self._start_cta(cluster, rank, place)
        self.running.append(cluster)
        return groups

    def _start_cta(self, cluster: Cluster, rank: int, index: tuple[int, int, int]) -> list[Group]:
        launch, undefined = self.launch, self.launch.target.flow.undefined
        home = HOMES.take(self._shape) or Home(launch)
        home.reset(launch)
        constants = Constants(self.params, special_values(launch, cluster, rank, index, home.storage.smem.nbytes), launch.names)
        cta = Cta(home.storage, constants, cluster, rank, index)
        cluster.ctas.append(cta)
        if launch.target.prepare is not None:
            launch.target.prepare(cta)
        home.slot.occupy(cta, self.engine, self.observer)
        self._homes[cta] = home
        lanes = np.arange(launch.threads)
        poisoned = any(undefined.values())
        if poisoned:
            cta.registers.clear_taint(lanes)
            for bank, rows in undefined.items():
                cta.registers.taints[bank][rows] = True
        parts = [lanes[start : start + WARP] for start in range(0, len(lanes), WARP)] if self.splits_convoys else [lanes]
        for part in parts:
            home.groups.append(Group(cta, home.groups, home.lane_sets.get(part), 0, poisoned))
        return list(home.groups)

    def take(self) -> tuple[int, int, int] | None:
        """Take the next cluster that has not started, which never will. Return the index of its first CTA, None when all have started."""
        index = next(self._waiting, None)
        if index is None:
            return None
        x, y, z = (place * extent for place, extent in zip(index, self.launch.cluster, strict=True))
        return x, y, z

    def groups(self, cta: Cta) -> list[Group]:
        """Return the groups of a running CTA."""
        return self._homes[cta].groups

    def finish(self, cluster: Cluster) -> None:
        """Take back the homes of a cluster whose CTAs have exited."""
        for cta in cluster.ctas:
            home = self._homes.pop(cta)
            home.slot.vacate()
            home.groups = []
            for dropped in HOMES.give(self._shape, home, home.storage.nbytes):
                dropped.dissolve()
        self.running.remove(cluster)
        cluster.ctas.clear()  # no circle of references: memory is free at once, not when a collection runs


def special_values(launch: Launch, cluster: Cluster, rank: int, index: tuple[int, int, int], shared_bytes: int) -> dict[str, int]:
    """Return the special registers that are the same for all threads of a CTA."""
    values: dict[str, int] = {}
    triples = {
        "ctaid": index,
        "nctaid": launch.grid,
        "ntid": launch.block,
        "clusterid": cluster.index,
        "nclusterid": tuple(extent // part for extent, part in zip(launch.grid, launch.cluster, strict=True)),
        "cluster_ctaid": tuple(place % extent for place, extent in zip(index, launch.cluster, strict=True)),
        "cluster_nctaid": launch.cluster,
    }
    for name, triple in triples.items():
        for axis, value in zip("xyz", triple, strict=True):
            values[f"{name}.{axis}"] = value
    values.update(
        cluster_ctarank=rank,
        cluster_nctarank=cluster.size,
        nwarpid=-(-launch.threads // WARP),
        smid=index[0] + launch.grid[0] * (index[1] + launch.grid[1] * index[2]),
        nsmid=1 << 10,
        is_explicit_cluster=int(cluster.size > 1),
        dynamic_smem_size=launch.smem_bytes,
        total_smem_size=shared_bytes,
        gridid=0,
    )
    return values

"""The simulated device: runs a launch, one convoy at a time, on one OS thread."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

import numpy as np

from ...spec.tensor_map import TensorMap
from ..checks import exit_checks, order, phases, races, tensor_hazards
from ..checks.global_order import EventLog
from ..checks.order import Clocks
from ..codegen.control_flow import Block
from ..codegen.translator import BLOCKED, EXIT, LINES, PREFIX, Split
from ..findings import Fault, Finding, Report
from ..frontend.ptx import Instruction
from ..numerics import tma
from ..numerics.blas import single_threaded
from ..state.barriers import ClusterBarrier, Mbarrier
from ..state.cta import Cluster, Cta, Home, Origin
from ..state.memory import GlobalMemory
from ..state.observers import Observer
from ..state.registers import WARP, Window
from ..units.async_units import PendingCopy, Writes
from . import deadlock
from .counts import Executed
from .groups import BLOCKED as GROUP_BLOCKED
from .groups import DEAD, GATHERING, READY, Group
from .homes import POOL
from .launch import Launch
from .policy import Policy
from .schedulers import make_scheduler

MAX_FINDINGS = 50
MAX_CLUSTERS = 64  # resident at once, when clusters wait for each other
TAINT_CHECK = 8  # blocks between looks whether a group is still poisoned


class _Stop(Exception):
    """Ends a run after a fatal finding."""


class Machine:
    """State of one launch. progress counts everything that may let somebody go on."""

    def __init__(self, launch: Launch, memory: GlobalMemory, policy: Policy, observer: Observer | None = None) -> None:
        self.launch = launch
        self.memory = memory
        self.policy = policy
        self.observer = observer
        self.entry = launch.target
        self.blocks = self.entry.flow.blocks
        self.splits_convoys = policy.splits_convoys
        self.rng = np.random.default_rng(policy.seed)
        self.scheduler = make_scheduler(policy, self.rng)
        self.report = Report()
        self.executed = Executed(self.blocks, launch.names)
        self.progress = 0
        self.timeout_progress = -1
        self.pending: list[PendingCopy] = []
        self.clusters: list[Cluster] = []
        self.started = 0
        self.events = EventLog()
        self.waiting_clusters = self._cluster_indices()
        layout = self.entry.layout
        self.shared_bytes = layout.dynamic_base + launch.smem_bytes
        self.home_shape = (launch.block, *layout.sizes.values(), self.shared_bytes)
        self.params = self._pack_params()
        self.maps: dict[int, tma.BoxPlan] = {}
        self.running: Group = None  # type: ignore[assignment]
        self._seen: set[tuple[object, ...]] = set()

    # ------------------------------------------------------------ set-up

    def _pack_params(self) -> bytes:
        layout = self.entry.layout
        data = bytearray(layout.param_bytes)
        for param, arg in zip(self.entry.params, self.launch.args, strict=True):
            if not isinstance(arg, TensorMap):
                offset = layout.params[param.name]
                data[offset : offset + param.size] = arg
        return bytes(data)

    def tensor_map(self, offset: int | None, address: int) -> tma.BoxPlan:
        """The tensor map at a parameter offset, or at a global address when offset is None."""
        if offset is not None and offset in self.maps:
            return self.maps[offset]
        try:
            if offset is None:
                buffer = self.memory.require(address, address + 128, False)
                start = address - buffer.address
                return tma.plan(tma.decode_native_tensor_map(buffer.data[start : start + 128].tobytes()))
            for param, arg in zip(self.entry.params, self.launch.args, strict=True):
                if self.entry.layout.params[param.name] == offset and param.size == 128:
                    described = arg if isinstance(arg, TensorMap) else tma.decode_native_tensor_map(arg)
                    self.maps[offset] = tma.plan(described)
                    return self.maps[offset]
        except ValueError as error:
            raise Fault("tensor_map", str(error)) from error
        raise Fault("tensor_map", f"no tensor map at parameter offset {offset}")

    def _cluster_indices(self) -> Iterator[tuple[int, int, int]]:
        extents = [extent // part for extent, part in zip(self.launch.grid, self.launch.cluster, strict=True)]
        return ((x, y, z) for z in range(extents[2]) for y in range(extents[1]) for x in range(extents[0]))

    def start_cluster(self) -> bool:
        """Start the next cluster; False when there is none."""
        index = next(self.waiting_clusters, None)
        if index is None:
            return False
        cx, cy, cz = self.launch.cluster
        size = cx * cy * cz
        clocks = Clocks(size, -(-self.launch.threads // WARP), self.entry.flow.tensor_fences)
        cluster = Cluster(index, size, ClusterBarrier(size * self.launch.threads), clocks, number=self.started)
        self.started += 1
        undefined = self.entry.flow.undefined
        poisoned = any(undefined.values())
        for rank in range(size):
            place = (index[0] * cx + rank % cx, index[1] * cy + rank // cx % cy, index[2] * cz + rank // (cx * cy))
            home = POOL.take(self.home_shape) or Home(self.launch.block, self.entry.layout.sizes, self.shared_bytes)
            slot = home.slot
            slot.reset(self.entry.flow.accumulators)
            slot.reset(undefined)
            home.smem.reset()
            home.trace.reset()
            cta = Cta(self, home, cluster, rank, place)
            cluster.ctas.append(cta)
            lanes = np.arange(self.launch.threads)
            if poisoned:
                cta.clear_taint(lanes)
                for bank, rows in undefined.items():
                    slot.taints[bank][rows] = True
            parts = [lanes[start : start + WARP] for start in range(0, len(lanes), WARP)] if self.splits_convoys else [lanes]
            cta.groups = [Group(cta, home.lane_sets.get(part), 0, poisoned) for part in parts]
            for group in cta.groups:
                self.scheduler.add(group)
        self.clusters.append(cluster)
        return True

    def cancel_cluster(self) -> tuple[int, int, int, int] | None:
        """Take the next cluster that has not started, which never will: its first CTA, and 1. None when all have started.

        Random schedules let a cluster start in between, as the hardware may.
        """
        if self.policy.async_mode == "random" and len(self.clusters) < MAX_CLUSTERS and self.rng.random() < 0.3:
            self.start_cluster()
        index = next(self.waiting_clusters, None)
        if index is None:
            return None
        x, y, z = (place * extent for place, extent in zip(index, self.launch.cluster, strict=True))
        return x, y, z, 1

    # ------------------------------------------------------------ the run

    def run(self) -> Report:
        """Run to the end, or to the first finding that makes going on pointless."""
        began = time.perf_counter()
        with np.errstate(all="ignore"), single_threaded():
            try:
                self._report_fences()
                self.start_cluster()
                while True:
                    group = self.scheduler.take()
                    if group is None:
                        if not self.unstick():
                            break
                        continue
                    self.turn(group)
                    if self.pending and self.policy.async_mode == "random" and self.rng.random() < 0.3:
                        self.complete(self.pending[int(self.rng.integers(len(self.pending)))])
            except _Stop:
                pass
        self.running = None  # type: ignore[assignment]  # as in _finish
        self.report.executed = self.executed
        self.report.seconds = time.perf_counter() - began
        return self.report

    def _report_fences(self) -> None:
        """What is known of wgmmas without a fence before anything runs."""
        for instruction in self.entry.unfenced:
            message = "no wgmma.fence on some path between writing a register and this wgmma, or before the first wgmma"
            self.add(Finding("missing_fence", message, instruction.line, instruction.source))

    def turn(self, group: Group) -> None:
        """Let a group run until it blocks, exits or has used up its turn."""
        self.running = group
        group.yielded = False
        try:
            self._turn(group)
        except Fault as fault:
            self._fault(fault, fault.__traceback__)

    def _turn(self, group: Group) -> None:
        cta = group.cta
        blocks = self.blocks
        budget = self.scheduler.budget()
        steps = 0
        while True:
            if len(cta.groups) > 1:
                group = self.converge(group)
                self.running = group
            block = blocks[group.pc]
            if block.needs and not self.gathered(group, block):
                return
            if cta.busy | cta.sources and (block.touches & cta.busy or block.writes & cta.sources):
                self._check_busy(group, block)
            if group.tainted:
                steps += 1
                if steps % TAINT_CHECK == 0:
                    self._refresh_taint(group, block)
            function = block.tainted if group.tainted else block.plain
            if function is None:
                function = self._translate(block, group.tainted)
            window, warps = group.window, group.warps
            if window is not None:
                result = function(window)
            else:
                window = cta.slot.compact(group.lanes, block.used, group.tainted)
                result = function(window)
                cta.slot.store(window, block.used, group.tainted)
            if cta.loading:
                tensor_hazards.note_uses(cta, group, block)
            if result.__class__ is int:
                if result >= 0:
                    group.pc = result
                elif result == EXIT:
                    self.executed.add(block, warps)
                    self.exit(group)
                    return
                else:
                    assert result == BLOCKED
                    return
            else:
                assert isinstance(result, Split)
                self.split(group, result)
            budget -= self.executed.add(block, warps)
            if self.splits_convoys and len(group.warps) > 1:
                self.scatter(group, block)
            if budget <= 0 or group.rejoins:
                group.yielded, group.rejoins = True, False
                self.scheduler.add(group)
                return

    def _translate(self, block: Block, tainted: bool) -> Callable[[Window], object]:
        function = self.entry.translator.compile(block, tainted)
        if tainted:
            block.tainted = function
        else:
            block.plain = function
        return function

    # ------------------------------------------------------------ groups

    def converge(self, group: Group) -> Group:
        """Merge with groups at the same place; let a diverged part of the same warps that lies behind go first."""
        cta = group.cta
        merging = not self.splits_convoys
        for other in list(cta.groups):
            if other is group or other.state in (GROUP_BLOCKED, DEAD):
                continue
            shares = group.partial and not group.lane_set.warp_set.isdisjoint(other.warps)
            if other.pc == group.pc and (shares or merging or (other.state == GATHERING and same_warpgroup(group, other))):
                if shares or (other.apart_at != group.pc and group.apart_at != group.pc):
                    self.merge(group, other)
            elif shares and other.pc < group.pc and other.state == READY and not other.yielded:
                self.scheduler.remove(other)
                self.scheduler.add(group)
                return self.converge(other)
        return group

    def merge(self, group: Group, other: Group) -> None:
        """Join other into group."""
        cta = group.cta
        self.scheduler.remove(other)
        other.state = DEAD
        cta.groups.remove(other)
        if group.tainted != other.tainted:
            cta.clear_taint(other.lanes if group.tainted else group.lanes)
            group.tainted = True
        group.set_lanes(cta.lane_sets.union(group.lane_set, other.lane_set))

    def split(self, group: Group, result: Split) -> None:
        """Part the lanes of a group; it goes on with the part that is behind."""
        cta = group.cta
        taken, fallen = cta.lane_sets.part(group.lane_set, result.mask)
        first, second = ((taken, result.taken), (fallen, result.fallen))
        if result.fallen < result.taken:
            first, second = second, first
        other = Group(cta, second[0], second[1], group.tainted)
        cta.groups.append(other)
        group.set_lanes(first[0])
        group.pc = first[1]
        self.scheduler.add(other)

    def scatter(self, group: Group, block: Block) -> None:
        """Under policies that split convoys: go on warp by warp after an operation of a warpgroup."""
        if group.partial or self.blocks[group.pc].needs == "warpgroup":
            return
        cta = group.cta
        warp = group.lanes // WARP
        for number in group.warps[1:]:
            other = Group(cta, cta.lane_sets.get(group.lanes[warp == number]), group.pc, group.tainted)
            cta.groups.append(other)
            self.scheduler.add(other)
        group.set_lanes(cta.lane_sets.get(group.lanes[warp == group.warps[0]]))

    def must_separate(self, w: Window, number: np.ndarray) -> bool:
        """Part a convoy whose warps name different barriers; True when that happened (the instruction runs again)."""
        if number.ndim == 0 or bool((number == number[0]).all()):
            return False
        group = self.running
        mine, rest = group.cta.lane_sets.part(group.lane_set, number == number[0])
        other = Group(group.cta, rest, group.pc, group.tainted)
        group.set_lanes(mine)
        group.apart_at = other.apart_at = group.pc
        group.rejoins = other.rejoins = not self.splits_convoys
        group.cta.groups.append(other)
        self.scheduler.add(other)
        self.scheduler.add(group)
        return True

    def gathered(self, group: Group, block: Block) -> bool:
        """Whether all threads that a collective operation needs are here; otherwise the group waits for them."""
        if group.partial:
            return self._gather(group)
        if block.needs == "warpgroup":
            if not group.lane_set.warpgroups:
                return self._gather(group)
            if not group.lane_set.whole:
                raise Fault("divergence", "a warpgroup operation after some of its threads have exited")
        return True

    def _gather(self, group: Group) -> bool:
        group.state = GATHERING
        return False

    def wake(self, waiters: list[Group]) -> None:
        """Make everybody in a list of waiters ready, and empty it."""
        self.progress += 1
        if not waiters:
            return
        for group in list(waiters):
            if group.state == GROUP_BLOCKED:
                self._leave_barriers(group, waiters)
                group.state = READY
                self.scheduler.add(group)
        waiters.clear()

    def _leave_barriers(self, group: Group, woken: list[Group]) -> None:
        for barrier in group.blocked_on:
            if isinstance(barrier, Mbarrier) and barrier.waiters is not woken and group in barrier.waiters:
                barrier.waiters.remove(group)
        group.blocked_on = []

    def exit(self, group: Group) -> None:
        """The lanes of a group leave."""
        cta = group.cta
        counts = dict.fromkeys(group.warps, WARP) if group.lane_set.whole else Counter((group.lanes // WARP).tolist())
        for warp, count in counts.items():
            cta.live[warp] -= count
        cta.live_threads -= len(group.lanes)
        group.state = DEAD
        cta.groups.remove(group)
        for other in cta.groups:
            other.refresh_partial()
            if other.state == GATHERING:
                other.state = READY
                self.scheduler.add(other)
        exit_checks.check_exit(cta, group)
        self.progress += 1
        if cta.cluster.barrier.leave(len(group.lanes)):
            self.wake(cta.cluster.barrier.waiters)
        if not cta.groups and cta.cluster.finished:
            self._finish(cta.cluster)

    def _finish(self, cluster: Cluster) -> None:
        """All CTAs of a cluster have exited: check what is left over, and give the slots back."""
        exit_checks.check_cluster(self, cluster)
        for cta in cluster.ctas:
            cta.slot.occupy(None)  # else a kept home would hold the whole launch
            POOL.give(self.home_shape, cta.home)
        self.clusters.remove(cluster)
        cluster.ctas.clear()  # no circle of references: memory is free at once, not when a collection runs
        if not self.clusters:
            self.start_cluster()

    # ------------------------------------------------------------ when nobody can go on

    def unstick(self) -> bool:
        """Nobody is ready: complete asynchronous work, start a cluster, or let waits time out. False at the end."""
        if not self.clusters:
            return False
        try:
            if self.pending:
                self.complete(self._next_pending())
                return True
        except Fault as fault:
            self._fault(fault, fault.__traceback__)
        if len(self.clusters) < MAX_CLUSTERS and self.start_cluster():
            return True
        waiting = [group for cluster in self.clusters for cta in cluster.ctas for group in cta.groups if self._can_time_out(group)]
        if waiting and self.timeout_progress != self.progress:
            self.timeout_progress = self.progress
            for group in waiting:
                self._leave_barriers(group, [])
                group.timed_out, group.state = True, READY
                self.scheduler.add(group)
            return True
        for finding in deadlock.explain(self):
            self.add(finding)
        return False

    def _can_time_out(self, group: Group) -> bool:
        return group.state == GROUP_BLOCKED and any(isinstance(barrier, Mbarrier) for barrier in group.blocked_on)

    def _next_pending(self) -> PendingCopy:
        for copy in self.pending:
            if any(barrier.waiters for barrier in copy.barriers):
                return copy
        return self.pending[0]

    # ------------------------------------------------------------ asynchronous work

    def completes_now(self) -> bool:
        """Whether work issued now takes effect at once."""
        mode = self.policy.async_mode
        return mode == "eager" or (mode == "random" and bool(self.rng.random() < 0.5))

    def grouped_stage(self) -> int:
        """How far a grouped copy gets at issue."""
        mode = self.policy.async_mode
        return 2 if mode == "eager" else int(self.rng.integers(3)) if mode == "random" else 0

    def start(self, effect: Callable[[], None], w: Window, warp: int, barriers: list[Mbarrier], writes: Writes) -> list[tuple[int, int]]:
        """A warp issues a copy that writes shared bytes (CTA, start, stop), one piece for each barrier. Returns its agents and numbers."""
        for target, low, high in writes:
            races.check_overwrite(w, warp, target, low, high)
        origin = self.origin(w)
        numbers = order.copy(w.cta, warp, barriers, writes, origin.line)
        for barrier in barriers:
            phases.check_use(w, (warp,), barrier, True)
            w.cta.cluster.copies[barrier.column] = origin
        self.begin(effect, origin, barriers, writes)
        return numbers

    def begin(self, effect: Callable[[], None], origin: Origin, barriers: list[Mbarrier], writes: Writes) -> None:
        """Work that completes by itself begins."""
        self.progress += 1
        if self.completes_now():
            effect()
        else:
            self.pending.append(PendingCopy(effect, origin, barriers, writes))

    def complete(self, copy: PendingCopy) -> None:
        """Let pending work take effect."""
        self.pending.remove(copy)
        self.progress += 1
        try:
            copy.complete()
        except Fault as fault:
            self.add(self._located(fault.kind, fault.message, copy.origin, fault.barrier))
            raise _Stop from fault

    def complete_tx(self, barrier: Mbarrier, nbytes: int) -> None:
        """Bytes arrive at an mbarrier."""
        if barrier.complete(nbytes):
            self._phase_complete(barrier)
        self.progress += 1

    def arrive(self, barrier: Mbarrier, number: int) -> None:
        """Arrivals at an mbarrier."""
        if barrier.arrive(number):
            self._phase_complete(barrier)
        self.progress += 1

    def _phase_complete(self, barrier: Mbarrier) -> None:
        if barrier.overtaken is not None:
            self.report_here(self.running.cta, None, "barrier_lapped", phases.overtaken(self.running.cta, barrier), barrier.name)
        self.wake(barrier.waiters)

    # ------------------------------------------------------------ poison

    def _refresh_taint(self, group: Group, block: Block) -> None:
        """Back to plain code when no live register is poisoned any more."""
        assert block.live is not None
        window = group.window
        for bank, rows in block.live.rows.items():
            if len(rows):
                shadow = group.cta.slot.taints[bank][rows[:, None], group.lanes] if window is None else window.taints[bank][rows]
                if np.count_nonzero(shadow):
                    return
        group.tainted = False

    def _check_busy(self, group: Group, block: Block) -> None:
        """Ordinary instructions must not touch registers that unfinished wgmmas write (or overwrite their A)."""
        cta = group.cta
        for first, pipe in cta.pipes.items():
            if first // WARP // 4 not in {warp // 4 for warp in group.warps}:
                continue
            for item in block.instructions:
                touched = item.writes if item.spec.asynchronous else (*item.reads, *item.writes)
                rows = {self.entry.layout.slot(register) for register in touched if register.bank == "r"}
                written = {self.entry.layout.slot(register) for register in item.writes if register.bank == "r"}
                busy = any(pipe.busy >> row & 1 for row in rows) or any(pipe.sources >> row & 1 for row in written)
                if busy and not item.spec.asynchronous:
                    origin = Origin(cta.index, group.warps[0], item.instruction)
                    self.report_at(origin, "missing_wait", "a register of an unfinished wgmma is used before wgmma.wait_group")
                    if self.policy.async_mode == "eager":
                        pipe.finish_open(cta)  # as ptxas does, which then serialises such code
                    return

    # ------------------------------------------------------------ findings

    def origin(self, w: Window) -> Origin:
        """Where the running instruction is."""
        return Origin(w.cta.index, w.warps[0], instruction_of_caller())

    def line_of_caller(self) -> int:
        """The PTX line of the instruction that runs, 0 for none."""
        instruction = instruction_of_caller()
        return 0 if instruction is None else instruction.line

    def report_here(self, cta: Cta, w: Window | None, kind: str, message: str, barrier: str | None = None) -> None:
        """A finding at the running instruction."""
        warp = w.warps[0] if w is not None else self.running.warps[0]
        self.add(self._located(kind, message, Origin(cta.index, warp, instruction_of_caller()), barrier))

    def report_at(self, origin: Origin, kind: str, message: str, barrier: str | None = None) -> None:
        """A finding at a remembered place."""
        self.add(self._located(kind, message, origin, barrier))

    def _located(self, kind: str, message: str, origin: Origin, barrier: str | None) -> Finding:
        instruction = origin.instruction
        line = instruction.line if instruction is not None else None
        source = instruction.source if instruction is not None else None
        return Finding(kind, message, line, source, self.launch.names.role(origin.warp), barrier, origin.cta, origin.warp)

    def add(self, finding: Finding) -> None:
        """Keep a finding, one for each kind and place. Stops the run when there are too many."""
        key = (finding.kind, finding.ptx_line, finding.barrier, finding.role)
        if key in self._seen:
            return
        self._seen.add(key)
        self.report.findings.append(finding)
        if len(self.report.findings) >= MAX_FINDINGS:
            raise _Stop

    def _fault(self, fault: Fault, trace: TracebackType | None) -> None:
        """Turn a fault into a finding and stop."""
        instruction = None
        while trace is not None:
            code = trace.tb_frame.f_code.co_filename
            if code.startswith(PREFIX):
                instruction = trace.tb_frame.f_globals[LINES][code][trace.tb_lineno - 1]
            trace = trace.tb_next
        group = self.running
        self.add(self._located(fault.kind, fault.message, Origin(group.cta.index, group.warps[0], instruction), fault.barrier))
        raise _Stop from fault


def same_warpgroup(group: Group, other: Group) -> bool:
    """Whether two groups belong to the same warpgroup."""
    return group.warps[0] // 4 == other.warps[0] // 4 and group.warps[-1] // 4 == other.warps[-1] // 4


def instruction_of_caller() -> Instruction | None:
    """The PTX instruction whose generated code is on the Python stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code.co_filename
        if code.startswith(PREFIX):
            return frame.f_globals[LINES][code][frame.f_lineno - 1]  # type: ignore[no-any-return]
        frame = frame.f_back
    return None


def run(launch: Launch, memory: GlobalMemory, policy: Policy | None = None, observer: Observer | None = None) -> Report:
    """Run a launch on simulated memory and report what happened. Findings do not raise: see Report."""
    return Machine(launch, memory, policy or Policy(), observer).run()

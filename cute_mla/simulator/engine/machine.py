"""The machine: runs a launch, one group of lanes at a time, on one OS thread."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

import numpy as np

from ..checks import exit_checks, phases, tensor_hazards
from ..codegen.control_flow import Block, register_uses
from ..codegen.translator import BLOCKED, EXIT, Split
from ..findings import Fault, Finding
from ..isa.barrier_ops import leave
from ..numerics.blas import single_threaded
from ..numerics.tma import BoxPlan
from ..state.async_work import PendingCopy
from ..state.barriers import Mbarrier, NamedBarrier
from ..state.cta import Cta
from ..state.engine_protocol import Waitable
from ..state.global_trace import EventLog
from ..state.memory import GlobalMemory
from ..state.origin import Origin, instruction_of
from ..state.registers import WARP
from ..state.window import Observer, Window
from ..units import wgmma_products
from . import deadlock
from .arguments import TensorMaps
from .clusters import Clusters
from .convoys import Convoys
from .counts import Executed
from .groups import BLOCKED as GROUP_BLOCKED
from .groups import DEAD, GATHERING, READY, Group
from .launch import Launch
from .policy import Policy
from .recorder import Recorder, Stop
from .report import Report
from .schedulers import make_scheduler
from .wait_lists import WaitLists

MAX_CLUSTERS = 64  # resident at once, when clusters wait for each other
TAINT_CHECK = 8  # blocks between looks whether a group is still poisoned
EARLY = 0.3  # chance under random schedules that something happens before it must


class Machine:
    """State of one launch; implements the Engine protocol. progress counts everything that may let a blocked group go on."""

    def __init__(self, launch: Launch, memory: GlobalMemory, policy: Policy, observer: Observer | None = None) -> None:
        self.launch = launch
        self.entry = launch.target
        self.blocks = self.entry.flow.blocks
        self.memory = memory
        self.policy = policy
        self.observer = observer
        self.splits_convoys = policy.splits_convoys
        self.dependent = launch.dependent
        self.rng = np.random.default_rng(policy.seed)
        self.scheduler = make_scheduler(policy, self.rng)
        self.convoys = Convoys(self.blocks, policy, self.scheduler)
        self.wait_lists = WaitLists(self.scheduler)
        self.clusters = Clusters(self, launch, observer, policy.splits_convoys)
        self.recorder = Recorder(launch.names, policy.most_findings, policy.ignored)
        self.executed = Executed(self.blocks, launch.names)
        self.maps = TensorMaps(launch, memory)
        self.events = EventLog()
        self.pending: list[PendingCopy] = []
        self.progress = 0
        self.timeout_progress = -1
        self.running: Group = None  # type: ignore[assignment]

    # ------------------------------------------------------------ the run

    def run(self) -> Report:
        """Run to the end, or to the first finding that makes going on pointless."""
        began = time.perf_counter()
        with np.errstate(all="ignore"), single_threaded():
            try:
                for finding in self.entry.findings:
                    self.add(finding)
                self._start_cluster()
                while True:
                    group = self.scheduler.take()
                    if group is None:
                        if not self._unstick():
                            break
                        continue
                    self._turn(group)
                    if self.pending and self.policy.async_mode == "random" and self.rng.random() < EARLY:
                        self.complete(self.pending[int(self.rng.integers(len(self.pending)))])
            except Stop:
                pass
        self.running = None  # type: ignore[assignment]  # no circle of references: memory is free at once
        self.clusters.close()
        return Report(self.recorder.findings, self.executed, time.perf_counter() - began)

    def _turn(self, group: Group) -> None:
        """Let a group run until it blocks, exits or has used up its turn."""
        self.running = group
        group.yielded = False
        most = self.policy.most_instructions
        if most is not None and self.executed.instructions > most:
            self._stop(Fault("instruction_limit", f"the launch has not ended after {most:,} warp instructions"), None)
            return
        try:
            self._run_blocks(group)
        except Fault as fault:
            self._stop(fault, fault.__traceback__)

    def _run_blocks(self, group: Group) -> None:
        cta = group.cta
        blocks = self.blocks
        budget = self.scheduler.budget()
        steps = 0
        while True:
            if len(group.siblings) > 1:
                group = self.convoys.converge(group)
                self.running = group
            block = blocks[group.pc]
            if block.needs and not self.convoys.gathered(group, block):
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
                slot = group.lane_set.sets.slot
                window = slot.compact(group.lanes, block.used.rows, group.tainted)
                result = function(window)
                slot.store(window, block.used.rows, group.tainted)
            if cta.loading:
                self._note_uses(group, block)
            if result.__class__ is int:
                if result >= 0:
                    group.pc = result
                elif result == EXIT:
                    self._count(cta, block, warps)
                    self._exit(group)
                    return
                else:
                    assert result == BLOCKED
                    return
            else:
                assert isinstance(result, Split)
                self.convoys.split(group, result)
            budget -= self._count(cta, block, warps)
            if self.splits_convoys and len(group.warps) > 1:
                self.convoys.scatter(group)
            if budget <= 0 or group.rejoins:
                group.yielded, group.rejoins = True, False
                self.scheduler.add(group)
                return

    def _count(self, cta: Cta, block: Block, warps: tuple[int, ...]) -> int:
        """Count an executed block. Return the warp instructions that were executed."""
        if self.observer is not None:
            self.observer.executed(cta, block.index, warps)
        return self.executed.add(block, warps)

    def _translate(self, block: Block, tainted: bool) -> Callable[[Window], object]:
        function = self.entry.translator.compile(block, tainted)
        if tainted:
            block.tainted = function
        else:
            block.plain = function
        return function

    def _note_uses(self, group: Group, block: Block) -> None:
        if block.uses is None:
            block.uses = register_uses(block.instructions, self.entry.layout)
        tensor_hazards.note_uses(group.cta, group.lane_set.warp_set, block.uses)

    def _exit(self, group: Group) -> None:
        """Let the lanes of a group exit."""
        cta = group.cta
        counts = dict.fromkeys(group.warps, WARP) if group.lane_set.whole else Counter((group.lanes // WARP).tolist())
        for warp, count in counts.items():
            cta.live[warp] -= count
        cta.live_threads -= len(group.lanes)
        group.state = DEAD
        group.siblings.remove(group)
        self.convoys.regather(group.siblings)
        leave(self, cta, group.warps, group.lanes)
        exit_checks.check_exit(self, cta, group.lanes, group.warps[0])
        self.progress += 1
        cluster = cta.cluster
        if cluster.barrier.leave(len(group.lanes)):
            self.wake(cluster.barrier)
        if cluster.finished:
            exit_checks.check_cluster(self, cluster)
            self.clusters.finish(cluster)
            if not self.clusters.running:
                self._start_cluster()

    def _stop(self, fault: Fault, trace: TracebackType | None) -> None:
        """Turn a fault into a finding and end the run."""
        group = self.running
        self.report(Origin(group.cta.index, group.warps[0], instruction_of(trace)), fault.kind, fault.message, fault.barrier)
        raise Stop from fault

    # ------------------------------------------------------------ when nobody can go on

    def _unstick(self) -> bool:
        """Complete asynchronous work, start a cluster, or let waits time out, when no group is ready. False at the end."""
        if not self.clusters.running:
            return False
        try:
            if self.pending:
                self.complete(self._next_pending())
                return True
        except Fault as fault:
            self._stop(fault, fault.__traceback__)
        if len(self.clusters.running) < MAX_CLUSTERS and self._start_cluster():
            return True
        if self.observer is not None and self.observer.stuck(self):
            return True
        groups = [group for cluster in self.clusters.running for cta in cluster.ctas for group in self.clusters.groups(cta)]
        waiting = [group for group in groups if can_time_out(group)]
        if waiting and self.timeout_progress != self.progress:
            self.timeout_progress = self.progress
            for group in waiting:
                if self.observer is not None:
                    self.observer.timed_out(group.cta, deadlock.explain(group, self.blocks[group.pc], self.launch.names).message)
                self.wait_lists.leave(group)
                group.timed_out, group.state = True, READY
                self.scheduler.add(group)
            return True
        for group in groups:
            self.add(deadlock.explain(group, self.blocks[group.pc], self.launch.names))
        return False

    def _next_pending(self) -> PendingCopy:
        for copy in self.pending:
            if any(self.is_awaited(barrier) for barrier in copy.barriers):
                return copy
        return self.pending[0]

    def _start_cluster(self) -> bool:
        """Start the next cluster; False when there is none."""
        groups = self.clusters.start()
        for group in groups:
            self.scheduler.add(group)
        return bool(groups)

    # ------------------------------------------------------------ poison and unfinished products

    def _refresh_taint(self, group: Group, block: Block) -> None:
        """Go back to plain code when no live register is poisoned any more."""
        taints, window = group.cta.registers.taints, group.window
        assert block.live is not None
        for bank, rows in block.live.rows.items():
            if len(rows):
                shadow = taints[bank][rows[:, None], group.lanes] if window is None else window.taints[bank][rows]
                if np.count_nonzero(shadow):
                    return
        group.tainted = False

    def _check_busy(self, group: Group, block: Block) -> None:
        """Report ordinary instructions that touch registers that unfinished wgmmas write, or overwrite their A."""
        cta, layout = group.cta, self.entry.layout
        for first, queue in cta.wgmma.items():
            if first // WARP // 4 not in {warp // 4 for warp in group.warps}:
                continue
            for item in block.instructions:
                touched = item.writes if item.spec.asynchronous else (*item.reads, *item.writes)
                rows = {layout.row(register) for register in touched if register.bank == "r"}
                written = {layout.row(register) for register in item.writes if register.bank == "r"}
                busy = any(queue.busy >> row & 1 for row in rows) or any(queue.sources >> row & 1 for row in written)
                if busy and not item.spec.asynchronous:
                    origin = Origin(cta.index, group.warps[0], item.instruction)
                    self.report(origin, "missing_wait", "a register of an unfinished wgmma is used before wgmma.wait_group")
                    if self.policy.async_mode == "eager":  # ptxas does the same: it serialises such code
                        wgmma_products.finish_open(self, cta, queue)
                    return

    def is_tainted(self, cta: Cta, thread: int) -> bool:
        """Return True when the group of a thread is tainted."""
        return any(group.tainted for group in self.clusters.groups(cta) if thread // WARP in group.warps)

    def taint_warps(self, cta: Cta, warps: Iterable[int]) -> None:
        """Make all groups with lanes of these warps tainted."""
        targets = set(warps)
        for group in self.clusters.groups(cta):
            if not targets.isdisjoint(group.warps):
                group.become_tainted()

    def taint_running(self) -> bool:
        """Make the running group tainted; False when it was."""
        return self.running.become_tainted()

    # ------------------------------------------------------------ groups

    def must_separate(self, number: np.ndarray) -> bool:
        """Part a convoy whose warps name different barriers; True when that happened (the instruction runs again)."""
        return self.convoys.must_separate(self.running, number)

    def block(self, barriers: Sequence[Waitable]) -> None:
        """Block the running group until one of these wakes it."""
        self.wait_lists.block(self.running, barriers)

    def refuse_wait(self, barriers: Sequence[Mbarrier], hint: bool) -> bool:
        """Return True when a wait whose phases are not complete may answer false now; else block the running group."""
        if self.running.may_fail(barriers, hint or self.policy.waits_block):
            return True
        self.wait_lists.block(self.running, barriers)
        return False

    def end_wait(self) -> None:
        """Forget which phases the running group has waited for."""
        self.running.waited = {}

    def phases_missed(self, barrier: Mbarrier) -> int:
        """Return how many phases have completed since the running group began to wait for one, 0 for up to one."""
        return self.running.phases_missed(barrier)

    def gather(self) -> None:
        """Hold the running group where it is until other lanes of its warps come, exit or leave the region that it waits for."""
        self.running.state = GATHERING

    def regather(self) -> None:
        """Let the groups of the running group's CTA that are held look again."""
        self.convoys.regather(self.running.siblings)

    def wake(self, barrier: Waitable) -> None:
        """Make the groups that are blocked on a barrier ready."""
        self.progress += 1
        self.wait_lists.wake(barrier)

    def is_awaited(self, barrier: Waitable) -> bool:
        """Return True when some group is blocked on a barrier."""
        return bool(self.wait_lists.groups(barrier))

    def release(self, barrier: NamedBarrier) -> list[tuple[int, ...]]:
        """Move the groups inside a named barrier behind it, and wake them. Return their warps."""
        warps = []
        for group in self.wait_lists.groups(barrier):
            self._count(group.cta, self.blocks[group.pc], group.warps)
            group.pc += 1
            warps.append(group.warps)
        self.wake(barrier)
        return warps

    def cancel_cluster(self) -> tuple[int, int, int] | None:
        """Take the next cluster that has not started, which never will: its first CTA. None when all have started.

        Random schedules let a cluster start in between, as the hardware may.
        """
        if self.policy.async_mode == "random" and len(self.clusters.running) < MAX_CLUSTERS and self.rng.random() < EARLY:
            self._start_cluster()
        return self.clusters.take()

    # ------------------------------------------------------------ asynchronous work

    def note_progress(self) -> None:
        """Record that something happened that may let a blocked group go on."""
        self.progress += 1

    def completes_now(self) -> bool:
        """Return True when work that is issued now takes effect at once."""
        mode = self.policy.async_mode
        return mode == "eager" or (mode == "random" and bool(self.rng.random() < 0.5))

    def grouped_stage(self) -> int:
        """Return the stage that a grouped copy reaches at issue."""
        mode = self.policy.async_mode
        return 2 if mode == "eager" else int(self.rng.integers(3)) if mode == "random" else 0

    def begin(self, copy: PendingCopy) -> None:
        """Let work take effect now, or keep it pending."""
        self.progress += 1
        if self.completes_now():
            copy.complete()
        else:
            self.pending.append(copy)

    def complete(self, copy: PendingCopy) -> None:
        """Let pending work take effect."""
        self.pending.remove(copy)
        self.progress += 1
        try:
            copy.complete()
        except Fault as fault:
            self.report(copy.origin, fault.kind, fault.message, fault.barrier)
            raise Stop from fault

    def withdraw(self, copies: Sequence[PendingCopy]) -> None:
        """Forget pending work."""
        self.pending = [copy for copy in self.pending if not any(copy is other for other in copies)]

    def complete_tx(self, barrier: Mbarrier, nbytes: int) -> None:
        """Count bytes that have arrived at an mbarrier, and wake its waiters when the phase completes."""
        if barrier.complete(nbytes):
            self._phase_complete(barrier)
        self.progress += 1

    def arrive(self, barrier: Mbarrier, number: int) -> None:
        """Count arrivals at an mbarrier, and wake its waiters when the phase completes."""
        if barrier.arrive(number):
            self._phase_complete(barrier)
        self.progress += 1

    def _phase_complete(self, barrier: Mbarrier) -> None:
        if barrier.overtaken is not None:
            phases.report_overtaken(self, self.running.cta, self.running.warps[0], barrier)
        self.wake(barrier)

    # ------------------------------------------------------------ values and findings

    def clock(self) -> int:
        """Return the value of clocks and timers: warp instructions executed so far."""
        return self.executed.instructions

    def tensor_map(self, address: int) -> BoxPlan:
        """Return the tensor map at a generic (parameter) or global address. Raises Fault where there is none."""
        return self.maps.find(address)

    def report(self, origin: Origin, kind: str, message: str, barrier: str | None = None) -> None:
        """Report a finding at an origin."""
        self.recorder.report(origin, kind, message, barrier)

    def add(self, finding: Finding) -> None:
        """Keep a finding, one for each kind and place."""
        self.recorder.add(finding)


def can_time_out(group: Group) -> bool:
    """Return True when a group is blocked on mbarriers, whose waits may time out."""
    return group.state == GROUP_BLOCKED and any(isinstance(barrier, Mbarrier) for barrier in group.blocked_on)


def run(launch: Launch, memory: GlobalMemory, policy: Policy | None = None, observer: Observer | None = None) -> Report:
    """Run a launch on simulated memory and report what happened. Findings do not raise: see Report."""
    return Machine(launch, memory, policy or Policy(), observer).run()

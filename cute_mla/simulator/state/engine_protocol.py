"""The questions that running code may ask of the engine.

State holds no engine: a Window gives the engine that runs it (window.engine), and everything else is handed one. The machine implements
this protocol.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from ..findings import Finding
from ..numerics.tma import BoxPlan
from .async_work import PendingCopy
from .barriers import ClusterBarrier, Mbarrier, NamedBarrier, Question
from .cta import Cta
from .global_trace import EventLog
from .memory import GlobalMemory
from .origin import Origin
from .tensor_memory import TensorMemory

Waitable = Mbarrier | NamedBarrier | ClusterBarrier | TensorMemory | Question  # what a group of lanes can be blocked on


class Engine(Protocol):
    """One run of a launch.

    memory: global memory. events: history of global memory. dependent: the launch may begin before the grid ahead of it has ended.
    pending: asynchronous work that has not taken effect.
    """

    memory: GlobalMemory
    events: EventLog
    dependent: bool
    pending: list[PendingCopy]

    # ------------------------------------------------------------ findings

    def report(self, origin: Origin, kind: str, message: str, barrier: str | None = None) -> None:
        """Report a finding at an origin."""

    def add(self, finding: Finding) -> None:
        """Keep a finding, one for each kind and place."""

    # ------------------------------------------------------------ values

    def clock(self) -> int:
        """Return the value of clocks and timers: warp instructions executed so far."""

    def tensor_map(self, address: int) -> BoxPlan:
        """Return the tensor map at a generic (parameter) or global address. Raises Fault where there is none."""

    # ------------------------------------------------------------ the running group of lanes

    def must_separate(self, number: np.ndarray) -> bool:
        """Part a convoy whose warps name different barriers; True when that happened (the instruction runs again)."""

    def block(self, barriers: Sequence[Waitable]) -> None:
        """Block the running group until one of these wakes it."""

    def refuse_wait(self, barriers: Sequence[Mbarrier], hint: bool) -> bool:
        """Return True when a wait whose phases are not complete may answer false now; else block the running group.

        hint: the wait has a time hint, and answers false only when it times out.
        """

    def end_wait(self) -> None:
        """Forget which phases the running group has waited for."""

    def phases_missed(self, barrier: Mbarrier) -> int:
        """Return how many phases have completed since the running group began to wait for one, 0 for up to one."""

    def taint_running(self) -> bool:
        """Make the running group tainted; False when it was."""

    def gather(self) -> None:
        """Hold the running group where it is until other lanes of its warps come, exit or leave the region that it waits for."""

    def regather(self) -> None:
        """Let the groups of the running group's CTA that are held look again."""

    # ------------------------------------------------------------ other groups

    def wake(self, barrier: Waitable) -> None:
        """Make the groups that are blocked on a barrier ready."""

    def is_awaited(self, barrier: Waitable) -> bool:
        """Return True when some group is blocked on a barrier."""

    def release(self, barrier: NamedBarrier) -> list[tuple[int, ...]]:
        """Move the groups inside a named barrier behind it, and wake them. Return their warps."""

    def is_tainted(self, cta: Cta, thread: int) -> bool:
        """Return True when the group of a thread is tainted."""

    def taint_warps(self, cta: Cta, warps: Iterable[int]) -> None:
        """Make all groups with lanes of these warps tainted."""

    def cancel_cluster(self) -> tuple[int, int, int] | None:
        """Take the next cluster that has not started, which never will: its first CTA. None when all have started."""

    # ------------------------------------------------------------ asynchronous work

    def note_progress(self) -> None:
        """Record that something happened that may let a blocked group go on."""

    def completes_now(self) -> bool:
        """Return True when work that is issued now takes effect at once."""

    def grouped_stage(self) -> int:
        """Return the stage that a grouped copy reaches at issue."""

    def begin(self, copy: PendingCopy) -> None:
        """Let work take effect now, or keep it pending."""

    def complete(self, copy: PendingCopy) -> None:
        """Let pending work take effect."""

    def withdraw(self, copies: Sequence[PendingCopy]) -> None:
        """Forget pending work."""

    def arrive(self, barrier: Mbarrier, number: int) -> None:
        """Count arrivals at an mbarrier, and wake its waiters when the phase completes."""

    def complete_tx(self, barrier: Mbarrier, nbytes: int) -> None:
        """Count bytes that have arrived at an mbarrier, and wake its waiters when the phase completes."""

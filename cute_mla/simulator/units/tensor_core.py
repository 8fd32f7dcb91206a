"""The tensor core of a CTA, or of a CTA pair, whose issuing CTA keeps the queue: products, copies to tensor memory, commits.

Work executes in the order of issue, at the latest when a commit behind it must arrive. A commit hands over the knowledge that the work of
its thread is done; checks/tensor_hazards.py reports accesses to the operands without that knowledge.
"""

from __future__ import annotations

from ..checks import phases
from ..state.async_work import PendingCopy
from ..state.barriers import Mbarrier
from ..state.cta import Cta
from ..state.engine_protocol import Engine
from ..state.origin import Origin
from ..state.registers import WARP
from ..state.tensor_queue import Commit, TensorQueue, Work


def issue(engine: Engine, cta: Cta, work: Work) -> None:
    """Queue work of a CTA."""
    engine.note_progress()
    cta.tensor_core().issue(work)


def commit(engine: Engine, cta: Cta, thread: int, origin: Origin, barriers: list[Mbarrier], targets: list[Cta]) -> None:
    """Arrive on barriers, one in each target, when the thread's earlier work is done."""
    queue = cta.tensor_core()
    clocks = cta.cluster.clocks
    clock = clocks.of(cta.rank, (thread // WARP,)).copy()
    clock[clocks.core(cta.rank)] = queue.last.get(thread, 0)
    committer = clocks.committer(cta.rank)
    number = clock[committer] = clocks.issue(committer)
    away = [target for target in targets if target is not cta]
    for target in away:
        cta.cluster.visits[committer, target.rank] = (number, origin)
    pending = PendingCopy(lambda: run_through(engine, queue, item), origin, barriers, what="a tcgen05.commit", local=not away)
    item = Commit(barriers, clock, pending)
    queue.items.append(item)
    engine.begin(pending)


def run_through(engine: Engine, queue: TensorQueue, last: Commit) -> None:
    """Execute everything in the queue up to a commit, and that commit."""
    while queue.items:
        item = queue.items.pop(0)
        if not isinstance(item, Commit):
            item.execute()
            continue
        if not item.pending.done:
            item.pending.done = True
            engine.withdraw([item.pending])
        for barrier in item.barriers:
            phases.check_commit(engine, item.pending.origin, item.clock, barrier)
            barrier.knowledge.add(item.clock)
            engine.arrive(barrier, 1)
        if item is last:
            return

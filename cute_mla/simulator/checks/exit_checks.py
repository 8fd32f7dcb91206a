"""Checks at exits: work, barriers and tensor memory that threads and CTAs leave behind, and should not."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..findings import Finding
from ..state.cta import Cluster, Cta
from ..state.engine_protocol import Engine
from ..state.origin import Origin


def check_exit(engine: Engine, cta: Cta, lanes: np.ndarray, warp: int) -> None:
    """Report asynchronous work that exiting lanes (warp: the first of theirs) have not waited for."""
    for lane in lanes.tolist() if cta.bulk else ():
        groups = cta.bulk.get(lane)
        if groups is None:
            continue
        unfinished = groups.unfinished()
        if unfinished:
            engine.report(unfinished[0].origin, "unfinished", "a thread exits while its bulk store may still read shared memory")
        for copies in (*groups.committed, groups.open):
            for copy in copies:
                copy.advance(2)
    for first, queue in cta.wgmma.items():
        if (queue.open or queue.groups) and first in lanes:
            engine.report(Origin(cta.index, warp, None), "unfinished", "a warpgroup exits with wgmmas that nobody waited for")


def check_cluster(engine: Engine, cluster: Cluster) -> None:
    """Report what is left when all CTAs of a cluster have exited, and forget its pending work."""
    late = [copy for copy in engine.pending if any(copy.origin.cta == cta.index for cta in cluster.ctas)]
    for copy in late:
        if copy.local and not copy.done:
            engine.complete(copy)
    for cta in cluster.ctas:
        check_barriers(engine, cta)
        for origin, message in unfinished_tensor_work(cta):
            if origin is None:
                engine.add(Finding("unfinished", message, cta=cta.index))
            else:
                engine.report(origin, "unfinished", message)
    check_copies(engine, cluster)
    check_visits(engine, cluster)
    for copy in late:
        if not copy.done:
            engine.report(copy.origin, "unfinished", f"the CTA exits before {copy.what} has completed")
    engine.withdraw(late)


def unfinished_tensor_work(cta: Cta) -> Iterator[tuple[Origin | None, str]]:
    """Yield origin and message of tensor memory that was not freed and of tcgen05 work without a commit."""
    if cta.tensor is not None and cta.tensor.allocations:
        held = ", ".join(f"{count} columns at {first:#x}" for first, count in sorted(cta.tensor.allocations.items()))
        yield None, f"the CTA exits without tcgen05.dealloc of {held}"
    if cta.tensor_queue is not None:
        for work in cta.tensor_queue.uncommitted():
            yield work.origin, "the CTA exits with tcgen05 work that has not been committed"


def check_copies(engine: Engine, cluster: Cluster) -> None:
    """Report copies to shared memory that no warp of the cluster knows to be complete."""
    clocks = cluster.clocks
    known = clocks.now[:, : clocks.before].max(axis=0)
    for column in np.flatnonzero(clocks.issued[: clocks.before] > known):
        origin = cluster.copies.get(int(column))
        if origin is not None:
            engine.report(origin, "unfinished", f"the CTA exits and nobody has waited for {clocks.name(int(column))}")


def check_visits(engine: Engine, cluster: Cluster) -> None:
    """Report arrivals at mbarriers of another CTA that no warp there knows of: that CTA may have exited before."""
    clocks = cluster.clocks
    for (agent, rank), (time, origin) in cluster.visits.items():
        if int(clocks.now[rank * clocks.warps : (rank + 1) * clocks.warps, agent].max()) < time:
            message = f"CTA {rank} of the cluster may exit before this arrival at its mbarrier: nobody there has waited for it"
            engine.report(origin, "unfinished", message)


def check_barriers(engine: Engine, cta: Cta) -> None:
    """Report bytes and arrivals that are left over at barriers."""
    for barrier in cta.mbarriers.values():
        if barrier.tx:
            engine.add(Finding("unfinished", f"the CTA exits with {barrier.state()}", barrier=barrier.name, cta=cta.index))
    for named in cta.named.values():
        if named.arrived:
            engine.add(Finding("unfinished", f"the CTA exits where {named.state()}", barrier=named.name, cta=cta.index))

"""What threads and CTAs leave behind when they exit, and should not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..findings import Finding
from ..units.tensor_pipe import unfinished_tensor_work

if TYPE_CHECKING:
    from ..engine.groups import Group
    from ..engine.machine import Machine
    from ..state.cta import Cluster, Cta


def check_exit(cta: Cta, group: Group) -> None:
    """The lanes of a group exit: findings about their asynchronous work."""
    machine = cta.machine
    for lane in group.lanes.tolist() if cta.bulk else ():
        groups = cta.bulk.get(lane)
        if groups is None:
            continue
        unfinished = groups.unfinished()
        if unfinished:
            machine.report_at(unfinished[0].origin, "unfinished", "a thread exits while its bulk store may still read shared memory")
        for copies in (*groups.committed, groups.open):
            for copy in copies:
                copy.advance(2)
    for first, pipe in cta.pipes.items():
        if (pipe.open or pipe.groups) and first in group.lanes:
            machine.report_here(cta, None, "unfinished", "a warpgroup exits with wgmmas that nobody waited for")


def check_cluster(machine: Machine, cluster: Cluster) -> None:
    """All CTAs of a cluster have exited: findings about what is left, and its pending work is forgotten."""
    late = [copy for copy in machine.pending if any(copy.origin.cta == cta.index for cta in cluster.ctas)]
    for copy in late:
        if copy.quiet and not copy.done:
            machine.complete(copy)
    for cta in cluster.ctas:
        check_barriers(machine, cta)
        for origin, message in unfinished_tensor_work(cta):
            if origin is None:
                machine.add(Finding("unfinished", message, cta=cta.index))
            else:
                machine.report_at(origin, "unfinished", message)
    check_copies(machine, cluster)
    check_visits(machine, cluster)
    for copy in late:
        if not copy.done:
            machine.report_at(copy.origin, "unfinished", f"the CTA exits before {copy.what} has completed")
    machine.pending = [copy for copy in machine.pending if not any(copy is other for other in late)]


def check_copies(machine: Machine, cluster: Cluster) -> None:
    """Findings about copies to shared memory that no warp of the cluster knows to be complete."""
    clocks = cluster.clocks
    known = clocks.now[:, : clocks.before].max(axis=0)
    for column in np.flatnonzero(clocks.issued[: clocks.before] > known):
        origin = cluster.copies.get(int(column))
        if origin is not None:
            machine.report_at(origin, "unfinished", f"the CTA exits and nobody has waited for {clocks.name(int(column))}")


def check_visits(machine: Machine, cluster: Cluster) -> None:
    """Findings about arrivals at mbarriers of another CTA that no warp there knows of: it may have exited before."""
    clocks = cluster.clocks
    for (agent, rank), (time, origin) in cluster.visits.items():
        if int(clocks.now[rank * clocks.warps : (rank + 1) * clocks.warps, agent].max()) < time:
            message = f"CTA {rank} of the cluster may exit before this arrival at its mbarrier: nobody there has waited for it"
            machine.report_at(origin, "unfinished", message)


def check_barriers(machine: Machine, cta: Cta) -> None:
    """Findings about bytes and arrivals that are left over."""
    for barrier in cta.mbarriers.values():
        if barrier.tx:
            machine.add(Finding("unfinished", f"the CTA exits with {barrier.state()}", barrier=barrier.name, cta=cta.index))
    for named in cta.named.values():
        if named.arrived:
            machine.add(Finding("unfinished", f"the CTA exits where {named.state()}", barrier=named.name, cta=cta.index))

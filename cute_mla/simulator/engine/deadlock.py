"""Says who waits for what when nobody can go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..findings import Finding
from ..state.barriers import Mbarrier
from .groups import GATHERING, Group

if TYPE_CHECKING:
    from .machine import Machine


def explain(machine: Machine) -> list[Finding]:
    """One finding for each group that is stuck."""
    findings = []
    for cluster in machine.clusters:
        for cta in cluster.ctas:
            for group in cta.groups:
                findings.append(stuck(machine, group))
    return findings


def stuck(machine: Machine, group: Group) -> Finding:
    """What a group waits for, in words."""
    instruction = machine.blocks[group.pc].instructions[0].instruction
    names = machine.launch.names
    barrier = None
    if group.state == GATHERING:
        reason = f"waits for the other threads of its {machine.blocks[group.pc].needs} at {instruction.opcode}"
    else:
        parts = []
        for item in group.blocked_on:
            name = getattr(item, "name", "cluster barrier")
            barrier = barrier or name
            state = item.state()
            if isinstance(item, Mbarrier):
                began = group.waited.get(id(item), item.phase)
                state = f"{state}; waits for the end of phase {began}"
            parts.append(f"waits for {name} ({state})")
        reason = ", ".join(parts) or f"cannot go on at {instruction.opcode}"
    warps = f"warps {group.warps[0]}-{group.warps[-1]}" if len(group.warps) > 1 else f"warp {group.warps[0]}"
    lanes = f", {len(group.lanes)} of its threads" if group.partial else ""
    return Finding(
        "deadlock",
        f"{names.role(group.warps[0]) or warps}{f' ({warps}{lanes})' if names.role(group.warps[0]) else lanes} {reason}",
        instruction.line,
        instruction.source,
        names.role(group.warps[0]),
        barrier,
        group.cta.index,
        group.warps[0],
    )

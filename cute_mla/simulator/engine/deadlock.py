"""Explanation of deadlocks: what each group waits for when nobody can go on."""

from __future__ import annotations

from ..codegen.control_flow import Block
from ..findings import Finding
from ..state.barriers import Mbarrier
from ..state.names import Names
from .groups import GATHERING, Group


def explain(group: Group, block: Block, names: Names) -> Finding:
    """Return the finding about a group that is stuck at a block."""
    instruction = block.instructions[0].instruction
    barrier = None
    if group.state == GATHERING:
        reason = f"waits for the other threads of its {block.needs or 'warp'} at {instruction.opcode}"
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
    role = names.role(group.warps[0])
    return Finding(
        "deadlock",
        f"{role or warps}{f' ({warps}{lanes})' if role else lanes} {reason}",
        instruction.line,
        instruction.source,
        role,
        barrier,
        group.cta.index,
        group.warps[0],
    )

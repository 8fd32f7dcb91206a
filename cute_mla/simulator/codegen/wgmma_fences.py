"""Check for wgmmas that lack a wgmma.fence, in the control flow, when a kernel is loaded.

PTX wants the fence before the first wgmma, and between an ordinary access to a register and a wgmma that accumulates in it or takes A from
it. Two kinds of access are left out. Moves: compilers put copies of a wgmma's operands right before it, and ptxas removes them. Reads: the
wgmma overwrites what has been read by then, and NVIDIA's own kernels leave the fence out there.
"""

from __future__ import annotations

from ..findings import Finding
from ..frontend.ptx import Instruction, Reg, Vec
from ..isa.table import Decoded, registers_of
from .control_flow import Block

FENCE = "wgmma.fence.sync.aligned"
NEVER_FENCED = "$no fence yet"  # marker among the names of written registers


def missing_fences(blocks: list[Block]) -> tuple[Finding, ...]:
    """Return a finding for each wgmma that lacks a fence."""
    message = "no wgmma.fence on some path between writing a register and this wgmma, or before the first wgmma"
    return tuple(Finding("missing_fence", message, instruction.line, instruction.source) for instruction in unfenced(blocks))


def unfenced(blocks: list[Block]) -> tuple[Instruction, ...]:
    """Return the wgmmas that some path reaches with a written register, or without any fence before."""
    written: list[frozenset[str] | None] = [None] * (len(blocks) + 1)
    if not any(item.spec.asynchronous for block in blocks for item in block.instructions):
        return ()
    written[0] = frozenset({NEVER_FENCED})
    interesting = frozenset(
        name for block in blocks for item in block.instructions if item.spec.asynchronous for name in matrix_registers(item)
    )
    found: dict[int, Instruction] = {}
    work = [0]
    while work:
        block = blocks[work.pop()]
        before = written[block.index]
        assert before is not None
        after = follow(block, before, interesting, found)
        for successor in block.successors:
            known = written[successor]
            joined = after if known is None else known | after
            if joined != known:
                written[successor] = joined
                if successor < len(blocks):
                    work.append(successor)
    return tuple(found[line] for line in sorted(found))


def follow(block: Block, written: frozenset[str], interesting: frozenset[str], found: dict[int, Instruction]) -> frozenset[str]:
    """Return the registers written since the last fence at the end of a block. Add its wgmmas without a fence to found (by PTX line)."""
    now = set(written)
    for item in block.instructions:
        if item.instruction.opcode == FENCE:
            now.clear()
        elif item.spec.asynchronous:
            if NEVER_FENCED in now or now & matrix_registers(item):
                found[item.instruction.line] = item.instruction
        elif not item.instruction.opcode.startswith("mov."):
            now.update(register.name for register in item.writes if register.name in interesting)
    return frozenset(now)


def matrix_registers(item: Decoded) -> frozenset[str]:
    """Return the registers of the accumulator and of A."""
    a = item.instruction.operands[1]
    registers: list[Reg] = [*item.accumulators, *(registers_of(a) if isinstance(a, Vec) else ())]
    return frozenset(register.name for register in registers)

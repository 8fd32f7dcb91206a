"""Allocation of tensor memory in machine code: UTCATOMSWS on the hardware's mask of columns, and the words in reserved shared memory.

ptxas writes tcgen05.alloc and tcgen05.dealloc out as code that keeps a second record in the reserved shared memory of the CTA, below the
kernel's own, and traps when a deallocation does not fit it. The code runs here as it is, on shared memory that holds what it expects:

- an mbarrier of count 1, on which the even CTA of a pair tells the odd one, and the odd one acknowledges;
- the parity that the CTA waits for next: 1 in even CTAs, 0 in odd ones;
- the columns in use, and the first ones, in units of 32, both 0; a byte that says "relinquished", 0.

Nothing in the code initialises these. The values are inferred: with them every kernel runs, and with a parity of 0 pairs wait for ever.
Two versions of ptxas place them differently; where the first allocation notes its columns tells which.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..checks import order
from ..findings import Fault
from ..isa.emitter import Emitter, Unsupported
from ..isa.table import runtime
from ..isa.tcgen05_ops import pair_of, same, tensor_dealloc
from ..state.barriers import Mbarrier
from ..state.cta import Cta
from ..state.registers import WARP
from ..state.tensor_memory import COLUMNS, UNIT, TensorMemory
from ..state.window import Window
from .listing import Address, Listing, Register, SassInstruction
from .operands import assign, source
from .table import op


@dataclass(frozen=True)
class Record:
    """Places in shared memory: of the mbarrier, of the parity, and of all other words, from the first to behind the last."""

    barrier: int
    parity: int
    words: tuple[int, int]


_RECORDS = {
    0x54: Record(0x48, 0x50, (0x54, 0x60)),  # "relinquished" at 0x5c
    0x50: Record(0x58, 0x60, (0x40, 0x58)),  # "relinquished" at 0x40
}
_BASE, _SPAN = 0x40, 0x20
_ALL = (1 << COLUMNS // UNIT) - 1


def record_of(listing: Listing) -> Record:
    """Return the places that the code of an allocation uses: it sets bits at the columns in use, then at the first ones."""
    code = listing.instructions
    start = next((index for index, ins in enumerate(code) if ins.opcode.startswith("UTCATOMSWS") and "FIND_AND_SET" in ins.modifiers), 0)
    noted = [ins.operands[1] for ins in code[start:] if ins.opcode == "ATOMS.OR"][:2]
    places = [_BASE | operand.offset & (_SPAN - 1) for operand in noted if isinstance(operand, Address)]
    return _RECORDS.get(min(places, default=0), _RECORDS[0x54])


def prepare(record: Record, cta: Cta) -> None:
    """Set the reserved shared memory of a CTA that starts."""
    memory = cta.smem
    for first, end in (record.words, (record.parity, record.parity + 4)):
        memory.data[first:end] = 0
        memory.valid[first:end] = 1
    memory.data[record.parity] = 1 - (cta.rank & 1)
    column = cta.cluster.clocks.copier(cta.rank, record.barrier)
    cta.mbarriers[record.barrier] = Mbarrier("barrier of tcgen05.alloc", 1, column)


@op(r"UTCATOMSWS(.2CTA)?.FIND_AND_SET.ALIGN", pure=False, taint="own", starts=True, ends=True)
def allocate(e: Emitter, ins: SassInstruction) -> None:
    """Emit an allocation: a predicate that says if there was room, the first block of 32 columns, the number of blocks."""
    success, first, blocks = ins.operands
    if not isinstance(success, Register) or not isinstance(first, Register) or not isinstance(blocks, Register):
        raise Unsupported(f"operands {ins.operands} of an allocation")
    e.check_taint(list(blocks.registers()), "a tensor memory allocation")
    found, place = e.temp(), e.temp()
    e.line(f"{found} = find_columns(w, {source(e, blocks, 'u32')}, {2 if '2CTA' in ins.modifiers else 1})")
    e.line(f"if {found} is None: return BLOCKED")
    e.line(f"{found}, {place} = {found}")
    for operand, kind, value in ((success, "pred", found), (first, "u32", place)):
        for register in operand.registers() if e.tainted else ():
            e.line(f"{e.taint(register)}.fill(False)")
        assign(e, operand, kind, value)


@runtime
def find_columns(w: Window, blocks: np.ndarray, group: int) -> tuple[bool, int] | None:
    """Execute FIND_AND_SET: allocate, in both CTAs of a pair for group 2. Return success and the first block of columns.

    Without room it fails once. None when it fails again and nothing was freed: the warp is blocked until something is.
    """
    cta = w.cta
    if w.engine.must_separate(w.lanes // WARP):
        return None
    count = UNIT * same(w, blocks, "the size of an allocation")
    memories = [owner.tensor_memory() for owner in (pair_of(cta) if group == 2 else (cta,))]
    for memory in memories:
        memory.use_group(group)
        memory.check_size(count)
    start = common_room(memories, count)
    if start is None:
        refused = cta.tensor_memory().refused
        if w.warps[0] in refused:
            w.engine.block(memories)
            return None
        refused.add(w.warps[0])
        return False, 0
    for memory in memories:
        memory.allocate(start, count)
        order.wait(cta, w.warps, memory)
    return True, start // UNIT


def common_room(memories: list[TensorMemory], columns: int) -> int | None:
    """Return the first column of room in every memory, None for none."""
    first = {memory.room(columns) for memory in memories}
    return first.pop() if len(first) == 1 else None


@op(r"UTCATOMSWS.AND", pure=False, taint="own", starts=True, ends=True)
def free(e: Emitter, ins: SassInstruction) -> None:
    """Emit the end of an allocation: the blocks of columns whose bit is 0 are free."""
    result, mask = ins.operands
    if result != Register("UR", None) or not isinstance(mask, Register):
        raise Unsupported(f"operands {ins.operands} of a deallocation")
    e.check_taint(list(mask.registers()), "a tensor memory deallocation")
    e.line(f"if not free_columns(w, {source(e, mask, 'u32')}): return BLOCKED")


@runtime
def free_columns(w: Window, mask: np.ndarray) -> bool:
    """Execute UTCATOMSWS.AND. Return False when it runs again, warp by warp."""
    if w.engine.must_separate(w.lanes // WARP):
        return False
    kept = same(w, mask, "the columns of a deallocation")
    freed = ~kept & _ALL
    first = (freed & -freed).bit_length() - 1
    blocks = freed.bit_count()
    if not freed or freed >> first != (1 << blocks) - 1:
        raise Fault("tensor_memory", f"a deallocation that keeps the blocks {kept & _ALL:#x} of 32 columns: the others are not one run")
    memory = w.cta.tensor_memory()
    return bool(tensor_dealloc(w, np.array(UNIT * first), np.array(UNIT * blocks), memory.group or 1))


@op(r"UVIRTCOUNT.DEALLOC.SMPOOL", pure=False, needs="warp", writes=())
def relinquish(e: Emitter, ins: SassInstruction) -> None:
    """Emit the end of the permission to allocate."""
    e.line("w.cta.tensor_memory().relinquished = True")

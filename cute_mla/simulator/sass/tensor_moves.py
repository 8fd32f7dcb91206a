"""LDTM and STTM: registers of a warp from and to its lanes of tensor memory, and the scoreboards that a load releases.

Machine code has no tcgen05.wait::ld: a load is done when its warp has waited for its scoreboard. tcgen05.fence leaves nothing behind.
"""

from __future__ import annotations

import numpy as np

from ..isa.emitter import Emitter, Unsupported
from ..isa.table import runtime
from ..isa.tcgen05_moves import finish_moves, read_cells, warp_places
from ..numerics.tensor_fragments import Fragment
from ..state.window import Window
from .accesses import fragment
from .listing import NO_BOARD, Address, Register, SassInstruction
from .operands import WORD, source
from .table import op

QUARTERS = 3 << 21  # bits of an address that name a quarter of the lanes
SHAPE = r"(.16dp(64bit|128bit|256bit|32bit_t0_t15|32bit_t16_t31))?(.x(2|4|8|16|32|64|128))?"


def tensor_address(e: Emitter, operand: object, what: str) -> str:
    """Return the expression of a tensor memory address."""
    if not isinstance(operand, Address) or operand.space != "tmem" or operand.base is not None:
        raise Unsupported(f"{operand} instead of an address of tensor memory")
    if operand.uniform is None:
        return e.constants.array(WORD, operand.offset & 0xFFFFFFFF)
    e.check_taint(list(operand.uniform.registers()), what)
    place = source(e, operand.uniform, "u32")
    return f"({place} + {e.constants.array(WORD, operand.offset & 0xFFFFFFFF)})" if operand.offset else place


def own_lanes(e: Emitter, operand: object) -> str:
    """Return the expression of an address whose quarter of the lanes is left out: a warp has its own.

    Known: the ISA allows a warp no other lanes, and TRTLLM-gen's kernels name lane 32 in warps with other ones. Inferred: the hardware
    then takes the warp's own, with which these kernels give right values. PTX that names other lanes stays a finding.
    """
    return f"({tensor_address(e, operand, 'an address')} & {e.constants.array(WORD, ~QUARTERS & 0xFFFFFFFF)})"


def registers_of_move(e: Emitter, ins: SassInstruction, index: int) -> tuple[Fragment, str]:
    """Return the shape of a move, and the expression of the rows of its registers in bank "r"."""
    operand, where = ins.operands[index], fragment(ins)
    if not isinstance(operand, Register) or operand.number is None:
        raise Unsupported(f"{operand} instead of {where.registers} registers")
    first = e.layout.row(operand.registers()[0])  # rows are in the order of register numbers, and every one of the run has a row
    return where, e.constants.number(slice(first, first + where.registers))


@op(rf"LDTM{SHAPE}(.PACK16BIT)?", needs="warp", pure=False, taint="own", loads=True)
def load(e: Emitter, ins: SassInstruction) -> None:
    """Emit a load of tensor memory to registers."""
    where, rows = registers_of_move(e, ins, 0)
    place = own_lanes(e, ins.operands[1])
    boards = 0 if ins.control.write_board == NO_BOARD else 1 << ins.control.write_board
    e.line(f"load_tensor_cells(w, {e.constants.thing(where)}, {rows}, {place}, {boards}, {e.tainted})")


@op(rf"STTM{SHAPE}(.EXPAND16BIT)?", needs="warp", pure=False, taint="own", writes=())
def store(e: Emitter, ins: SassInstruction) -> None:
    """Emit a store of registers to tensor memory."""
    where, rows = registers_of_move(e, ins, 1)
    place = own_lanes(e, ins.operands[0])
    e.line(f"tensor_store(w, {e.constants.thing(where)}, {rows}, 0, {place}, {e.tainted})")


@op(r"FENCE.VIEW.ASYNC.T", pure=False, needs="warp", writes=())
def wait_for_stores(e: Emitter, ins: SassInstruction) -> None:
    """Emit tcgen05.wait::st."""
    e.line("tensor_wait(w, True)")


@op(r"AWAIT", pure=False, writes=())
def wait_for_loads(e: Emitter, ins: SassInstruction) -> None:
    """Emit a wait for scoreboards that loads of tensor memory release."""
    e.line(f"if w.cta.awaited: await_tensor_loads(w, {ins.control.waits})")


@runtime
def load_tensor_cells(w: Window, where: Fragment, rows: np.ndarray | slice, address: np.ndarray, boards: int, tainted: bool) -> None:
    """Execute LDTM; the values are taken at once. boards: mask of the scoreboard that it releases."""
    places, moves = warp_places(w, where, address, False, 0)
    read_cells(w, where, rows, places, tainted)
    for move in moves:
        move.boards = boards
    w.cta.awaited += moves


@runtime
def await_tensor_loads(w: Window, mask: int) -> None:
    """Record that warps have waited for the scoreboards of a mask. Loads of a warp are done in order: the last one proves the others."""
    cta = w.cta
    for warp in w.warps:
        moves = [move for move in cta.awaited if move.warp == warp]
        while moves and not moves[-1].boards & mask:
            moves.pop()
        finish_moves(cta, warp, moves)
    cta.awaited = [move for move in cta.awaited if move.time is None]

"""tcgen05.ld, tcgen05.st and their waits: registers of a warp from and to its lanes of tensor memory."""

from __future__ import annotations

import re

import numpy as np

from ..checks import tensor_hazards
from ..findings import Fault
from ..frontend.ptx import Imm, Instruction, Operand, Reg, Vec
from ..numerics import tensor_fragments
from ..numerics.tensor_fragments import Fragment
from ..state.cta import Cta
from ..state.registers import WARP
from ..state.tensor_memory import COLUMNS, split_address
from ..state.tensor_queue import Cells, TensorMove
from ..state.window import Window
from .emitter import Emitter, Unsupported
from .table import op, registers_of, runtime

Match = re.Match[str]

SHAPE = r"(?P<shape>32x32b|16x64b|16x128b|16x256b|16x32bx2).x(?P<count>1|2|4|8|16|32|64|128)"


def fragment_of(m: Match, split: Operand | None, packed: bool) -> Fragment:
    """Return the shape of a move."""
    half = 0
    if m["shape"] == "16x32bx2":
        if not isinstance(split, Imm):
            raise Unsupported("16x32bx2 without a literal half split offset")
        half = int(split.value)
    try:
        return tensor_fragments.fragment(m["shape"], int(m["count"]), packed, half)
    except ValueError as error:
        raise Unsupported(str(error)) from error


def rows_of(e: Emitter, operand: Operand | None, where: Fragment) -> str:
    """Return two expressions for the registers of a move: the index of their rows in bank "r", and their bit mask."""
    items = operand.items if isinstance(operand, Vec) else (operand,)
    if len(items) != where.registers or not all(isinstance(item, Reg) and item.bank == "r" for item in items):
        raise Unsupported(f"{where.registers} 32-bit registers expected")
    slots = tuple(e.layout.row(item) for item in items if isinstance(item, Reg))
    consecutive = slots == tuple(range(slots[0], slots[0] + len(slots)))
    index = slice(slots[0], slots[0] + len(slots)) if consecutive else np.array(slots)
    return f"{e.constants.number(index)}, {e.constants.number(sum(1 << slot for slot in set(slots)))}"


@op(rf"tcgen05.ld.sync.aligned.{SHAPE}(?P<pack>.pack::16b)?.b32", needs="warp", pure=False, taint="own", loads=True)
def load(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a load of tensor memory to registers."""
    destination, address, *rest = ins.operands
    where = fragment_of(m, rest[0] if rest else None, bool(m["pack"]))
    rows = rows_of(e, destination, where)
    e.check_taint(registers_of(address), "an address")
    for register in registers_of(destination):
        e.known.pop(register.name, None)
    e.line(f"tensor_load(w, {e.constants.thing(where)}, {rows}, {e.memory_address(address, 32)}, {e.tainted})")


@op(rf"tcgen05.st.sync.aligned.{SHAPE}(?P<unpack>.unpack::16b)?.b32", writes=(), needs="warp", pure=False, taint="own")
def store(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a store of registers to tensor memory."""
    address, *rest, source = ins.operands
    where = fragment_of(m, rest[0] if rest else None, bool(m["unpack"]))
    rows = rows_of(e, source, where)
    e.check_taint(registers_of(address), "an address")
    e.line(f"tensor_store(w, {e.constants.thing(where)}, {rows}, {e.memory_address(address, 32)}, {e.tainted})")


@op(r"tcgen05.wait::(?P<what>ld|st).sync.aligned", writes=(), pure=False, needs="warp")
def wait(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a wait for all earlier loads (or stores) of the warp."""
    e.line(f"tensor_wait(w, {m['what'] == 'st'})")


# ---------------------------------------------------------------- runtime


Place = tuple[int, int, int]  # warp, lane, column


def warp_places(w: Window, where: Fragment, address: np.ndarray, write: bool, registers: int) -> tuple[list[Place], list[TensorMove]]:
    """Return the place of each warp of the window and the moves there; record them and report hazards.

    registers: bit mask of the rows of bank "r". Raises Fault for cells that a warp may not access.
    """
    if not w.whole:
        raise Fault("divergence", "a tensor memory load or store needs all 32 lanes of its warps")
    cta = w.cta
    clocks = cta.cluster.clocks
    memory = cta.tensor_memory()
    verb = "tcgen05.st" if write else "tcgen05.ld"
    if address.ndim and bool((address.reshape(-1, WARP) != address[::WARP, None]).any()):
        raise Fault("divergence", f"the address of a {verb} differs between the lanes of a warp")
    firsts = [int(address)] * len(w.warps) if address.ndim == 0 else [int(value) for value in address[::WARP]]
    origin = None
    places, moves = [], []
    for warp, first in zip(w.warps, firsts, strict=True):
        lane, column = split_address(first)
        own = WARP * (warp % 4)
        if lane & -WARP not in (0, own) or lane % WARP not in ((0,) if where.rows == 32 else (0, 16)):
            message = f"{verb} of {where.rows} lanes from lane {lane} by warp {warp}, which may access lanes {own} to {own + 31}"
            raise Fault("tensor_memory", message)
        lane = own + lane % WARP  # FlashMLA's kernels give lane 0 in all warps, and each gets its own lanes
        for low, high in where.spans:
            if column + high > COLUMNS:
                raise Fault("tensor_memory", f"{verb} of columns {column + low} to {column + high - 1}: there are {COLUMNS}")
            memory.require(column + low, column + high, verb)
            blocks = (3 if where.rows == 32 else 1) << lane // 16
            cells = Cells(cta.rank, blocks, column + low, column + high)
            tensor_hazards.check_move(w, warp, cells, write)
            origin = origin or w.origin()
            issued = int(clocks.now[clocks.row(cta.rank, warp), clocks.row(cta.rank, warp)]) + 1
            moves.append(TensorMove(warp, write, cells, origin, issued, {"r": registers}))
            cta.moves[warp, write, cells] = moves[-1]
        places.append((warp, lane, column))
    return places, moves


def together(places: list[Place]) -> bool:
    """Return whether the warps are one warpgroup at the same column."""
    return len(places) == 4 and all(lane == 32 * i and column == places[0][2] for i, (_, lane, column) in enumerate(places))


@runtime
def tensor_load(w: Window, where: Fragment, rows: np.ndarray | slice, mask: int, address: np.ndarray, tainted: bool) -> None:
    """Execute tcgen05.ld; the values are taken at once."""
    places, _ = warp_places(w, where, address, False, mask)
    read_cells(w, where, rows, places, tainted)
    w.cta.loading = True


def read_cells(w: Window, where: Fragment, rows: np.ndarray | slice, places: list[Place], tainted: bool) -> None:
    """Copy cells of tensor memory to registers, with their poison."""
    memory = w.cta.tensor_memory()
    bank = w.banks["r"]
    known: np.ndarray
    if where.shape == "32x32b" and not where.packed and together(places):
        columns = slice(places[0][2], places[0][2] + where.count)
        bank[rows] = memory.data[:, columns].T
        known = memory.valid[:, columns].T
    else:
        known = np.ones((where.registers, w.n), bool)
        for index, (_, lane, column) in enumerate(places):
            part = lanes_of_move(where, index)
            bank[rows, part] = tensor_fragments.load(memory.data, where, lane, column)
            known[:, part] = tensor_fragments.load_known(memory.valid, where, lane, column)
    defined = bool(known.all())
    if not defined and not tainted:
        w.become_tainted()
    for index in range(len(places)) if tainted or not defined else ():
        part = lanes_of_move(where, index)
        w.taints["r"][rows, part] = ~known[:, part]


def lanes_of_move(where: Fragment, index: int) -> slice:
    """Return the lanes of a window that take part in the move of its warp of this index."""
    return slice(WARP * index + where.threads.start, WARP * index + where.threads.stop)


@runtime
def tensor_store(w: Window, where: Fragment, rows: np.ndarray | slice, mask: int, address: np.ndarray, tainted: bool) -> None:
    """Execute tcgen05.st; the values are written at once."""
    memory = w.cta.tensor_memory()
    values = w.banks["r"][rows]
    poison = w.taints["r"][rows] if tainted else None
    for index, (_, lane, column) in enumerate(warp_places(w, where, address, True, mask)[0]):
        part = lanes_of_move(where, index)
        tensor_fragments.store(memory.data, values[:, part], where, lane, column)
        tensor_fragments.store_known(memory.valid, None if poison is None else ~poison[:, part], where, lane, column)


@runtime
def tensor_wait(w: Window, write: bool) -> None:
    """Execute tcgen05.wait::ld and tcgen05.wait::st."""
    cta = w.cta
    for warp in w.warps:
        waited = [move for move in cta.moves.values() if move.time is None and move.write == write and move.warp == warp]
        finish_moves(cta, warp, waited)


def finish_moves(cta: Cta, warp: int, moves: list[TensorMove]) -> None:
    """Record that a warp knows moves of its own to be done."""
    if moves:
        time = cta.cluster.clocks.tick(cta.rank, warp)
        for move in moves:
            move.time = time

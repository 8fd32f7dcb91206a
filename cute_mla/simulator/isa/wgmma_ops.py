"""wgmma: issue, commit and wait. units/wgmma_products.py computes the products."""

from __future__ import annotations

import re

import numpy as np

from ..checks import races, smem_hazards
from ..findings import Fault
from ..frontend.ptx import Imm, Instruction, Reg, Vec
from ..numerics import wgmma
from ..state.registers import WARP
from ..state.wgmma_queue import WARPGROUP, WgmmaChain
from ..state.window import Window
from ..units import wgmma_products
from .emitter import Emitter, Unsupported
from .table import op, registers_of, runtime

Match = re.Match[str]


@op(r"wgmma.fence.sync.aligned", writes=(), pure=False, needs="warpgroup")
def fence(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a note for observers: the fence orders register accesses, which the check at load covers."""
    e.line("if w.observer is not None: w.observer.fence(w, 'wgmma.fence')")


@op(r"wgmma.commit_group.sync.aligned", writes=(), pure=False, needs="warpgroup", ends=True)
def commit(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit the end of the group of wgmmas."""
    e.line("wgmma_commit(w)")


@op(r"wgmma.wait_group.sync.aligned", writes=(), pure=False, needs="warpgroup", starts=True, ends=True)
def wait(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a wait for all but the newest n groups."""
    count = ins.operands[0]
    if not isinstance(count, Imm):
        raise Unsupported("wgmma.wait_group without a literal")
    e.line(f"wgmma_wait(w, {int(count.value)})")


@op(r"wgmma.mma_async[\w:.]+", pure=False, taint="own", needs="warpgroup", asynchronous=True)
def mma(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a product D = A B (+ D) of a warpgroup."""
    try:
        form = wgmma.parse_opcode(ins.opcode)
    except ValueError as error:
        raise Unsupported(str(error)) from error
    d, a, b, scale = ins.operands[:4]
    if not isinstance(d, Vec) or len(d.items) != form.accumulator_registers or not all(isinstance(item, Reg) for item in d.items):
        raise Unsupported(f"{form.accumulator_registers} accumulator registers expected")
    from_registers = isinstance(a, Vec)
    immediates = [int(operand.value) if isinstance(operand, Imm) else 0 for operand in ins.operands[4:]]
    negate = False
    if form.negatable:
        negate = immediates[0] * immediates[1] < 0
        immediates = immediates[2:]
    majors = [0, 0]
    if form.transposable:
        majors = [0, immediates[0]] if from_registers else immediates[:2]
    rows = e.constants.thing(shared_rows(e, tuple(e.layout.row(item) for item in d.items if isinstance(item, Reg))))
    e.check_taint([register for operand in (b, scale) for register in registers_of(operand)], "a matrix product")
    step = e.constants.thing(Step(form, negate, bool(majors[0]), bool(majors[1]), from_registers))
    if isinstance(a, Vec):
        slots = tuple(e.layout.row(item) for item in a.items if isinstance(item, Reg))
        if len(slots) != 4:
            raise Unsupported("four A registers expected")
        first = e.constants.thing(np.array(slots))
    else:
        e.check_taint(registers_of(a), "a matrix product")
        first = e.src(a, "u64")
    e.line(f"wgmma_issue(w, {step}, {rows}, {first}, {e.src(b, 'u64')}, {scale_expression(e, scale)}, {e.tainted})")


def shared_rows(e: Emitter, slots: tuple[int, ...]) -> np.ndarray | slice:
    """Return the accumulator's rows, the same object for the same registers."""
    cache = e.layout.row_groups
    if slots not in cache:
        consecutive = slots == tuple(range(slots[0], slots[0] + len(slots)))
        cache[slots] = AccumulatorRows(slice(slots[0], slots[0] + len(slots)) if consecutive else np.array(slots), slots)
    return cache[slots]  # type: ignore[return-value]


class AccumulatorRows:
    """Rows of bank "r" (a slice where they are consecutive), and their bit mask."""

    def __init__(self, index: np.ndarray | slice, slots: tuple[int, ...]) -> None:
        self.index = index
        self.mask = sum(1 << slot for slot in slots)


class Step:
    """Fixed properties of one wgmma instruction."""

    def __init__(self, form: wgmma.Instruction, negate: bool, a_major: bool, b_major: bool, from_registers: bool) -> None:
        self.form = form
        self.negate = negate
        self.a_major = a_major
        self.b_major = b_major
        self.from_registers = from_registers


def scale_expression(e: Emitter, scale: object) -> str:
    """Return the expression of scale-d: whether D is read."""
    if isinstance(scale, Imm):
        return str(bool(scale.value))
    if isinstance(scale, Reg) and scale.bank == "p":
        if scale.name in e.known:
            return str(bool(e.known[scale.name]))
        return e.row(scale, "pred")
    raise Unsupported(f"scale-d {scale}")


@runtime
def wgmma_issue(
    w: Window, step: Step, rows: AccumulatorRows, a: np.ndarray, b: np.ndarray, scale: np.ndarray | bool, tainted: bool
) -> None:
    """Queue one wgmma for each warpgroup of the window."""
    cta = w.cta
    origin = w.origin()
    for start in range(0, w.n, WARPGROUP):
        stop = start + WARPGROUP
        read = scale if isinstance(scale, bool) else one_value(scale, start, stop, "scale-d")
        chain = WgmmaChain(step.form, rows.index, bool(read), step.negate, step.a_major, step.b_major, step.from_registers, origin)  # type: ignore[arg-type]
        sources = 0
        if step.from_registers:
            chain.a_values.append(w.banks["r"][a, start:stop])
            chain.a_poison.append(w.taints["r"][a, start:stop].copy() if tainted else None)
            sources = sum(1 << int(slot) for slot in a)
        else:
            chain.a.append(int(one_value(a, start, stop, "a descriptor")))
        chain.b.append(int(one_value(b, start, stop, "a descriptor")))
        if w.engine.pending:
            smem_hazards.check_operands(w, chain)
        for where in smem_hazards.operands(chain):
            races.check_source(w, cta, races.operand_words(where), "a wgmma", int(w.lanes[start]) // WARP)
        cta.wgmma_queue(int(w.lanes[start])).issue(chain, rows.mask, sources)
    cta.refresh_busy()


def one_value(value: np.ndarray, start: int, stop: int, what: str) -> int:
    """Return the value that a warpgroup agrees on. Raises Fault when its lanes differ."""
    if value.ndim == 0:
        return int(value)
    part = value[start:stop]
    first = part[0]
    if np.count_nonzero(part != first):
        raise Fault("divergence", f"{what} of a wgmma differs between the threads of its warpgroup")
    return int(first)


@runtime
def wgmma_commit(w: Window) -> None:
    """Execute wgmma.commit_group."""
    cta = w.cta
    for start in range(0, w.n, WARPGROUP):
        queue = cta.wgmma_queue(int(w.lanes[start]))
        queue.commit()
        if w.engine.completes_now():
            wgmma_products.flush(w.engine, cta, queue, 0)


@runtime
def wgmma_wait(w: Window, remaining: int) -> None:
    """Execute wgmma.wait_group."""
    cta = w.cta
    clocks = cta.cluster.clocks
    for start in range(0, w.n, WARPGROUP):
        queue = cta.wgmma_queue(int(w.lanes[start]))
        wgmma_products.flush(w.engine, cta, queue, remaining)
        queue.free(remaining)
        first = queue.first_thread // WARP
        clocks.note(cta.rank, range(first, first + WARPGROUP // WARP), clocks.matrix_core(cta.rank, first), queue.serial)
    cta.refresh_busy()

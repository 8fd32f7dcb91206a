"""Matrix products in machine code: of a warpgroup, HGMMA, QGMMA and the groups that gsb0 ends; of a warp, HMMA and QMMA."""

from __future__ import annotations

import numpy as np

from ..frontend.ptx import Reg
from ..isa.emitter import Emitter, Unsupported
from ..isa.table import runtime
from ..isa.warp_products import COUNTS, emit_poison, emit_product
from ..isa.wgmma_ops import Step, shared_rows
from ..numerics import wgmma
from ..state.registers import WARP
from ..state.wgmma_queue import WARPGROUP, WgmmaChain
from ..state.window import Window
from ..units import wgmma_products
from .accesses import accesses, descriptors
from .listing import Address, Immediate, Register, SassInstruction, SystemRegister
from .operands import constant, source
from .table import ignored, op

_TYPES = {("HGMMA", ""): "f16", ("HGMMA", "BF16"): "bf16", ("QGMMA", "E4M3"): "e4m3"}
_WARP_TYPES = {("HMMA",): "f16", ("HMMA", "BF16"): "bf16", ("QMMA", "E4M3"): "e4m3"}
_GROUP_ENDS = SystemRegister("gsb0")
_FIRST_PLACE = Register("UR", None)  # of scales: byte and lanes


def joined_words(e: Emitter, words: tuple[Reg, ...]) -> str:
    """Return the expression of a descriptor in two uniform registers."""
    return f"join_words({', '.join(e.row(register, 'u32') for register in words)})"


@op(r"HGMMA.64x\d+x16.F32(.BF16)?", r"QGMMA.64x\d+x32.F32.E4M3.E4M3", pure=False, taint="own", needs="warpgroup", asynchronous=True)
def multiply(e: Emitter, ins: SassInstruction) -> None:
    """Emit D = A B (+ D) of a warpgroup. gsb0 ends a group of products."""
    shape, _, *types = ins.modifiers
    kind = _TYPES[ins.base, types[0] if types else ""]
    _, n, k = map(int, shape.split("x"))
    form = wgmma.Instruction(n, k, "f32", kind, kind)
    from_registers = isinstance(ins.operands[1], Register)
    place = ins.operands[2 if from_registers else 1]
    if not isinstance(place, Address) or any(word not in ("tnspA", "tnspB") for word in place.suffixes):
        raise Unsupported(f"descriptors {place}")
    step = Step(form, False, "tnspA" in place.suffixes, "tnspB" in place.suffixes, from_registers)
    access = accesses(ins)
    rows = shared_rows(e, tuple(e.layout.row(register) for register in access.accumulators))
    first, second = descriptors(place)
    e.check_taint([register for register in access.reads if register.name.startswith("U")], "a matrix product")
    if from_registers:
        left = e.constants.thing(np.array([e.layout.row(register) for register in ins.operands[1].registers(4)]))  # type: ignore[union-attr]
    else:
        left = joined_words(e, first)
    arguments = f"{e.constants.thing(step)}, {e.constants.thing(rows)}, {left}, {joined_words(e, second)}, {scale(e, ins)}"
    e.line(f"wgmma_issue(w, {arguments}, {e.tainted})")
    if _GROUP_ENDS in ins.operands:
        e.line("end_products(w)")


def scale(e: Emitter, ins: SassInstruction) -> str:
    """Return the expression that says if D is read: always, never (!UPT) or by a uniform predicate."""
    found = [operand for operand in ins.operands if isinstance(operand, Register) and operand.is_predicate]
    if not found:
        return "True"
    if found[0].number is None:
        return str(not found[0].negative)
    return source(e, found[0], "pred")


@runtime
def end_products(w: Window) -> None:
    """Close the group of products in flight. They are computed when somebody waits: gsb0 stands also where PTX commits nothing."""
    for start in range(0, w.n, WARPGROUP):
        w.cta.wgmma_queue(int(w.lanes[start])).commit()


@op(r"WARPGROUP.DEPBAR.LE", pure=False, needs="warpgroup", starts=True, ends=True, writes=())
def wait(e: Emitter, ins: SassInstruction) -> None:
    """Emit a wait for all but the newest n groups of products."""
    group, count = ins.operands
    if group != _GROUP_ENDS or not isinstance(count, Immediate):
        raise Unsupported("WARPGROUP.DEPBAR without gsb0 and a literal")
    e.line(f"wait_for_products(w, {count.bits})")


@runtime
def wait_for_products(w: Window, remaining: int) -> None:
    """Execute WARPGROUP.DEPBAR: compute consecutive products on one accumulator together, across groups."""
    cta = w.cta
    clocks = cta.cluster.clocks
    for start in range(0, w.n, WARPGROUP):
        queue = cta.wgmma_queue(int(w.lanes[start]))
        chains: list[WgmmaChain] = []
        for chain in queue.take(remaining):
            if chains and chains[-1].extends(chain):
                chains[-1].append(chain)
            else:
                chains.append(chain)
        for chain in chains:
            wgmma_products.multiply(w.engine, cta, queue.first_thread, chain)
        queue.free(remaining)
        first = queue.first_thread // WARP
        clocks.note(cta.rank, range(first, first + WARPGROUP // WARP), clocks.matrix_core(cta.rank, first), queue.serial)
    cta.refresh_busy()


ignored(r"WARPGROUP.ARRIVE", "orders register accesses before products", needs="warpgroup", writes=())


# ---------------------------------------------------------------- products of a warp


@op(r"HMMA.16816.F32(.BF16)?", r"QMMA.16832.F32.E4M3.E4M3", r"QMMA.SF.16832.F32.E4M3.E4M3.E8", taint="own", needs="warp")
def multiply_in_registers(e: Emitter, ins: SassInstruction) -> None:
    """Emit mma.sync.m16n8k16, or m16n8k32 of e4m3, with sums in f32; RZ is an addend of zeros.

    Scales of e4m3 are in byte 0 of the first lanes of a quad, which URZ says.
    """
    operands, words = ins.operands[: len(COUNTS)], [kind for kind in ins.modifiers if kind != "SF"]
    *scales, place = ins.operands[len(COUNTS) :] or (_FIRST_PLACE,)
    if place != _FIRST_PLACE or not all(isinstance(scale, Register) and scale.number is not None for scale in scales):
        raise Unsupported(f"scales {scales} at {place}")
    runs: list[tuple[Reg, ...]] = []
    for operand, count in zip(operands, COUNTS, strict=True):
        if not isinstance(operand, Register) or operand.negative or (operand.number is None and len(runs) < len(COUNTS) - 1):
            raise Unsupported(f"operand {operand} of a product")
        runs.append(operand.registers(count))
    sources = [[e.row(register, kind) for register in run] for run, kind in zip(runs[1:], ("u32", "u32", "f32"), strict=True)]
    sources[-1] = sources[-1] or [constant(e, "f32", 0)] * COUNTS[-1]
    factors = [register for scale in scales for register in scale.registers(1)]  # type: ignore[union-attr]  # tested above
    results, rows = [e.dst(register, "f32") for register in runs[0]], [e.row(register, "u32") for register in factors]
    emit_product(e, sources, results, _WARP_TYPES[ins.base, *words[2:3]], rows)
    if e.tainted:
        marks = [[e.taint(register) for register in run] for run in runs]
        emit_poison(e, [*marks[:-1], marks[-1] or [None] * COUNTS[-1]], [e.taint(register) for register in factors])

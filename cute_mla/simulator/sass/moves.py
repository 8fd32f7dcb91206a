"""Moves, selection, permutation, special registers and constants of machine code."""

from __future__ import annotations

import numpy as np

from ..findings import Fault
from ..frontend.layout import FOREIGN_WINDOW, SHARED_WINDOW
from ..isa.emitter import Emitter, Unsupported
from ..isa.table import runtime
from .accesses import PREDICATES, width
from .listing import Constant, Immediate, Operand, Register, SassInstruction, SystemRegister, register
from .operands import WIDE, WORD, assign, assign_pair, assign_run, bank_word, constant, pair, poison_of, source
from .table import op

FOREIGN_BANK = 4  # constant bank of the addresses that the loader fills in


@op(r"U?MOV(.SPILL)?", r"RPCMOV.32")
def move(e: Emitter, ins: SassInstruction) -> None:
    """Emit a copy."""
    assign(e, ins.operands[0], "u32", source(e, ins.operands[1], "u32"))


@op(r"MOV.64")
def move_pair(e: Emitter, ins: SassInstruction) -> None:
    """Emit a copy of 64 bits, all of which an immediate names: 0xffffffff is 2^32 - 1."""
    given = ins.operands[1]
    assign_pair(e, ins.operands[0], e.constants.array(WIDE, given.bits) if isinstance(given, Immediate) else pair(e, given))


@op(r"CS2R(.32)?")
def move_special(e: Emitter, ins: SassInstruction) -> None:
    """Emit a clearing of a register or a pair. The kind of cluster (CgaSize), which counts tables of constant bank 0 down, is 0 here."""
    if ins.operands[1] not in (SystemRegister("SRZ"), SystemRegister("SR_CgaSize")):
        raise Unsupported(f"CS2R of {ins.operands[1]}")
    assign_run(e, ins.operands[0], [constant(e, "u32", 0)] * width(ins, 0))


_SPECIAL = {
    "SR_TID.X": "tid.x", "SR_TID.Y": "tid.y", "SR_TID.Z": "tid.z", "SR_CTAID.X": "ctaid.x", "SR_CTAID.Y": "ctaid.y",
    "SR_CTAID.Z": "ctaid.z", "SR_LANEID": "laneid", "SR_LTMASK": "lanemask_lt", "SR_CgaCtaId": "cluster_ctarank",
}  # fmt: skip
_FIXED = {"SR_SWINHI": SHARED_WINDOW >> 32, "SR_CgaSize": 0}  # upper half of generic addresses of shared memory, kind of cluster
_OF_THREADS = ("tid.x", "tid.y", "tid.z", "laneid", "lanemask_lt")


@op(r"S2U?R")
def read_system(e: Emitter, ins: SassInstruction) -> None:
    """Emit a read of a special register."""
    name = ins.operands[1]
    assert isinstance(name, SystemRegister)
    if name.name in _FIXED:
        assign(e, ins.operands[0], "u32", constant(e, "u32", _FIXED[name.name]))
        return
    found = _SPECIAL.get(name.name)
    if found is None or (found in _OF_THREADS and ins.base == "S2UR"):
        raise Unsupported(f"special register {name.name}")
    value = f"w.special[{found!r}]" if found in _OF_THREADS else f"read_special(w, {found!r})"
    assign(e, ins.operands[0], "u32", value)


@op(r"LDC(.U8|.64)?", r"ULDC(.U8|.64)?", r"LDCU(.U8|.64|.128)?")
def load_constant(e: Emitter, ins: SassInstruction) -> None:
    """Emit a load from constant bank 0, a table of bank 2, or bank 4, which holds addresses outside the cubin.

    An index of bank 0 chooses a word of the parameters; below them it would choose the kind of cluster.
    """
    place = ins.operands[1]
    if not isinstance(place, Constant):
        raise Unsupported(f"a load from {place}")
    if place.bank == FOREIGN_BANK:
        assign_run(e, ins.operands[0], [constant(e, "u32", word) for word in (place.offset, FOREIGN_WINDOW >> 32)][: width(ins, 0)])
        return
    if place.bank in e.layout.tables and place.index is not None and width(ins, 0) == 1:
        e.check_taint(place.index.registers(), "an address")
        table = e.constants.thing(e.layout.tables[place.bank])
        assign(e, ins.operands[0], "u32", f"table_word({table}, {source(e, place.index, 'u32')} + {constant(e, 'u32', place.offset)})")
        return
    if place.bank:
        raise Unsupported(f"a load from {place}")
    if place.index is not None and place.offset >= e.layout.params_begin and "U8" not in ins.modifiers:
        e.check_taint(place.index.registers(), "an address")
        starts = [constant(e, "u32", place.offset + 4 * index) for index in range(width(ins, 0))]
        assign_run(e, ins.operands[0], [f"table_word(w.cta.params, {source(e, place.index, 'u32')} + {start})" for start in starts])
        return
    if place.index is not None:
        e.check_taint(place.index.registers(), "an address")
        e.line(f"first_table({source(e, place.index, 'u32')})")
    if "U8" in ins.modifiers:
        word = bank_word(e, place.offset & ~3, "u32")
        assign(e, ins.operands[0], "u32", f"{word} >> {constant(e, 'u32', 8 * (place.offset & 3))} & {constant(e, 'u32', 255)}")
        return
    assign_run(e, ins.operands[0], [bank_word(e, place.offset + 4 * index, "u32") for index in range(width(ins, 0))])


@runtime
def first_table(index: np.ndarray) -> None:
    """Check that a load from constant bank 0 is from the table of the kind of cluster 0. Raises Fault for another."""
    if bool(np.any(index)):
        raise Fault("unsupported", f"constant bank 0 with an index of {int(np.max(index)):#x}")


@runtime
def table_word(table: bytes, place: np.ndarray) -> np.ndarray:
    """Return words of a constant table. Raises Fault outside it."""
    words = np.frombuffer(table, np.uint32)
    if bool((place & np.uint32(3)).any()) or bool((place >= np.uint32(len(table))).any()):
        raise Fault("out_of_bounds", f"a constant table of {len(table)} bytes at {int(place.max()):#x}")
    found: np.ndarray = words[place >> np.uint32(2)]
    return found


@op(r"LEPC")
def code_address(e: Emitter, ins: SassInstruction) -> None:
    """Emit the address of a place in the code, counted from the start of the kernel."""
    place = ins.operands[1]
    assert isinstance(place, Immediate)
    assign_run(e, ins.operands[0], [constant(e, "u32", place.bits), constant(e, "u32", 0)])


@op(r"(U?SEL|U?FSEL)", taint="own", batch=True)
def select(e: Emitter, ins: SassInstruction) -> None:
    """Emit p ? a : b; FSEL's operands may be negated. Poison of the operand that is not selected is dropped."""
    result, a, b, condition = ins.operands
    kind = "f32" if ins.base.endswith("FSEL") else "u32"
    chosen = source(e, condition, "pred")
    if e.tainted and isinstance(result, Register):
        marks = [poison_of(e, operand) for operand in (a, b, condition)]
        for register in result.registers():
            e.line(f"{e.taint(register)}[...] = logical_or(where({chosen}, {marks[0]}, {marks[1]}), {marks[2]})")
    assign(e, result, kind, f"where({chosen}, {source(e, a, kind)}, {source(e, b, kind)})")


@op(r"SEL.64", taint="own")
def select_pair(e: Emitter, ins: SassInstruction) -> None:
    """Emit p ? a : b of 64 bits. Poison of the operand that is not selected is dropped."""
    result, a, b, condition = ins.operands
    assert isinstance(result, Register)
    chosen = source(e, condition, "pred")
    if e.tainted:
        runs = [operand.registers(2) if isinstance(operand, Register) else () for operand in (a, b)]
        marks = [e.temp() for _ in result.registers(2)]
        for index, mark in enumerate(marks):
            left, right = (e.taint_of(run[index : index + 1]) or "False" for run in runs)
            e.line(f"{mark} = logical_or(where({chosen}, {left}, {right}), {poison_of(e, condition)})")
        for mark, register in zip(marks, result.registers(2), strict=True):
            e.line(f"{e.taint(register)}[...] = {mark}")
    assign_pair(e, result, f"where({chosen}, {pair(e, a)}, {pair(e, b)})")


@op(r"U?PRMT", taint="own", batch=True)
def permute(e: Emitter, ins: SassInstruction) -> None:
    """Emit a choice of four bytes out of b:a.

    Poison is kept by register, and ptxas leaves halves undefined that nobody reads. So the result is undefined where all sources are.
    """
    result, a, selector, b = ins.operands
    if e.tainted and isinstance(result, Register):
        used = taken(a, selector, b)
        marks = [e.taint(register) for operand in used if isinstance(operand, Register) for register in operand.registers()]
        defined = len(marks) < len(used) or not marks
        for register in result.registers():
            e.line(f"{e.taint(register)}.fill(False)" if defined else f"{e.taint(register)}[...] = {' & '.join(map(str, marks))}")
    left, right = source(e, a, "u32"), source(e, b, "u32")
    if isinstance(selector, Immediate) and not selector.bits & 0x8888:
        index = tuple(selector.bits >> 4 * byte & 7 for byte in range(4))
        assign(e, result, "u32", f"pick_bytes({left}, {right}, {e.constants.thing(index)})")
    else:
        assign(e, result, "u32", f"permute_bytes({left}, {right}, {source(e, selector, 'u32')})")


def taken(a: Operand, selector: Operand, b: Operand) -> list[Operand]:
    """Return the operands of which a permutation takes bytes."""
    if not isinstance(selector, Immediate):
        return [a, selector, b]
    halves = {selector.bits >> 4 * byte & 4 for byte in range(4)}
    return [operand for half, operand in ((0, a), (4, b)) if half in halves]


@op(r"R2P")
def to_predicates(e: Emitter, ins: SassInstruction) -> None:
    """Emit P[i] = bit i of a byte, for the predicates of a mask."""
    _, value, mask = ins.operands
    assert isinstance(value, Register)
    assert isinstance(mask, Immediate)
    byte = int(value.suffixes[0][1:]) if value.suffixes else 0
    for number in range(PREDICATES):
        if mask.bits >> number & 1:
            bit = constant(e, "u32", 1 << (8 * byte + number))
            e.line(f"{e.dst(register('P', number), 'pred')}[...] = ({source(e, value, 'u32')} & {bit}) != {constant(e, 'u32', 0)}")


@op(r"P2R", r"UP2UR")
def from_predicates(e: Emitter, ins: SassInstruction) -> None:
    """Emit the predicates of a mask as bits, and the other bits of c."""
    result, _, other, mask = ins.operands
    assert isinstance(mask, Immediate)
    word = e.constants.thing(WORD)
    terms = [f"({source(e, other, 'u32')} & {constant(e, 'u32', ~mask.bits)})"]
    for number in range(PREDICATES):
        if mask.bits >> number & 1:
            row = e.row(register("UP" if ins.base == "UP2UR" else "P", number), "pred")
            terms.append(f"({row}.astype({word}) << {constant(e, 'u32', number)})")
    assign(e, result, "u32", " | ".join(terms))

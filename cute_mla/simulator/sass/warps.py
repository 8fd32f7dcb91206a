"""Instructions of machine code in which the lanes of a warp look at each other, and the way between vector and uniform registers."""

from __future__ import annotations

import numpy as np

from ..findings import Fault
from ..frontend.ptx import Reg
from ..isa.emitter import Emitter, Unsupported
from ..isa.lanes import per_warp
from ..isa.table import runtime
from ..state.window import Window
from .accesses import destinations
from .listing import Immediate, Register, SassInstruction
from .operands import assign, constant, pair, source
from .table import op


@op(r"SHFL.(IDX|BFLY|UP|DOWN)", taint="own", pure=False)
def shuffle(e: Emitter, ins: SassInstruction) -> None:
    """Emit an exchange of registers between lanes; the predicate says if the source lane is in range."""
    valid, result, value, lane, clamp = ins.operands
    mode = ins.modifiers[0].lower()
    places, in_range = e.temp(), e.temp()
    if isinstance(lane, Immediate) and isinstance(clamp, Immediate):
        e.line(f"{places}, {in_range} = shuffle_constant(w, {lane.bits & 31}, {clamp.bits}, {mode!r})")
    else:
        e.line(f"{places}, {in_range} = shuffle_lanes(w, {source(e, lane, 'u32')}, {source(e, clamp, 'u32')}, {mode!r})")
    taken = e.temp()
    e.line(f"{taken} = shuffle_take({source(e, value, 'u32')}, {places}, w)")
    if e.tainted:
        for register in registers_of(result):
            taint = e.taint_of(registers_of(value))
            e.line(f"{e.taint(register)}[...] = {f'shuffle_take({taint}, {places}, w)' if taint else 'False'}")
        for register in registers_of(valid):
            e.line(f"{e.taint(register)}.fill(False)")
    assign(e, result, "u32", taken)
    assign(e, valid, "pred", in_range)


def registers_of(operand: object) -> list[Reg]:
    """Return the register of an operand; none for RZ and PT."""
    return list(operand.registers()) if isinstance(operand, Register) else []


def guarded(e: Emitter, ins: SassInstruction) -> str:
    """Return the expression of the lanes that take part: those under the guard."""
    return "ones(w.n, bool)" if ins.guard is None else source(e, ins.guard, "pred")


def check_guarded(e: Emitter, operand: object, there: str, what: str) -> None:
    """Emit a check that a source is defined in the lanes that take part. what: the decision that depends on it."""
    for register in registers_of(operand) if e.tainted else ():
        e.line(f"check_poison(w, {what!r}, logical_and({e.taint(register)}, {there}))")


@op(r"VOTEU?.(ANY|ALL)", taint="own", pure=False)
def vote(e: Emitter, ins: SassInstruction) -> None:
    """Emit a vote of the lanes under the guard. A register result is the ballot; a predicate is the answer."""
    count = destinations(ins)
    value, there = e.temp(), e.temp()
    e.line(f"{there} = {guarded(e, ins)}")
    e.line(f"{value} = logical_and({source(e, ins.operands[count], 'pred')}, {there})")
    check_guarded(e, ins.operands[count], there, "a vote")
    for operand in ins.operands[:count]:
        if not isinstance(operand, Register) or operand.number is None:
            continue
        if operand.is_predicate:
            other = f"vote_any(w, {value})" if ins.modifiers[0] == "ANY" else f"logical_not(vote_any(w, logical_and({there}, ~{value})))"
            keep(e, operand, "pred", other, there, ins)
        else:
            keep(e, operand, "u32", f"vote_ballot(w, {value})", there, ins)


def keep(e: Emitter, operand: Register, kind: str, value: str, there: str, ins: SassInstruction) -> None:
    """Store a result: a vector register of the lanes under the guard, or a uniform one of every warp in which some lane is."""
    if e.tainted:
        for register in operand.registers():
            e.line(f"{e.taint(register)}.fill(False)")
    if ins.guard is None:
        assign(e, operand, kind, value)
        return
    lanes = f"vote_any(w, {there})" if operand.kind in ("UR", "UP") else there
    for register in operand.registers():
        e.line(f"copyto({e.dst(register, kind)}, {value}, where={lanes})")


@op(r"R2UR(.BROADCAST|.OR|.FILL)?", taint="own", pure=False)
def to_uniform(e: Emitter, ins: SassInstruction) -> None:
    """Emit the move of the first lane under the guard to a uniform register of its warp, with its poison.

    A predicate says in which lanes the value is another one; OR keeps what an earlier move found.
    """
    *others, result, value = ins.operands
    if not isinstance(result, Register) or result.is_predicate or (not others and "OR" in ins.modifiers):
        raise Unsupported("R2UR without a uniform register")
    there, chosen, mark = e.temp(), e.temp(), e.temp()
    e.line(f"{there} = {guarded(e, ins)}")
    taint = e.taint_of(registers_of(value)) if e.tainted else None
    if taint is not None:
        e.line(f"{mark} = first_lanes(w, {taint}, {there})")
    e.line(f"{chosen} = first_lanes(w, {source(e, value, 'u32')}, {there})")
    for operand in others:
        assert isinstance(operand, Register)
        check_guarded(e, value, there, "a uniform register")
        differs = f"array({source(e, value, 'u32')} != {chosen})"
        if "OR" in ins.modifiers:
            check_guarded(e, operand, there, "a uniform register")
            differs = f"logical_or({differs}, {source(e, operand, 'pred')})"
        keep(e, operand, "pred", differs, there, ins)
    keep(e, result, "u32", chosen, there, ins)
    for register in result.registers() if taint is not None else ():
        e.line(f"copyto({e.taint(register)}, {mark}, where=vote_any(w, {there}))")


@op(r"MATCH.(ANY|ALL)(.U64)?", taint="own", pure=False, needs="warp")
def match_lanes(e: Emitter, ins: SassInstruction) -> None:
    """Emit the mask of the lanes with the same value; ALL: of all lanes, with a predicate, where all have it."""
    *results, value = ins.operands
    assert isinstance(value, Register)
    wide = "U64" in ins.modifiers
    e.check_taint(list(value.registers(1 + wide)), "a match")
    mask = e.temp()
    e.line(f"{mask} = matching_lanes(w, {pair(e, value) if wide else source(e, value, 'u32')}, {'ALL' in ins.modifiers})")
    for operand in results:
        assert isinstance(operand, Register)
        assign(e, operand, *(("pred", f"{mask} != 0") if operand.is_predicate else ("u32", mask)))
        for register in operand.registers() if e.tainted else ():
            e.line(f"{e.taint(register)}.fill(False)")


@runtime
def first_lanes(w: Window, value: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Return the value of the first lane of each warp that takes part, in all lanes of the warp."""
    if value.ndim == 0:
        return value
    there = np.broadcast_to(there, (w.n,))
    if w.whole and bool(there.all()):
        return np.repeat(value[::32], 32)
    result = np.zeros(w.n, value.dtype)
    for index, taking in per_warp(w, there):
        if taking.any():
            result[index] = value[index[int(np.argmax(taking))]]
    return result


@op(r"REDUX(.OR|.XOR|.SUM)?", taint="own", pure=False)
def reduce(e: Emitter, ins: SassInstruction) -> None:
    """Emit a reduction over the lanes of a warp; without a modifier the conjunction."""
    function = {"OR": np.bitwise_or, "XOR": np.bitwise_xor, "SUM": np.add}.get((*ins.modifiers, "")[0], np.bitwise_and)
    result, value = ins.operands
    assert isinstance(result, Register)
    there = e.temp()
    e.line(f"{there} = {guarded(e, ins)}")
    check_guarded(e, value, there, "a reduction")
    keep(e, result, "u32", f"reduce_lanes(w, {source(e, value, 'u32')}, {there}, {e.constants.thing(function)})", there, ins)


@runtime
def reduce_lanes(w: Window, value: np.ndarray, there: np.ndarray, function: np.ufunc) -> np.ndarray:
    """Return a function over the lanes of each warp that take part, in all lanes of the warp."""
    value, there = np.broadcast_to(value, (w.n,)), np.broadcast_to(there, (w.n,))
    result = np.zeros(w.n, np.uint32)
    for index, taking in per_warp(w, there):
        if taking.any():
            result[index] = function.reduce(value[index[taking]], dtype=np.uint32)
    return result


@op(r"ELECT", taint="own", pure=False)
def elect(e: Emitter, ins: SassInstruction) -> None:
    """Emit an election: true in the lowest lane under the guard; the register is its number."""
    chosen, number, condition = ins.operands
    if not (isinstance(condition, Register) and condition.number is None and not condition.negative):
        raise Unsupported("ELECT under a predicate")
    there, lane = e.temp(), e.temp()
    e.line(f"{there} = {guarded(e, ins)}")
    e.line(f"{lane} = first_lanes(w, w.special['laneid'], {there})")
    for operand, kind, value in ((chosen, "pred", f"logical_and({there}, w.special['laneid'] == {lane})"), (number, "u32", lane)):
        assert isinstance(operand, Register)
        if operand.number is not None:
            keep(e, operand, kind, value, there, ins)


@op(r"BSSY(.RECONVERGENT|.RELIABLE)?", taint="own", pure=False)
def begin_reconvergence(e: Emitter, ins: SassInstruction) -> None:
    """Emit the start of a region: each lane keeps the mask of the lanes of its warp that enter it together."""
    (register,) = registers_of(ins.operands[0])
    e.line(f"{e.dst(register, 'u32')}[...] = vote_ballot(w, ones(w.n, bool))")
    if e.tainted:
        e.line(f"{e.taint(register)}.fill(False)")


@op(r"BSYNC(.RECONVERGENT|.RELIABLE)?", taint="own", pure=False, starts=True, writes=())
def reconverge(e: Emitter, ins: SassInstruction) -> None:
    """Emit the end of a region: wait for the lanes that entered it and have neither left it nor exited."""
    (register,) = registers_of(ins.operands[0])
    e.line(f"if not reconverged(w, {e.row(register, 'u32')}, {e.layout.row(register)}): return BLOCKED")


@runtime
def reconverged(w: Window, mask: np.ndarray, row: int) -> bool:
    """Return True when all lanes of the region are here, and end it; else hold the group until others come or leave.

    Warps of the group that are complete part from the others first: these may wait for what the complete ones do next.
    """
    if w.whole:
        mask[...] = 0
        return True
    stored = w.cta.registers.banks["r"][row]
    held = np.zeros(w.n, bool)
    for index, masks in per_warp(w, mask):
        lanes = w.lanes[index]
        first = int(lanes[0]) // 32 * 32
        warp = stored[first : first + 32]
        waiting = np.zeros(len(warp), bool)
        waiting[lanes - first] = True
        bits = np.unpackbits(np.array([masks[0]], np.uint32).view(np.uint8), bitorder="little")[: len(warp)].astype(bool)
        held[index] = bool((bits & ~waiting & (warp == masks[0])).any())
    if w.engine.must_separate(held):
        return False
    if held.any():
        w.engine.gather()
        return False
    mask[...] = 0
    return True


@op(r"BREAK(.RELIABLE)?", taint="own", pure=False)
def leave_region(e: Emitter, ins: SassInstruction) -> None:
    """Emit the leaving of a region: its end no longer waits for these lanes."""
    (register,) = registers_of(ins.operands[0])
    e.line(f"{e.row(register, 'u32')}.fill(0)")
    e.line("w.engine.regather()")


@op(r"WARPSYNC.ALL", taint="own", pure=False, needs="warp", writes=())
def gather_warp(e: Emitter, ins: SassInstruction) -> None:
    """Emit nothing: the lanes of a warp gather here before they go on."""


@op(r"CONVERGED", taint="own", pure=False, needs="warp", writes=())
def converge(e: Emitter, ins: SassInstruction) -> None:
    """Emit what replaces a branch of diverged warps (BRA.DIV): the lanes gather, so nobody takes it. The mask names all of them."""
    (mask,) = ins.operands
    e.line(f"if not (array({source(e, mask, 'u32')}) == {constant(e, 'u32', 0xFFFFFFFF)}).all(): partly_converged()")


@runtime
def partly_converged() -> None:
    """Raise the Fault of a branch of diverged warps whose mask leaves lanes out."""
    raise Fault("unsupported", "BRA.DIV with a mask of some lanes of a warp")


@op(r"WARPSYNC.COLLECTIVE(.ALL)?", r"ENDCOLLECTIVE", taint="own", pure=False, writes=())
def collect(e: Emitter, ins: SassInstruction) -> None:
    """Emit a fault: the code of diverged warps behind BRA.DIV, which is never reached."""
    e.line("reached_collective()")


@runtime
def reached_collective() -> None:
    """Raise the Fault of code of diverged warps."""
    raise Fault("unsupported", "code of diverged warps behind BRA.DIV")


@op(r"LEAVE", taint="own", pure=False, writes=())
def leave_regions(e: Emitter, ins: SassInstruction) -> None:
    """Emit what comes before an exit: the lanes leave every region."""
    for name, row in e.layout.rows.items():
        if name.startswith("B"):
            e.line(f"w.U[{row}].fill(0)")


@op(r"RETURN", taint="own", pure=False)
def compare_return(e: Emitter, ins: SassInstruction) -> None:
    """Emit the comparison of a return address with one of the places behind calls."""
    result, value, place = ins.operands
    e.check_taint(registers_of(value), "a return address")
    if e.tainted:
        for register in registers_of(result):
            e.line(f"{e.taint(register)}.fill(False)")
    assert isinstance(place, Immediate)
    assign(e, result, "pred", f"{source(e, value, 'u32')} == {constant(e, 'u32', place.bits)}")

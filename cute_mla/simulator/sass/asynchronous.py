"""Barriers, asynchronous copies and fences of machine code. Uniform asynchronous instructions execute once per warp."""

from __future__ import annotations

import numpy as np

from ..isa.async_copies import bulk_to_shared
from ..isa.emitter import Emitter, Unsupported
from ..isa.launch_control import cancel_launch
from ..isa.matrix_moves import emit_transposed
from ..isa.table import runtime
from ..isa.tensor_copies import ROWS, Form, tma_load
from ..state.registers import WARP
from ..state.window import Window
from .accesses import accesses, destinations, width
from .listing import Address, Immediate, Register, SassInstruction
from .memory import assign_loaded, stored
from .operands import address, assign, constant, memory_operand, pair, source
from .table import ignored, op

_ROOM = Immediate(0x36)
MAX_COUNT = 1 << 20  # a raw mbarrier holds this minus the count of arrivals, from bit 1 on


def own(e: Emitter, ins: SassInstruction, index: int) -> str:
    """Return the expression of an address in the CTA's own shared memory."""
    return f"own_shared(w, {address(e, memory_operand(ins, index))})"


def checked(e: Emitter, ins: SassInstruction) -> None:
    """Emit checks that no source is poisoned."""
    registers = [
        register for operand in ins.operands[destinations(ins) :] if isinstance(operand, Register) for register in operand.registers()
    ]
    e.check_taint(registers, "a barrier operand")


# ---------------------------------------------------------------- mbarriers


@op(r"SYNCS.EXCH.64", pure=False, taint="own")
def initialise(e: Emitter, ins: SassInstruction) -> None:
    """Emit mbarrier.init: the exchange stores a raw state that counts arrivals down from 2^20.

    The unit that executes it serves every proxy: fence.mbarrier_init leaves no instruction behind.
    """
    result, _, state = ins.operands
    if not isinstance(result, Register) or result.number is not None:
        raise Unsupported("SYNCS.EXCH with a result")
    checked(e, ins)
    count = (
        f"{constant(e, 'u32', MAX_COUNT)} - ({source(e, state, 'u32')} >> {constant(e, 'u32', 1)} & {constant(e, 'u32', MAX_COUNT - 1)})"
    )
    e.line(f"mbarrier_init(w, {own(e, ins, 1)}, array({count}))")
    e.line("order_barriers(w)")


@op(r"SYNCS.ARRIVE.TRANS64(.RED)?(.A1T0|.ART0|.A0TR)?", pure=False, taint="own")
def arrive(e: Emitter, ins: SassInstruction) -> None:
    """Emit arrivals (A: none, one or as many as the register says) and expected bytes (T: none or the register). RED: in any CTA."""
    result, _, value = ins.operands
    if not isinstance(result, Register) or result.number is not None:
        raise Unsupported("an arrival with a state")
    checked(e, ins)
    remote = "RED" in ins.modifiers
    place = address(e, memory_operand(ins, 1)) if remote else own(e, ins, 1)
    form = ins.modifiers[-1] if ins.modifiers[-1] in ("A1T0", "ART0", "A0TR") else "A1TR"
    number = f"array({source(e, value, 'u32')})"
    if form == "A0TR":
        e.line(f"mbarrier_expect(w, {place}, {number}, {remote})")
        return
    count = number if form == "ART0" else f"array({constant(e, 'u32', 1)})"
    e.line(f"mbarrier_arrive(w, {place}, {count}, {number if form == 'A1TR' else 'None'}, {remote})")


@op(r"SYNCS.ARRIVE.TRANS64.RED.A0TX", pure=False, taint="own")
def complete(e: Emitter, ins: SassInstruction) -> None:
    """Emit mbarrier.complete_tx, in any CTA: bytes come, and nobody arrives."""
    result, _, value = ins.operands
    if not isinstance(result, Register) or result.number is not None:
        raise Unsupported("an arrival with a state")
    checked(e, ins)
    e.line(f"mbarrier_complete(w, {address(e, memory_operand(ins, 1))}, array({source(e, value, 'u32')}), True)")


@op(r"SYNCS.PHASECHK.TRANS64(.TRYWAIT)?", pure=False, taint="own", starts=True)
def test_phase(e: Emitter, ins: SassInstruction) -> None:
    """Emit a test if the phase with the parity in the top bit of a register is complete. It fails once, then blocks."""
    result, _, parity = ins.operands
    assert isinstance(result, Register)
    checked(e, ins)
    out = e.temp()
    e.line(f"{out} = empty(w.n, bool)")
    expected = f"array({source(e, parity, 'u32')} >> {constant(e, 'u32', 31)})"
    wait = f"mbarrier_wait(w, {own(e, ins, 1)}, {expected}, {out}, True, False)"
    if "TRYWAIT" not in ins.modifiers:
        wait = f"test_phase_now(w, {own(e, ins, 1)}, {expected}, {out})"
    e.line(f"if not {wait}: return BLOCKED")
    if e.tainted:
        for register in result.registers():
            e.line(f"{e.taint(register)}.fill(False)")
    assign(e, result, "pred", out)


@op(r"ARRIVES.LDGSTSBAR.64.ARVCNT", pure=False, taint="own", writes=())
def arrive_behind_copies(e: Emitter, ins: SassInstruction) -> None:
    """Emit an arrival of each lane once its earlier copies are complete; the pending count includes it already."""
    e.line(f"cp_async_arrive(w, {own(e, ins, 0)}, True)")


ignored(r"SYNCS.ARRIVE.TRANS64.RED.A0T1", "expects what ARRIVES.LDGSTSBAR.64.TRANSCNT behind it, under the same guard, counts", writes=())


@op(r"ARRIVES.LDGSTSBAR.64.TRANSCNT", pure=False, taint="own", writes=())
def count_copies(e: Emitter, ins: SassInstruction) -> None:
    """Emit what keeps a phase open until the earlier copies of each lane are complete: with A0T1 ahead, an arrival beyond the count."""
    e.line(f"cp_async_arrive(w, {own(e, ins, 0)}, False)")


@op(r"UCGABAR_ARV", pure=False, taint="own", needs="warp", writes=())
def arrive_at_cluster(e: Emitter, ins: SassInstruction) -> None:
    """Emit an arrival at the cluster barrier."""
    e.line("cluster_barrier_arrive(w, False)")


@op(r"UCGABAR_WAIT", pure=False, taint="own", needs="warp", starts=True, ends=True, writes=())
def wait_for_cluster(e: Emitter, ins: SassInstruction) -> None:
    """Emit a wait for the cluster barrier."""
    e.line("if not cluster_barrier_wait(w): return BLOCKED")


# ---------------------------------------------------------------- copies


@runtime
def leaders(w: Window) -> tuple[Window, np.ndarray]:
    """Return the window of the first lane of each warp, and the positions of these lanes."""
    found: np.ndarray | None = w.special.get("leaders")
    if found is None:
        _, found = np.unique(w.lanes // WARP, return_index=True)
        w.special["leaders"] = found
    mask = np.zeros(w.n, bool)
    mask[found] = True
    window = w.subset(mask)
    assert window is not None
    return window, found


def uniform_words(e: Emitter, operand: Address, count: int) -> str:
    """Return the expression of a run of uniform registers as a tuple."""
    if operand.uniform is None or operand.uniform.number is None or operand.offset or operand.base is not None:
        raise Unsupported(f"operand {operand} of a copy")
    registers = operand.uniform.registers(count)
    e.check_taint(list(registers), "an asynchronous copy")
    return f"({', '.join(e.row(register, 'u32') for register in registers)},)"


@op(r"UTMALDG.[1-5]D(.MULTICAST)?(.2CTA)?", r"UTMALDG.2D.GATHER4(.2CTA)?", pure=False, taint="own", writes=())
def emit_tensor_load(e: Emitter, ins: SassInstruction) -> None:
    """Emit a TMA load: destination, mbarrier and coordinates in a run, the address of the map in a pair, a mask << 16.

    GATHER4: the coordinates are a column and four rows.
    """
    place, plan, *others = ins.operands
    assert isinstance(place, Address)
    assert isinstance(plan, Address)
    assert plan.uniform is not None
    mask = "None"
    if "MULTICAST" in ins.modifiers:
        mask = source(e, others[0], "u32")
        others = others[1:]
    if len(others) > 1 or not all(isinstance(operand, Address) and operand.space == "desc" for operand in others):
        raise Unsupported(f"operands {others} of a TMA load")  # a cache policy is a hint
    gather = "GATHER4" in ins.modifiers
    words = 2 + (1 + ROWS if gather else int(ins.modifiers[0][0]))
    uniform_words(e, plan, 2)
    form = e.constants.thing(FORMS["2CTA" in ins.modifiers, gather])
    e.line(f"load_tensor_box(w, {uniform_words(e, place, words)}, {pair(e, plan.uniform)}, {mask}, {form})")


FORMS = {(pair, gather): Form(cluster=True, pair=pair, gather=gather) for pair in (False, True) for gather in (False, True)}


@runtime
def load_tensor_box(w: Window, words: tuple[np.ndarray, ...], plan: np.ndarray, mask: np.ndarray | None, form: Form) -> None:
    """Execute UTMALDG in the first lane of each warp."""
    window, where = leaders(w)
    destination, barrier, *coordinates = (word[where] for word in words)
    chosen = None if mask is None else (mask[where] >> np.uint32(16)).astype(np.uint16)
    tma_load(window, destination, plan[where], tuple(item.view(np.int32) for item in coordinates), barrier, chosen, form)


@op(r"UBLKCP.S.[SG]", pure=False, taint="own", writes=())
def copy_bytes(e: Emitter, ins: SassInstruction) -> None:
    """Emit a bulk copy to shared memory: destination and mbarrier in a run, the source, for global memory a pair, and the bytes / 16."""
    place, start, size = ins.operands
    assert isinstance(place, Address)
    assert isinstance(start, Address)
    words = uniform_words(e, place, 2)
    first = f"{uniform_words(e, start, 1)}[0]"
    if ins.modifiers[-1] == "G":
        uniform_words(e, start, 2)
        assert start.uniform is not None
        first = pair(e, start.uniform)
    e.line(f"copy_shared_bytes(w, {words}, {first}, {source(e, size, 'u32')}, {ins.modifiers[-1] == 'S'})")


@runtime
def copy_shared_bytes(w: Window, words: tuple[np.ndarray, ...], start: np.ndarray, size: np.ndarray, between: bool) -> None:
    """Execute UBLKCP in the first lane of each warp. between: the source is shared memory."""
    window, where = leaders(w)
    destination, barrier = (word[where] for word in words)
    nbytes = np.broadcast_to(size, (w.n,))[where] << np.uint32(4)
    bulk_to_shared(window, destination, start[where], nbytes, barrier, None, between, True)


@op(r"UGETNEXTWORKID.(SELFCAST|BROADCAST)", pure=False, taint="own", writes=())
def take_work(e: Emitter, ins: SassInstruction) -> None:
    """Emit clusterlaunchcontrol.try_cancel: the places of the response and of the mbarrier. BROADCAST: in every CTA of the cluster."""
    response, barrier = ins.operands
    assert isinstance(response, Address)
    assert isinstance(barrier, Address)
    words = ", ".join(f"{uniform_words(e, operand, 1)}[0]" for operand in (response, barrier))
    e.line(f"take_next_cluster(w, {words}, {'BROADCAST' in ins.modifiers})")


@runtime
def take_next_cluster(w: Window, response: np.ndarray, barrier: np.ndarray, multicast: bool) -> None:
    """Execute UGETNEXTWORKID in the first lane of each warp."""
    window, where = leaders(w)
    cancel_launch(window, response[where], barrier[where], multicast, True)


@op(r"LDGSTS.E(.BYPASS)?(.LTC(64|128|256)B)?(.64|.128)?", pure=False, taint="own", writes=())
def copy_async(e: Emitter, ins: SassInstruction) -> None:
    """Emit cp.async of 4, 8 or 16 bytes per thread; where the predicate, if there is one, is false, of zeros."""
    condition = source(e, ins.operands[2], "pred") if len(ins.operands) > 2 else constant(e, "pred", 1)
    nbytes = next((int(word) // 8 for word in ins.modifiers if word in ("64", "128")), 4)
    size = f"where({condition}, {constant(e, 'u32', nbytes)}, {constant(e, 'u32', 0)})"
    e.line(f"cp_async(w, {own(e, ins, 0)}, {address(e, memory_operand(ins, 1))}, {nbytes}, {size})")


@op(r"LDGDEPBAR", pure=False, writes=())
def commit_copies(e: Emitter, ins: SassInstruction) -> None:
    """Emit the end of the warp's cp.async group."""
    e.line("cp_async_commit(w)")


@op(r"DEPBAR.LE", pure=False, starts=True, writes=())
def wait_for_copies(e: Emitter, ins: SassInstruction) -> None:
    """Emit a wait for all but the newest n cp.async groups, and until all but the newest n groups of asynchronous stores have been read.

    A count of 54 waits for nothing: ptxas puts it in front of UTCATOMSWS, on the scoreboard that this takes, and no code has so much in
    flight.
    """
    board, count = ins.operands
    if count == _ROOM and isinstance(board, Register) and board.kind == "SB":
        return
    if not (isinstance(board, Register) and board.number == 0 and isinstance(count, Immediate)):
        raise Unsupported("DEPBAR on another scoreboard than SB0")
    e.line(f"cp_async_wait(w, {count.bits}, False)")
    e.line(f"bulk_wait_group(w, {count.bits}, 1)")


@op(r"STAS(.64|.128)?", pure=False, taint="own", writes=())
def store_async(e: Emitter, ins: SassInstruction) -> None:
    """Emit a store to any CTA of the cluster that counts at an mbarrier: the pair holds the address of each."""
    place = memory_operand(ins, 0)
    if not place.wide or place.base is None or place.base.number is None or place.uniform is not None or place.offset:
        raise Unsupported(f"operand {place} of STAS")
    destination, barrier = place.base.registers(2)
    values, _ = stored(e, ins)
    e.check_taint(list(accesses(ins).reads), "an asynchronous copy")
    e.line(f"st_async(w, {e.row(destination, 'u32')}, {values}, {e.row(barrier, 'u32')})")


# ---------------------------------------------------------------- matrices, fences, registers


@op(r"LDSM.16.(M88|MT88).[124]", pure=False, taint="own", loads=True, needs="warp")
def load_matrices(e: Emitter, ins: SassInstruction) -> None:
    """Emit ldmatrix; MT88 transposes."""
    value = e.temp()
    e.line(f"{value} = load_matrices(w, {own(e, ins, 1)}, {width(ins, 0)}, {'MT88' in ins.modifiers})")
    assign_loaded(e, ins, value)


@op(r"MOVM.16.MT88", pure=False, taint="own", needs="warp")
def transpose_in_registers(e: Emitter, ins: SassInstruction) -> None:
    """Emit movmatrix."""
    result, value = ins.operands
    assert isinstance(result, Register)
    assert isinstance(value, Register)
    for register in result.registers():
        emit_transposed(e, register, source(e, value, "u32"), list(value.registers()))


_LAYOUTS = {"M88": "rows", "MT88": "columns", "MT168": "bytes"}


@op(r"STSM.(16.M88|16.MT88|8.MT168)(.[124])?", pure=False, taint="own", needs="warp", writes=())
def store_matrices(e: Emitter, ins: SassInstruction) -> None:
    """Emit stmatrix; MT88 and MT168 transpose."""
    values, poison = stored(e, ins)
    e.line(f"store_matrices(w, {own(e, ins, 0)}, {values}, {_LAYOUTS[ins.modifiers[1]]!r}, {poison})")


@op(r"FENCE.VIEW.ASYNC.[GS]", pure=False, taint="own", writes=())
def fence_proxy(e: Emitter, ins: SassInstruction) -> None:
    """Emit fence.proxy.async."""
    e.line("order_proxies(w)")
    e.line("order_barriers(w)")


@op(r"MEMBAR.ALL.(CTA|GPU|SYS)", pure=False, taint="own", writes=())
def fence_memory(e: Emitter, ins: SassInstruction) -> None:
    """Emit a memory fence. Between warps it orders nothing by itself."""
    e.line("order_barriers(w)")


@op(r"USETMAXREG.TRY_ALLOC.CTAPOOL", taint="own", pure=False, needs="warp")
def take_registers(e: Emitter, ins: SassInstruction) -> None:
    """Emit a request for registers, which always succeeds."""
    result = ins.operands[0]
    assert isinstance(result, Register)
    for register in result.registers() if e.tainted else ():
        e.line(f"{e.taint(register)}.fill(False)")
    assign(e, result, "pred", constant(e, "pred", 1))


ignored(r"USETMAXREG.DEALLOC.CTAPOOL", "moves registers between warps: no effect on values", needs="warp", writes=())


@op(r"CCTL.IVALL", pure=False, writes=())
def invalidate(e: Emitter, ins: SassInstruction) -> None:
    """Emit the second half of a wait until asynchronous stores are in memory; memory has no caches here."""
    e.line("finish_stores(w)")


@runtime
def finish_stores(w: Window) -> None:
    """Complete the groups of asynchronous stores whose sources the threads have waited for."""
    for lane in w.lanes if w.cta.bulk else ():
        groups = w.cta.bulk.get(int(lane))
        if groups is not None:
            waited = [all(copy.waited for copy in group) for group in groups.committed]
            groups.wait(len(waited) - (waited.index(False) if False in waited else len(waited)), 2)


ignored(r"ERRBAR", "orders error reports", writes=())
ignored(r"CGAERRBAR", "orders error reports", writes=())

"""Cluster launch control: a running cluster takes the work of one that has not started."""

from __future__ import annotations

import re

import numpy as np

from ..checks import smem_hazards
from ..findings import Fault
from ..frontend.ptx import Instruction, Operand, Vec
from ..state.barriers import Mbarrier
from ..state.cta import Cta
from ..state.registers import WARP
from ..state.window import Window
from ..units import copies
from .async_copies import TX, check_all, check_reach, lane_values
from .emitter import Emitter, Unsupported
from .memory_ops import store_loaded
from .table import op, registers_of, runtime

Match = re.Match[str]

RESPONSE_BYTES = 16
# The response, opaque to kernels: x, y | z << 16 of the cancelled cluster's first CTA, whether there is one in bit 0, and 0 (32 bits each).
# Read off the code of query_cancel, which ptxas writes out.


@op(
    rf"clusterlaunchcontrol.try_cancel.async.shared::cta{TX}(?P<multicast>.multicast::cluster::all)?.b128",
    writes=(), pure=False, taint="own",
)  # fmt: skip
def try_cancel(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a request for the next cluster that has not started. The response goes to shared memory (.multicast: of all CTAs)."""
    check_all(e, ins)
    response, barrier = ins.operands
    e.line(f"cancel_launch(w, {e.memory_address(response, 32)}, {e.memory_address(barrier, 32)}, {bool(m['multicast'])})")


@op(r"clusterlaunchcontrol.query_cancel.is_canceled.pred.b128", pure=False)
def is_canceled(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a test whether a response says that a cluster was cancelled."""
    _, upper = halves(ins.operands[1])
    e.line(f"{e.dst(ins.operands[0], 'pred')}[...] = launch_cancelled(w, {e.src(upper, 'u64')})")


@op(
    r"clusterlaunchcontrol.query_cancel.get_first_ctaid.(?P<all>v4).b32.b128",
    r"clusterlaunchcontrol.query_cancel.get_first_ctaid::(?P<axis>x|y|z).b32.b128",
    pure=False, taint="own", loads=True,
)  # fmt: skip
def first_ctaid(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit the first CTA of the cancelled cluster; undefined when there is none."""
    lower, upper = halves(ins.operands[1])
    items: tuple[Operand | None, ...] = (ins.operands[0],)
    if "all" in m.groupdict():
        if not isinstance(ins.operands[0], Vec) or len(ins.operands[0].items) != 4 or ins.operands[0].items[3] is not None:
            raise Unsupported("get_first_ctaid.v4 into something other than {x, y, z, _}")
        items = ins.operands[0].items[:3]
    axis = m.groupdict().get("axis")
    e.check_taint(registers_of(ins.operands[1]), "a first CTA")
    value = e.temp()
    e.line(f"{value} = cancelled_ctaid(w, {e.src(lower, 'u64')}, {e.src(upper, 'u64')}, {axis!r})")
    store_loaded(e, items, value, "b32")


def halves(response: Operand | None) -> tuple[Operand | None, Operand | None]:
    """Return the two 64-bit registers of a 128-bit operand."""
    if not isinstance(response, Vec) or len(response.items) != 2:
        raise Unsupported("a response that is not in a 128-bit register")
    return response.items[0], response.items[1]


# ---------------------------------------------------------------- runtime


@runtime
def cancel_launch(w: Window, response: np.ndarray, barrier: np.ndarray, multicast: bool, poisons: bool = False) -> None:
    """Execute clusterlaunchcontrol.try_cancel. poisons: the first CTA of a failed response is undefined in memory already."""
    cta = w.cta
    engine = w.engine
    for lane, (where, signal) in enumerate(zip(lane_values(w, response), lane_values(w, barrier), strict=True)):
        if where % RESPONSE_BYTES:
            raise Fault("misaligned", f"the response of a try_cancel at {where & 0xFFFFFF:#x}: must be a multiple of {RESPONSE_BYTES}")
        check_reach(cta, where, signal, False)
        if cta.saw_failed_cancel:
            raise Fault("undefined", "a try_cancel in a CTA that has seen an earlier one fail")
        offset = where & 0xFFFFFF
        targets = [cta.peer(rank) for rank in range(cta.cluster.size)] if multicast else [cta]
        barriers = [target.mbarrier(signal & 0xFFFFFF) for target in targets]

        def effect(offset: int = offset, targets: list[Cta] = targets, barriers: list[Mbarrier] = barriers) -> None:
            found = engine.cancel_cluster()
            x, y, z = (0, 0, 0) if found is None else found
            words = np.array([x, y | z << 16, found is not None, 0], np.uint32)
            for target in targets:
                target.smem.check(offset, offset + RESPONSE_BYTES, "the response of a try_cancel")
                target.smem.data[offset : offset + RESPONSE_BYTES] = words.view(np.uint8)
                target.smem.valid[offset : offset + RESPONSE_BYTES] = 1
                target.smem.valid[offset : offset + 8] = found is not None or not poisons
            for item in barriers:
                engine.complete_tx(item, RESPONSE_BYTES)

        warp = int(w.lanes[lane]) // WARP
        smem_hazards.check_copy(w, warp, targets, offset, offset + RESPONSE_BYTES)
        copies.issue(w, warp, effect, barriers, [(target, offset, offset + RESPONSE_BYTES) for target in targets])


@runtime
def launch_cancelled(w: Window, upper: np.ndarray) -> np.ndarray:
    """Return is_canceled; record in the CTA that it has seen a failure."""
    cancelled: np.ndarray = upper & np.uint64(1) != 0
    if not cancelled.all():
        w.cta.saw_failed_cancel = True
    return cancelled


@runtime
def cancelled_ctaid(w: Window, lower: np.ndarray, upper: np.ndarray, axis: str | None) -> np.ndarray:
    """Return x, y, z (or one of them) of the first CTA, shape (count, lanes). Leave poison in the CTA where nothing was cancelled."""
    low, high = (np.broadcast_to(half, (w.n,)) for half in (lower, upper))
    triple = {"x": low, "y": low >> np.uint64(32) & np.uint64(0xFFFF), "z": low >> np.uint64(48)}
    values = np.stack([triple[name].astype(np.uint32) for name in axis or "xyz"])
    failed = high & np.uint64(1) == 0
    w.cta.poison = np.broadcast_to(failed, values.shape) if failed.any() else None
    return values

"""TMA: boxes of a tensor map between global and shared memory, whole or gathered row by row, for one CTA, a pair or a cluster."""

from __future__ import annotations

import re

import numpy as np

from ..checks import global_order, races, smem_hazards
from ..findings import Fault
from ..frontend.ptx import Instruction, Mem, Operand
from ..numerics import tma
from ..state.async_work import CopyGroups, GroupedCopy
from ..state.barriers import Mbarrier
from ..state.cta import Cta
from ..state.registers import WARP
from ..state.window import Window
from ..units import copies
from ..units.boxes import box_store, load_box
from .async_copies import HINT, TX, add_grouped, check_all, check_reach, lane_values, reaches_cluster, targets_of
from .emitter import Emitter, Unsupported
from .table import ignored, op, runtime

Match = re.Match[str]

GROUP = r"((.cta_group::(1|(?P<pair>2)))?(.L2::cache_hint)?|.L2::cache_hint.cta_group::(1|(?P<pair_after_hint>2)))"  # either order
ROWS = 4  # of tile::gather4 and tile::scatter4


@op(
    rf"cp.async.bulk.tensor.[1-5]d.shared::cta.global(.tile)?{TX}{GROUP}",
    rf"cp.async.bulk.tensor.2d.shared::cta.global.tile::(?P<gather>gather4){TX}{GROUP}",
    rf"cp.async.bulk.tensor.[1-5]d.shared::(?P<cluster>cluster).global(.tile)?{TX}(?P<multicast>.multicast::cluster)?{GROUP}",
    rf"cp.async.bulk.tensor.2d.shared::(?P<cluster>cluster).global.tile::(?P<gather>gather4){TX}(?P<multicast>.multicast::cluster)?"
    rf"{GROUP}",
    writes=(), pure=False, taint="own",
)  # fmt: skip
def tensor_load(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a TMA load of a box or of four rows, optionally to several CTAs. With a pair, either CTA's mbarrier may be signalled."""
    check_all(e, ins)
    groups = m.groupdict()
    destination, source, barrier = ins.operands[:3]
    mask = e.src(ins.operands[3], "u16") if groups.get("multicast") else "None"
    form = e.constants.thing(Form(reaches_cluster(m), bool(groups["pair"] or groups["pair_after_hint"]), bool(groups.get("gather"))))
    e.line(
        f"tma_load(w, {e.memory_address(destination, 32)}, {e.memory_address(source, 64)}, {coordinates(e, ins, source)}, "
        f"{e.memory_address(barrier, 32)}, {mask}, {form})"
    )


@op(
    rf"cp.async.bulk.tensor.[1-5]d.global.shared::cta(.tile)?.bulk_group{HINT}",
    rf"cp.async.bulk.tensor.2d.global.shared::cta.tile::(?P<scatter>scatter4).bulk_group{HINT}",
    rf"cp.reduce.async.bulk.tensor.[1-5]d.global.shared::cta(?P<add>.add)(.tile)?.bulk_group{HINT}",
    writes=(), pure=False, taint="own",
)  # fmt: skip
def tensor_store(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a TMA store of a box or of four rows, or an addition of a box to global memory."""
    check_all(e, ins)
    target, source = ins.operands[:2]
    groups = m.groupdict()
    e.line(
        f"tma_store(w, {e.memory_address(target, 64)}, {coordinates(e, ins, target)}, {e.memory_address(source, 32)}, "
        f"{'add' in groups}, {'scatter' in groups})"
    )


ignored(r"cp.async.bulk.prefetch.tensor.[1-5]d.L2.global(.tile)?(.L2::cache_hint)?", "a hint: no effect on results")
ignored(r"cp.async.bulk.prefetch.tensor.2d.L2.global.tile::gather4(.L2::cache_hint)?", "a hint: no effect on results")


class Form:
    """Fixed properties of one load.

    cluster: the destination may lie in another CTA. pair: cta_group::2, the mbarrier may lie in the other CTA of the destination's pair.
    gather: four rows (column and four row numbers) instead of a box.
    """

    def __init__(self, cluster: bool, pair: bool, gather: bool) -> None:
        self.cluster = cluster
        self.pair = pair
        self.gather = gather


def coordinates(e: Emitter, ins: Instruction, mem: Operand | None) -> str:
    """Return the expression of the coordinates of a tensor operand: one for each dimension, or a column and four rows."""
    if not isinstance(mem, Mem) or mem.coords is None:
        raise Unsupported("tensor operand without coordinates")
    by_rows = "::gather4" in ins.opcode or "::scatter4" in ins.opcode
    if by_rows and len(mem.coords.items) != 1 + ROWS:
        raise Unsupported(f"{len(mem.coords.items)} coordinates for a column and {ROWS} rows")
    return f"({', '.join(e.src(item, 's32') for item in mem.coords.items)},)"


# ---------------------------------------------------------------- runtime


def place_boxes(plan: tma.BoxPlan, position: tuple[int, ...], offset: int, by_rows: bool) -> tuple[tma.Box, ...]:
    """Return the box at coordinates, or one for each row. Raises Fault for boxes that the tensor map does not allow."""
    try:
        return plan.place_rows(position[0], position[1:], offset) if by_rows else (plan.place(position, offset),)
    except ValueError as error:
        raise Fault("misaligned" if "multiple" in str(error) else "tensor_map", str(error)) from error


def span(boxes: tuple[tma.Box, ...]) -> tuple[int, int]:
    """Return the shared bytes that boxes touch together."""
    ranges = [box.smem_range for box in boxes]
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def signalled(cta: Cta, targets: list[Cta], signal: int, pair: bool) -> list[Mbarrier]:
    """Return the mbarrier of each destination: in the destination, or for a pair in the CTA with the parity of the operand's CTA."""
    offset = signal & 0xFFFFFF
    if not pair:
        return [target.mbarrier(offset) for target in targets]
    return [cta.peer(target.rank & ~1 | signal >> 24 & 1).mbarrier(offset) for target in targets]


@runtime
def tma_load(
    w: Window,
    destination: np.ndarray,
    tensor_map: np.ndarray,
    coords: tuple[np.ndarray, ...],
    barrier: np.ndarray,
    mask: np.ndarray | None,
    form: Form,
) -> None:
    """Execute cp.async.bulk.tensor to shared memory."""
    cta = w.cta
    engine, observer = w.engine, w.observer
    positions = list(zip(*(lane_values(w, coord) for coord in coords), strict=True))
    masks = lane_values(w, mask)
    for lane, (where, source, signal) in enumerate(
        zip(lane_values(w, destination), lane_values(w, tensor_map), lane_values(w, barrier), strict=True)
    ):
        boxes = place_boxes(w.engine.tensor_map(source), positions[lane], where & 0xFFFFFF, form.gather)
        check_reach(cta, where, signal, form.cluster, form.pair)
        targets = targets_of(cta, where, masks[lane] if mask is not None else None)
        barriers = signalled(cta, targets, signal, form.pair)
        warp = int(w.lanes[lane]) // WARP

        def effect(
            boxes: tuple[tma.Box, ...] = boxes, targets: list[Cta] = targets, barriers: list[Mbarrier] = barriers, warp: int = warp
        ) -> None:
            for target in targets:
                for box in boxes:
                    load_box(engine, box, target.smem)
                    if observer is not None:
                        observer.async_write(target, box, warp)
            nbytes = sum(box.nbytes for box in boxes)
            for item in barriers:
                engine.complete_tx(item, nbytes)

        low, high = span(boxes)
        global_order.check_grid(w, (warp,))
        smem_hazards.check_copy(w, warp, targets, low, high)
        copies.issue(w, warp, effect, barriers, [(target, low, high) for target in targets])


@runtime
def tma_store(w: Window, tensor_map: np.ndarray, coords: tuple[np.ndarray, ...], source: np.ndarray, add: bool, scatter: bool) -> None:
    """Execute cp.async.bulk.tensor to global memory.

    Lanes that store the same box share one copy, since the hardware issues it once per warp; additions count once per lane.
    """
    cta = w.cta
    positions = list(zip(*(lane_values(w, coord) for coord in coords), strict=True))
    issued: dict[tuple[object, ...], list[GroupedCopy]] = {}
    for lane, (target, where) in enumerate(zip(lane_values(w, tensor_map), lane_values(w, source), strict=True)):
        key = (w.lanes[lane] // WARP, target, where, positions[lane], lane if add else None)
        owner = int(w.lanes[lane])
        if key in issued:
            cta.bulk.setdefault(owner, CopyGroups()).open.extend(issued[key])
            continue
        issued[key] = []
        global_order.check_grid(w, (owner // WARP,))
        for box in place_boxes(w.engine.tensor_map(target), positions[lane], where & 0xFFFFFF, scatter):
            copy = box_store(w.engine, cta, box, w.origin(), add)
            issued[key].append(copy)
            races.check_range(w, copy.source, "a TMA store", owner // WARP)
            add_grouped(w.engine, cta.bulk, owner, copy)
            cta.reading.append(copy)

"""Asynchronous copies without a tensor map: bulk copies, cp.async, st.async."""

from __future__ import annotations

import re
from functools import partial

import numpy as np

from ..checks import global_order, order, phases, races, smem_hazards
from ..findings import Fault
from ..frontend.ptx import Imm, Instruction
from ..state.access import shared_pattern
from ..state.async_work import CopyGroups, GroupedCopy, PendingCopy
from ..state.barriers import Mbarrier
from ..state.cta import Cta
from ..state.engine_protocol import Engine
from ..state.origin import Origin
from ..state.registers import WARP
from ..state.window import Window
from ..units import copies
from ..units.lane_copies import LaneCopies
from .emitter import Emitter, Unsupported
from .memory_ops import lanes_of, vector_items
from .table import ignored, op, registers_of, runtime

Match = re.Match[str]

HINT = r"(?P<hint>.L2::cache_hint)?"
VECTOR = r"(.(?P<v>v2|v4))?.(?P<t>[bus](32|64)|f32)"
TX = r".mbarrier::complete_tx::bytes"
INTO_CTA = rf"shared::cta.global{TX}(?P<multicast>)"
INTO_CLUSTER = rf"shared::(?P<cluster>cluster).global{TX}(?P<multicast>.multicast::cluster)?"


def check_all(e: Emitter, ins: Instruction) -> None:
    """Emit checks that no operand of an asynchronous copy is poisoned."""
    e.check_taint([register for operand in ins.operands for register in registers_of(operand)], "an asynchronous copy")


def reaches_cluster(m: Match) -> bool:
    """Return whether the destination may lie in another CTA."""
    return bool(m.groupdict().get("cluster"))


@op(rf"cp.async.bulk.{INTO_CTA}{HINT}", rf"cp.async.bulk.{INTO_CLUSTER}{HINT}", writes=(), pure=False, taint="own")
def bulk_load(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a copy of contiguous bytes from global to shared memory."""
    check_all(e, ins)
    d, s, size, barrier = ins.operands[:4]
    mask = e.src(ins.operands[4], "u16") if m["multicast"] else "None"
    e.line(
        f"bulk_to_shared(w, {e.memory_address(d, 32)}, {e.memory_address(s, 64)}, {e.src(size, 'u32')}, "
        f"{e.memory_address(barrier, 32)}, {mask}, False, {reaches_cluster(m)})"
    )


@op(rf"cp.async.bulk.shared::cluster.shared::cta{TX}", writes=(), pure=False, taint="own")
def bulk_peer(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a copy of contiguous bytes from the CTA's shared memory to that of a CTA of the cluster."""
    check_all(e, ins)
    d, s, size, barrier = ins.operands[:4]
    e.line(
        f"bulk_to_shared(w, {e.memory_address(d, 32)}, {e.memory_address(s, 32)}, {e.src(size, 'u32')}, "
        f"{e.memory_address(barrier, 32)}, None, True, True)"
    )


@op(rf"cp.async.bulk.global.shared::cta.bulk_group{HINT}", writes=(), pure=False, taint="own")
def bulk_store(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a copy of contiguous bytes from shared to global memory."""
    check_all(e, ins)
    d, s, size = ins.operands[:3]
    e.line(f"bulk_to_global(w, {e.memory_address(d, 64)}, {e.memory_address(s, 32)}, {e.src(size, 'u32')})")


@op(r"cp.async.bulk.commit_group", writes=(), pure=False)
def bulk_commit(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit the end of the thread's bulk group."""
    e.line("bulk_commit_group(w)")


@op(r"cp.async.bulk.wait_group(?P<r>.read)?", writes=(), pure=False, starts=True)
def bulk_wait(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a wait for all but the newest n bulk groups."""
    count = ins.operands[0]
    if not isinstance(count, Imm):
        raise Unsupported("wait_group without a literal")
    e.line(f"bulk_wait_group(w, {int(count.value)}, {1 if m['r'] else 2})")


ignored(r"cp.async.bulk.prefetch.L2.global(.L2::cache_hint)?", "a hint: no effect on results")


@op(r"cp.async.(?P<c>ca|cg).shared(::cta)?.global(.L2::(64|128|256)B)?", writes=(), pure=False, taint="own")
def copy_async(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a copy of 4, 8 or 16 bytes per thread. Bytes beyond src-size are zeros."""
    check_all(e, ins)
    size = ins.operands[2]
    if not isinstance(size, Imm) or int(size.value) not in ((16,) if m["c"] == "cg" else (4, 8, 16)):
        raise Unsupported("cp.async operands: cg copies 16 bytes, ca 4, 8 or 16")
    given = ins.operands[3] if len(ins.operands) > 3 else None
    if given is not None and getattr(given, "bank", "r") == "p":
        raise Unsupported("cp.async with ignore-src")
    source_size = "None" if given is None else e.src(given, "u32")
    d, s = e.memory_address(ins.operands[0], 32), e.memory_address(ins.operands[1], 64)
    e.line(f"cp_async(w, {d}, {s}, {int(size.value)}, {source_size})")


@op(r"cp.async.commit_group", writes=(), pure=False)
def copy_commit(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit the end of the warp's cp.async group."""
    e.line("cp_async_commit(w)")


@op(r"cp.async.wait_group", r"cp.async.wait_all", writes=(), pure=False, starts=True)
def copy_wait(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a wait for all but the newest n groups (wait_all: for everything)."""
    if ins.opcode.endswith("wait_all"):
        e.line("cp_async_wait(w, 0, True)")
        return
    count = ins.operands[0]
    if not isinstance(count, Imm):
        raise Unsupported("wait_group without a literal")
    e.line(f"cp_async_wait(w, {int(count.value)}, False)")


@op(r"cp.async.mbarrier.arrive(?P<n>.noinc)?.shared(::cta)?.b64", writes=(), pure=False, taint="own")
def copy_arrive(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit an arrival that happens when the thread's earlier cp.async copies are complete."""
    check_all(e, ins)
    e.line(f"cp_async_arrive(w, {e.memory_address(ins.operands[0], 32)}, {bool(m['n'])})")


@op(rf"st.async(.weak)?.shared::cluster{TX}{VECTOR}", writes=(), pure=False, taint="own")
def store_async(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a store of registers to a CTA of the cluster, with complete_tx."""
    check_all(e, ins)
    values = ", ".join(e.src(item, f"u{m['t'][1:]}") for item in vector_items(ins.operands[1], m))
    e.line(f"st_async(w, {e.memory_address(ins.operands[0], 32)}, [{values}], {e.memory_address(ins.operands[2], 32)})")


# ---------------------------------------------------------------- runtime


def lane_values(w: Window, value: np.ndarray | None) -> list[int]:
    """Return one Python int per lane."""
    if value is None:
        return [0] * w.n
    return [int(value)] * w.n if value.ndim == 0 else [int(item) for item in value]


def targets_of(cta: Cta, address: int, mask: int | None) -> list[Cta]:
    """Return the CTAs that a copy writes to: the CTA of the address, or the CTAs of a multicast mask. Raises Fault for a bad mask."""
    if mask is None:
        return [cta.peer(address >> 24)]
    if not mask or mask >> cta.cluster.size:
        raise Fault("multicast", f"multicast mask {mask:#x} in a cluster of {cta.cluster.size}")
    return [cta.peer(rank) for rank in range(cta.cluster.size) if mask >> rank & 1]


def check_reach(cta: Cta, where: int, signal: int, cluster: bool, pair: bool = False) -> None:
    """Raise Fault for a destination that the instruction may not reach, or a barrier in another CTA than the destination.

    pair: the barrier may also lie in the other CTA of the destination's pair (cta_group::2).
    """
    if where >> 24 != cta.rank and not cluster:
        raise Fault("out_of_bounds", f"a destination in CTA {where >> 24} of the cluster for a copy to .shared::cta memory")
    if where >> 24 != signal >> 24 and not (pair and where >> 25 == signal >> 25):
        raise Fault("out_of_bounds", f"a destination in CTA {where >> 24} of the cluster with an mbarrier in CTA {signal >> 24}")


def add_grouped(engine: Engine, groups: dict[int, CopyGroups], owner: int, copy: GroupedCopy) -> None:
    """Put a copy into the open group of its thread or warp."""
    groups.setdefault(owner, CopyGroups()).open.append(copy)
    copy.advance(engine.grouped_stage())


@runtime
def bulk_to_shared(
    w: Window,
    destination: np.ndarray,
    source: np.ndarray,
    size: np.ndarray,
    barrier: np.ndarray,
    mask: np.ndarray | None,
    peer: bool,
    cluster: bool,
) -> None:
    """Execute cp.async.bulk to shared memory, from global or shared memory."""
    cta = w.cta
    engine = w.engine
    masks = lane_values(w, mask)
    rows = zip(lane_values(w, destination), lane_values(w, source), lane_values(w, size), lane_values(w, barrier), strict=True)
    for lane, (where, start, nbytes, signal) in enumerate(rows):
        if (where | start | nbytes) & 15:
            raise Fault("misaligned", f"bulk copy of {nbytes} bytes from {start:#x} to {where:#x}: all must be multiples of 16")
        check_reach(cta, where, signal, cluster)
        targets = targets_of(cta, where, masks[lane] if mask is not None else None)
        barriers = [target.mbarrier(signal & 0xFFFFFF) for target in targets]
        offset = where & 0xFFFFFF

        def effect(
            start: int = start,
            nbytes: int = nbytes,
            offset: int = offset,
            targets: list[Cta] = targets,
            barriers: list[Mbarrier] = barriers,
        ) -> None:
            data, valid = read_bulk(engine, cta, start, nbytes, peer)
            for target in targets:
                target.smem.check(offset, offset + nbytes, "bulk write")
                target.smem.data[offset : offset + nbytes] = data
                target.smem.valid[offset : offset + nbytes] = valid
            for item in barriers:
                engine.complete_tx(item, nbytes)

        if not peer:
            global_order.check_grid(w, (int(w.lanes[lane]) // WARP,))
        else:
            races.check_range(w, (start & 0xFFFFFF, (start & 0xFFFFFF) + nbytes), "a bulk copy", int(w.lanes[lane]) // WARP)
        smem_hazards.check_copy(w, int(w.lanes[lane]) // WARP, targets, offset, offset + nbytes)
        warp = int(w.lanes[lane]) // WARP
        numbers = copies.issue(w, warp, effect, barriers, [(target, offset, offset + nbytes) for target in targets])
        if peer:
            cta.outgoing[start & 0xFFFFFF, (start & 0xFFFFFF) + nbytes] = (*numbers[0], w.origin())


def read_bulk(engine: Engine, cta: Cta, start: int, nbytes: int, shared: bool) -> tuple[np.ndarray, np.ndarray | int]:
    """Return bytes of shared or global memory, and their shadow (1 where written)."""
    if shared:
        offset = start & 0xFFFFFF
        source = cta.peer(start >> 24).smem
        source.check(offset, offset + nbytes, "bulk read")
        return source.data[offset : offset + nbytes], source.valid[offset : offset + nbytes]
    buffer = engine.memory.require(start, start + nbytes, False)
    offset = start - buffer.address
    return buffer.data[offset : offset + nbytes], 1 if buffer.valid is None else buffer.valid[offset : offset + nbytes]


@runtime
def bulk_to_global(w: Window, destination: np.ndarray, source: np.ndarray, size: np.ndarray) -> None:
    """Execute cp.async.bulk to global memory."""
    cta = w.cta
    engine = w.engine
    rows = zip(lane_values(w, destination), lane_values(w, source), lane_values(w, size), strict=True)
    for lane, (target, start, nbytes) in enumerate(rows):
        if (target | start | nbytes) & 15:
            raise Fault("misaligned", f"bulk copy of {nbytes} bytes from {start:#x} to {target:#x}: all must be multiples of 16")
        origin = w.origin()
        held: list[np.ndarray] = []

        def read(start: int = start, nbytes: int = nbytes, held: list[np.ndarray] = held, origin: Origin = origin) -> None:
            data, valid = read_bulk(engine, cta, start, nbytes, True)
            held.append(data.copy())
            if not np.all(valid):
                engine.report(origin, "poison", "a bulk store writes undefined bytes of shared memory to global memory")

        def write(target: int = target, nbytes: int = nbytes, held: list[np.ndarray] = held) -> None:
            buffer = engine.memory.require(target, target + nbytes, True)
            offset = target - buffer.address
            buffer.data[offset : offset + nbytes] = held[0]
            if buffer.valid is not None:
                buffer.valid[offset : offset + nbytes] = 1
            engine.note_progress()

        offset = start & 0xFFFFFF
        copy = GroupedCopy(read, write, origin, (offset, offset + nbytes))
        global_order.check_grid(w, (int(w.lanes[lane]) // WARP,))
        races.check_range(w, copy.source, "a bulk store", int(w.lanes[lane]) // WARP)
        add_grouped(w.engine, cta.bulk, int(w.lanes[lane]), copy)
        cta.reading.append(copy)


@runtime
def bulk_commit_group(w: Window) -> None:
    """Execute cp.async.bulk.commit_group."""
    bulk = w.cta.bulk
    for lane in w.lanes:
        groups = bulk.get(int(lane))
        if groups is not None:
            groups.commit()


@runtime
def bulk_wait_group(w: Window, remaining: int, stage: int) -> None:
    """Execute cp.async.bulk.wait_group: wait for all committed groups of a thread but the newest."""
    cta = w.cta
    if not cta.bulk:
        return
    for lane in w.lanes:
        groups = cta.bulk.get(int(lane))
        if groups is not None:
            warp = int(lane) // WARP
            clocks = cta.cluster.clocks
            row = clocks.row(cta.rank, warp)
            for copy in groups.wait(remaining, stage):
                low, high = copy.source
                cta.trace.note_read(warp, slice(low // 4, -(-high // 4)), int(clocks.now[row, row]) + 1)


# ---------------------------------------------------------------- cp.async


def warps_of(w: Window) -> list[tuple[int, np.ndarray]]:
    """Return the warps of a window with the positions of their lanes."""
    return [(number, np.flatnonzero(w.lane_warps == number)) for number in w.warps]


@runtime
def cp_async(w: Window, destination: np.ndarray, source: np.ndarray, size: int, source_size: np.ndarray | None) -> None:
    """Execute cp.async."""
    cta = w.cta
    memory = w.engine.memory
    pattern = shared_pattern(lanes_of(w, destination))
    offsets = pattern.offsets
    addresses = lanes_of(w, source).copy()
    counts = np.full(w.n, size) if source_size is None else np.broadcast_to(source_size, (w.n,)).astype(np.int64)
    if (counts > size).any():
        raise Fault("out_of_bounds", f"cp.async of {size} bytes with a source size of {int(counts.max())}")
    if (offsets % size).any() or (addresses[counts > 0] % np.uint64(size)).any():
        raise Fault("misaligned", f"cp.async of {size} bytes")
    if (counts > 0).any():
        global_order.check_grid(w, w.warps)
    races.copy_async(w, pattern, size)
    smem_hazards.check_store(w, w.lane_warps, cta, pattern, size, "a cp.async")
    for warp, index in warps_of(w):
        copies = LaneCopies(memory, addresses[index], counts[index], pattern.part(index), size)
        number = int(cta.cluster.clocks.issued[cp_async_agent(cta, warp)])
        write = partial(copies.write, cta.smem)
        copy = GroupedCopy(copies.read, write, w.origin(), serial=number)
        add_grouped(w.engine, cta.copies, warp, copy)
        if copy.stage < 2:
            cta.copies[warp].late.append(copy)


def cp_async_agent(cta: Cta, warp: int) -> int:
    """Return the column of a warp's cp.async copies in the clocks."""
    clocks = cta.cluster.clocks
    return clocks.own_copier(clocks.row(cta.rank, warp))


@runtime
def cp_async_commit(w: Window) -> None:
    """Execute cp.async.commit_group."""
    for warp in w.warps:
        w.cta.copies.setdefault(warp, CopyGroups()).commit()


@runtime
def cp_async_wait(w: Window, remaining: int, everything: bool) -> None:
    """Execute cp.async.wait_group and wait_all."""
    for warp in w.warps:
        groups = w.cta.copies.get(warp)
        if groups is None:
            continue
        if everything:
            groups.commit()
        for copy in groups.wait(remaining, 2):
            w.cta.cluster.clocks.note(w.cta.rank, (warp,), cp_async_agent(w.cta, warp), copy.serial)


@runtime
def cp_async_arrive(w: Window, address: np.ndarray, noinc: bool) -> None:
    """Execute cp.async.mbarrier.arrive: each lane arrives once its earlier copies are complete."""
    cta = w.cta
    engine = w.engine
    offsets = lanes_of(w, address) & np.uint32(0xFFFFFF)
    for warp, index in warps_of(w):
        earlier = cta.copies.get(warp, CopyGroups()).unstored()
        for offset in np.unique(offsets[index]):
            barrier = cta.mbarrier(int(offset))
            lanes = int(np.count_nonzero(offsets[index] == offset))
            if not noinc:
                barrier.add_pending(lanes)

            def effect(earlier: list[GroupedCopy] = earlier, barrier: Mbarrier = barrier, lanes: int = lanes) -> None:
                for copy in earlier:
                    copy.advance(2)
                engine.arrive(barrier, lanes)

            order.arrive_behind_copies(cta, warp, barrier)
            phases.check_use(w, (warp,), barrier, False)
            engine.begin(PendingCopy(effect, w.origin(), [barrier]))


@runtime
def st_async(w: Window, address: np.ndarray, values: list[np.ndarray], barrier: np.ndarray) -> None:
    """Execute st.async."""
    cta = w.cta
    engine = w.engine
    nbytes = values[0].dtype.itemsize * len(values)
    lanes = [np.broadcast_to(value, (w.n,)).copy() for value in values]
    for lane, (where, signal) in enumerate(zip(lane_values(w, address), lane_values(w, barrier), strict=True)):
        check_reach(cta, where, signal, True)
        target, item = cta.peer(where >> 24), cta.peer(signal >> 24).mbarrier(signal & 0xFFFFFF)

        def effect(lane: int = lane, where: int = where, target: Cta = target, item: Mbarrier = item) -> None:
            target.smem.store(shared_pattern(np.array([where], np.uint32)), [value[lane : lane + 1] for value in lanes])
            engine.complete_tx(item, nbytes)

        offset = where & 0xFFFFFF
        smem_hazards.check_copy(w, int(w.lanes[lane]) // WARP, [target], offset, offset + nbytes)
        copies.issue(w, int(w.lanes[lane]) // WARP, effect, [item], [(target, offset, offset + nbytes)])


@op(r"mapa.shared::cluster.(?P<t>u32|u64)", r"mapa.(?P<t>u64)")
def map_address(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit the address of the same shared variable in another CTA of the cluster."""
    kind = m["t"]
    a, rank = e.src(ins.operands[1], kind), e.src(ins.operands[2], "u32")
    cast = "" if kind == "u32" else f".astype({e.constants.thing(np.dtype('u8'))})"
    clear = e.constants.array(np.dtype(f"u{int(kind[1:]) // 8}"), ~0xFF000000)
    shift = e.constants.array(np.dtype(f"u{int(kind[1:]) // 8}"), 24)
    e.line(f"{e.dst(ins.operands[0], kind)}[...] = ({a} & {clear}) | ({rank}{cast} << {shift})")

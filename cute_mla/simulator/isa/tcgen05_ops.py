"""tcgen05: allocation, products, copies, commits and fences. units/tensor_core.py executes the work."""

from __future__ import annotations

import re

import numpy as np

from ..checks import order, phases, races, smem_hazards, tensor_hazards
from ..findings import Fault
from ..frontend.ptx import Imm, Instruction, Mem, Operand, Reg, Vec
from ..numerics import tcgen05 as forms
from ..state.cta import Cta
from ..state.registers import WARP
from ..state.tensor_memory import TensorMemory, split_address
from ..state.tensor_queue import Cells
from ..state.window import Window
from ..units import shared_to_tensor, tensor_core
from ..units.tensor_products import MmaChain
from .async_copies import lane_values, targets_of
from .emitter import Emitter, Unsupported
from .memory_ops import place_shared
from .table import op, registers_of, runtime

Match = re.Match[str]

GROUP = r"cta_group::(?P<group>[12])"


def checked(e: Emitter, ins: Instruction, what: str) -> None:
    """Emit checks that no operand is poisoned."""
    e.check_taint([register for operand in ins.operands for register in registers_of(operand)], what)


# ---------------------------------------------------------------- allocation


@op(
    rf"tcgen05.alloc.{GROUP}.sync.aligned(.shared(::cta)?)?.b32",
    writes=(), pure=False, taint="own", needs="warp", starts=True, ends=True,
)  # fmt: skip
def alloc(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit an allocation of columns, whose address goes to shared memory; it blocks until there is room."""
    checked(e, ins, "a tensor memory allocation")
    if ".shared" not in ins.opcode:
        raise Unsupported("tcgen05.alloc with a generic address")
    e.line(
        f"if not tensor_alloc(w, {e.memory_address(ins.operands[0], 32)}, {e.src(ins.operands[1], 'u32')}, {m['group']}): return BLOCKED"
    )


@op(
    rf"tcgen05.dealloc.{GROUP}.sync.aligned.b32",
    writes=(), pure=False, taint="own", needs="warp", starts=True, ends=True,
)  # fmt: skip
def dealloc(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit the end of an allocation."""
    checked(e, ins, "a tensor memory deallocation")
    operands = f"{e.src(ins.operands[0], 'u32')}, {e.src(ins.operands[1], 'u32')}"
    e.line(f"if not tensor_dealloc(w, {operands}, {m['group']}): return BLOCKED")


@op(rf"tcgen05.relinquish_alloc_permit.{GROUP}.sync.aligned", writes=(), pure=False, needs="warp")
def relinquish(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit the end of the permission to allocate."""
    e.line(f"tensor_relinquish(w, {m['group']})")


def same(w: Window, value: np.ndarray, what: str) -> int:
    """Return the value that all lanes agree on. Raises Fault where lanes differ."""
    first = int(value) if value.ndim == 0 else int(value[0])
    if value.ndim and bool((value != value[0]).any()):
        raise Fault("divergence", f"{what} differs between the lanes of a warp")
    return first


@runtime
def tensor_alloc(w: Window, destination: np.ndarray, columns: np.ndarray, group: int) -> bool:
    """Execute tcgen05.alloc. Return False when blocked until something is freed, or until the peer CTA allocates too."""
    cta = w.cta
    if w.engine.must_separate(w.lanes // WARP):
        return False
    memory = cta.tensor_memory()
    memory.use_group(group)
    count = same(w, columns, "the size of an allocation")
    memory.check_size(count)
    start = memory.room(count) if group == 1 else allocate_together(w, memory, count)
    if start is None:
        w.engine.block([memory])
        return False
    if group == 1:
        memory.allocate(start, count)
    order.wait(cta, w.warps, memory)
    (target, _, pattern), *_ = place_shared(w, destination, False)
    first = pattern.part(slice(0, 1))
    smem_hazards.check_store(w, np.array(w.warps[:1]), target, first, 4)
    overwrite = races.access(w, target, np.array([0]), first, 4, True)
    target.smem.store(first, [np.array([start], np.uint32)])
    if overwrite is not None:
        overwrite.check(w)
    if w.observer is not None:
        w.observer.shared_access(w, target, np.array([0]), first.offsets, 4, True)
    return True


def allocate_together(w: Window, memory: TensorMemory, columns: int) -> int | None:
    """Allocate for a CTA pair. Return the first column, None while the peer has not come or there is no room."""
    if memory.granted is not None:
        start, memory.granted = memory.granted, None
        return start
    other = pair_of(w.cta)[1 - (w.cta.rank & 1)].tensor_memory()
    memory.requested = columns
    if other.requested is None:
        return None
    if other.requested != columns:
        raise Fault("tensor_memory", f"with cta_group::2 this CTA allocates {columns} columns where its peer allocates {other.requested}")
    first = memory.room(columns)
    if first is None or other.room(columns) != first:
        return None
    memory.allocate(first, columns)
    other.allocate(first, columns)
    memory.requested = other.requested = None
    other.granted = first
    w.engine.wake(other)
    return first


def pair_of(cta: Cta) -> tuple[Cta, Cta]:
    """Return the pair of a CTA, the even one first. Raises Fault when there is none, or one has exited."""
    if cta.cluster.size % 2:
        raise Fault("tensor_memory", f"cta_group::2 in a cluster of {cta.cluster.size}")
    first = cta.rank & ~1
    return cta.peer(first), cta.peer(first + 1)


@runtime
def tensor_dealloc(w: Window, address: np.ndarray, columns: np.ndarray, group: int) -> bool:
    """Execute tcgen05.dealloc. Return False when it runs again, warp by warp."""
    cta = w.cta
    if w.engine.must_separate(w.lanes // WARP):
        return False
    memory = cta.tensor_memory()
    memory.use_group(group)
    where, count = same(w, address, "a tensor memory address"), same(w, columns, "the size of an allocation")
    _, column = split_address(where)
    memory.release(where, count)
    tensor_hazards.check_release(w, Cells(cta.rank, 0xFF, column, column + count))
    order.arrive(cta, w.warps, memory)
    memory.knowledge.complete()
    w.engine.wake(memory)
    if group == 2:
        if cta.cluster.size % 2:
            raise Fault("tensor_memory", f"cta_group::2 in a cluster of {cta.cluster.size}")
        memory.freed.append((column, count))
        peer = cta.cluster.ctas[cta.rank ^ 1].tensor
        for mine, theirs in zip(memory.freed, [] if peer is None else peer.freed, strict=False):
            if mine != theirs:
                message = f"with cta_group::2 this CTA frees {mine[1]} columns at {mine[0]} where its peer frees {theirs[1]} at {theirs[0]}"
                raise Fault("tensor_memory", message)
        if peer is not None:
            w.engine.wake(peer)
    return True


@runtime
def tensor_relinquish(w: Window, group: int) -> None:
    """Execute tcgen05.relinquish_alloc_permit."""
    memory = w.cta.tensor_memory()
    memory.use_group(group)
    memory.relinquished = True


# ---------------------------------------------------------------- products


@op(r"tcgen05.mma[\w:.]+", writes=(), pure=False, taint="own")
def mma(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a product D = A B (+ D) in tensor memory."""
    try:
        form = forms.parse_opcode(ins.opcode)
    except ValueError as error:
        raise Unsupported(str(error)) from error
    checked(e, ins, "a matrix product")
    d, a, b, descriptor, *rest = ins.operands
    mask = "None"
    if rest and isinstance(rest[0], Vec):
        if form.ws or len(rest[0].items) != 4 * form.group:
            raise Unsupported(f"disable-output-lane of {len(rest[0].items)} words")
        mask = f"[{', '.join(e.src(item, 'u32') for item in rest[0].items)}]"
        rest = rest[1:]
    if not rest:
        raise Unsupported("no enable-input-d")
    enable, scale = predicate(e, rest[0]), 0
    columns = "None"
    if len(rest) > 1 and form.ws:
        columns = e.src(rest[1], "u64")
    elif len(rest) > 1:
        if not isinstance(rest[1], Imm) or not 0 <= int(rest[1].value) <= 15 or form.kind not in ("f16", "tf32"):
            raise Unsupported("scale-input-d: a literal from 0 to 15, for kind f16 and tf32")
        scale = int(rest[1].value)
    in_tensor = isinstance(a, Mem)
    first = e.memory_address(a, 32) if in_tensor else e.src(a, "u64")
    step = e.constants.thing(Step(form, in_tensor, scale, forms.parse_collector(ins.opcode)))
    operands = f"({e.memory_address(d, 32)}, {first}, {e.src(b, 'u64')}, {e.src(descriptor, 'u32')})"
    e.line(f"tensor_mma(w, {step}, {operands}, {mask}, {enable}, {columns})")


class Step:
    """Fixed properties of one tcgen05.mma instruction. in_tensor: A lies in tensor memory. scale: scale-input-d."""

    def __init__(self, form: forms.MmaForm, in_tensor: bool, scale: int, collector: forms.CollectorUse) -> None:
        self.collector = collector
        self.form = form
        self.in_tensor = in_tensor
        self.scale = scale


def predicate(e: Emitter, operand: Operand | None) -> str:
    """Return the expression of enable-input-d."""
    if isinstance(operand, Imm):
        return e.constants.array(np.dtype(bool), int(bool(operand.value)))
    if isinstance(operand, Reg) and operand.bank == "p":
        return e.row(operand, "pred")
    raise Unsupported(f"enable-input-d {operand}")


def lane_of(value: np.ndarray, lane: int) -> int:
    """Return the value of one lane."""
    return int(value) if value.ndim == 0 else int(value[lane])


@runtime
def tensor_mma(
    w: Window,
    step: Step,
    operands: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    mask: list[np.ndarray] | None,
    enable: np.ndarray,
    columns: np.ndarray | None,
) -> None:
    """Queue one product per lane. operands: D's address, A's descriptor or address, B's descriptor, the instruction descriptor."""
    d, a, b, descriptor = operands
    cta = w.cta
    form = step.form
    for lane in range(w.n):
        if columns is not None and lane_of(columns, lane):
            raise Fault("unsupported", "a zero-column mask of tcgen05.mma.ws")
        ctas = pair_of(cta) if form.group == 2 else (cta,)
        words = [0] * 4 * form.group if mask is None else [lane_of(word, lane) for word in mask]
        lanes = tuple(sum(word << 32 * i for i, word in enumerate(words[start : start + 4])) for start in range(0, len(words), 4))
        try:
            product = forms.decode_instruction(form, lane_of(descriptor, lane))
            chain = MmaChain(
                form, product, ctas, lane_of(d, lane), bool(lane_of(enable, lane)), step.scale, lanes, step.in_tensor,
                w.origin(), int(w.lanes[lane]), [lane_of(a, lane)], [lane_of(b, lane)],
            )  # fmt: skip
            check_chain(w, chain)
            check_collector(w, step, chain)
        except ValueError as error:
            raise Fault("descriptor", str(error)) from error
        tensor_core.issue(w.engine, cta, chain)


def check_collector(w: Window, step: Step, chain: MmaChain) -> None:
    """Report a use of the collector that has not been filled with the operand of this product, and record what it holds afterwards."""
    buffer, usage = step.collector
    held = w.cta.tensor_core().collector
    product = chain.product
    if buffer == "a":
        operand: object = (chain.form, step.in_tensor, chain.a[0], product.m, product.a, product.a_mn)
    else:
        operand = (chain.form, chain.b[0], product.n, product.b, product.b_mn)
    if usage in ("use", "lastuse") and held.get(buffer) != operand:
        what = "nothing" if held.get(buffer) is None else "another operand"
        w.report("collector", f"{chain.what} with collector::{buffer}::{usage}, but the collector holds {what}: no valid fill before")
    held[buffer] = operand if usage in ("fill", "use") else None


def check_chain(w: Window, chain: MmaChain) -> None:
    """Check a product when it is issued: shapes, allocations, hazards. Raises Fault or ValueError for one that cannot be done."""
    form, product = chain.form, chain.product
    lane, column = split_address(chain.d)
    forms.slabs(form, product.m, product.n, lane)
    chain.operand_b()
    if not chain.from_tensor_memory:
        chain.operand_a()
    elif product.a_mn:
        raise ValueError("A in tensor memory cannot be MN-major")
    elif split_address(chain.a[0])[0] != lane:
        raise ValueError(f"A begins at lane {split_address(chain.a[0])[0]}, D at lane {lane}")
    for cta in chain.ctas:
        memory = cta.tensor_memory()
        memory.use_group(form.group)
        memory.require(column, column + forms.footprint(form, product), "D")
        if chain.from_tensor_memory:
            first = split_address(chain.a[0])[1]
            memory.require(first, first + forms.STEP_COLUMNS, "A")
    written = [] if w.cta.tensor_core().open_chain(chain) is not None else chain.written()
    warp = chain.thread // WARP
    tensor_hazards.check_work(w, warp, chain.read(), written, chain.what)
    for cta in chain.ctas:
        for where in (chain.operand_b(),) if chain.from_tensor_memory else (chain.operand_b(), chain.operand_a()):
            races.check_source(w, cta, races.operand_words(where), chain.what, warp)


# ---------------------------------------------------------------- copies


@op(r"tcgen05.cp.[\w:.]+", writes=(), pure=False, taint="own")
def copy(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a copy of shared memory to tensor memory."""
    try:
        form = shared_to_tensor.parse_opcode(ins.opcode)
    except ValueError as error:
        raise Unsupported(str(error)) from error
    checked(e, ins, "a copy to tensor memory")
    e.line(f"tensor_copy(w, {e.constants.thing(form)}, {e.memory_address(ins.operands[0], 32)}, {e.src(ins.operands[1], 'u64')})")


@runtime
def tensor_copy(w: Window, form: shared_to_tensor.CopyForm, address: np.ndarray, descriptor: np.ndarray) -> None:
    """Queue one copy per lane."""
    cta = w.cta
    for lane in range(w.n):
        ctas = pair_of(cta) if form.group == 2 else (cta,)
        work = shared_to_tensor.SharedToTensor(
            form, ctas, lane_of(address, lane), lane_of(descriptor, lane), w.origin(), int(w.lanes[lane])
        )
        try:
            work.operand()
            written = work.written()
        except ValueError as error:
            raise Fault("descriptor", str(error)) from error
        for cells in written:
            memory = cta.cluster.ctas[cells.rank].tensor_memory()
            memory.use_group(form.group)
            memory.require(cells.low, cells.high, "tcgen05.cp")
        warp = work.thread // WARP
        tensor_hazards.check_work(w, warp, [], written, work.what)
        for owner in ctas:
            races.check_source(w, owner, races.operand_words(work.operand()), work.what, warp)
        tensor_core.issue(w.engine, cta, work)


# ---------------------------------------------------------------- commits and fences


@op(
    rf"tcgen05.commit.{GROUP}(.sync.aligned)?.mbarrier::arrive::one(.shared::cluster)?(?P<multicast>.multicast::cluster)?.b64",
    writes=(), pure=False, taint="own",
)  # fmt: skip
def commit(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit an arrival that happens when all earlier work of the thread is done."""
    if ".sync" in ins.opcode or "shared" not in ins.opcode:
        raise Unsupported("tcgen05.commit only on .shared::cluster")
    checked(e, ins, "a tensor core commit")
    mask = e.src(ins.operands[1], "u16") if m["multicast"] else "None"
    e.line(f"tensor_commit(w, {e.memory_address(ins.operands[0], 32)}, {mask}, {m['group']})")


@runtime
def tensor_commit(w: Window, address: np.ndarray, mask: np.ndarray | None, group: int) -> None:
    """Execute tcgen05.commit."""
    cta = w.cta
    masks = lane_values(w, mask)
    for lane, where in enumerate(lane_values(w, address)):
        cta.tensor_memory().use_group(group)
        targets = targets_of(cta, where, masks[lane] if mask is not None else None)
        barriers = [target.mbarrier(where & 0xFFFFFF) for target in targets]
        for barrier in barriers:
            phases.check_use(w, (int(w.lanes[lane]) // WARP,), barrier, True)
        tensor_core.commit(w.engine, cta, int(w.lanes[lane]), w.origin(), barriers, targets)


@op(r"tcgen05.fence::(?P<when>before|after)_thread_sync", writes=(), pure=False)
def fence(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a fence that orders accesses to tensor memory before arrivals, or after waits."""
    e.line(f"w.cta.cluster.clocks.{m['when']}_sync(w.cta.rank, w.warps)")
    e.line(f"if w.observer is not None: w.observer.fence(w, {ins.opcode!r})")

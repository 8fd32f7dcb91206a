"""Traces of machine code: the instructions that each warp executed, in order, with the operands of some of them.

A traced module has a pseudo-instruction ahead of every instruction that reaches memory, a barrier or an asynchronous unit. It hands the
registers that the instruction reads to the observer of the launch. Waits for phases of mbarriers block, so a trace has none that fails.
Whether a test of a phase that does not wait succeeds depends on time: an oracle, which keeps the time, answers it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..codegen.control_flow import Block
from ..findings import Fault
from ..isa.barrier_ops import mbarrier_wait
from ..isa.emitter import Emitter
from ..isa.table import Decoded, runtime
from ..numerics.tma import Box
from ..state.access import shared_pattern
from ..state.barriers import Question
from ..state.cta import Cta
from ..state.engine_protocol import Engine
from ..state.memory import Buffer
from ..state.registers import WARP
from ..state.window import Observer, Window
from .accesses import accesses
from .listing import SassInstruction
from .table import MachineInstruction, lookup, op

_BARRIERS = {"ARRIVES", "BAR", "SYNCS", "UTCBAR"}
_COPIES = {"LDGSTS", "STAS", "UBLKCP", "UBLKPF", "UGETNEXTWORKID", "UTMALDG", "UTMAPF", "UTMAREDG", "UTMASTG"}
_MEMORY = {"ATOMG", "ATOMS", "CCTL", "LD", "LDG", "LDS", "LDSM", "RED", "REDG", "ST", "STG", "STS", "STSM"}
_PRODUCTS = {"HGMMA", "LDTM", "QGMMA", "STTM", "UTCHMMA", "UTCQMMA"}
TRACED = frozenset(_BARRIERS | _COPIES | _MEMORY | _PRODUCTS)

Values = dict[str, np.ndarray]  # register -> its value in the lanes that execute


@dataclass(frozen=True)
class LoadedBox:
    """A box that a TMA load brings to the CTA of this rank, or that a TMA prefetch of this CTA brings to L2."""

    rank: int
    box: Box


@dataclass(frozen=True)
class Step:
    """One executed instruction of a warp. address: its place in the code. values: the registers that it reads; None if it has no record.

    lanes: the lanes of the warp that reached it, 0 to 31; its guard is among the values. boxes: what a TMA load or prefetch brings. live:
    lanes of the warp that have not exited.
    """

    address: int
    values: Values | None = None
    lanes: np.ndarray | None = None
    boxes: Sequence[LoadedBox] = ()
    live: int = WARP


class MachineTrace(Observer):
    """Observer that records what the warps of one cluster of a launch execute.

    blocks: of the traced module. cluster: how many clusters start before that one; set it before the launch. oracle: asked when no warp can
    go on; it may give the answer to the question of one warp whether a phase is complete now, as the rank of its CTA, its number and the
    answer. Without an oracle such questions are answered as they stand. buffers: global memory of the launch, known once an instruction has
    been recorded. timeouts: waits that ended without their phase when nothing could go on, in words.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.oracle: Callable[[], tuple[int, int, bool] | None] | None = None
        self.warps: dict[tuple[int, int], list[Step]] = {}
        self.buffers: Sequence[Buffer] = ()
        self.cluster = 0
        self.timeouts: list[str] = []
        self._places = [places(block) for block in blocks]
        self._waits = [wait_of(block) for block in blocks]
        self._pending: dict[tuple[int, int], list[Step]] = {}
        self._boxes: dict[int, list[LoadedBox]] = {}  # of the instruction that runs, by warp
        self._questions: dict[tuple[int, int], Question] = {}
        self._answers: dict[tuple[int, int], bool] = {}
        self._asking: dict[tuple[int, int], list[int]] = {}  # lanes whose question is open

    def operands(self, w: Window, address: int, names: tuple[str, ...], rows: Sequence[np.ndarray]) -> None:
        """Note the registers that an instruction is about to read, for each warp of a window."""
        self._boxes = {warp: [] for warp in w.warps}
        if not self.records(w.cta):
            return
        self.buffers = w.engine.memory.buffers
        for warp in w.warps:
            where = slice(None) if len(w.warps) == 1 else w.lane_warps == warp
            values = {name: np.array(row[where]) for name, row in zip(names, rows, strict=True)}
            step = Step(address, values, w.lanes[where] % WARP, self._boxes[warp], w.cta.live[warp])
            self._pending.setdefault((w.cta.rank, warp), []).append(step)

    def async_write(self, target: Cta, box: Box, warp: int) -> None:
        """Note a box of the load that runs; copies complete at issue while a trace is made."""
        self._boxes[warp].append(LoadedBox(target.rank, box))

    def prefetch(self, cta: Cta, warp: int, boxes: Sequence[Box]) -> None:
        """Note the boxes of the prefetch that runs."""
        self._boxes[warp].extend(LoadedBox(cta.rank, box) for box in boxes)

    def executed(self, cta: Cta, block: int, warps: tuple[int, ...]) -> None:
        """Append the instructions of a block to the steps of warps, with their operands."""
        if not self.records(cta):
            return
        for warp in warps:
            place = cta.rank, warp
            steps = self.warps.setdefault(place, [])
            wait = self._waits[block]
            if wait is not None and steps[-1].address != wait:
                self._postpone(steps, wait)
            records = {record.address: record for record in self._pending.pop(place, ())}
            for address, is_record in self._places[block]:  # an instruction that was lifted to several counts once
                if not steps or steps[-1].address != address or (is_record and steps[-1].values is not None):
                    steps.append(records[address] if is_record else Step(address))
                elif is_record:
                    steps[-1] = records[address]

    def _postpone(self, steps: list[Step], wait: int) -> None:
        """Move a wait to the end: other lanes of the warp went on while these waited."""
        if self._questions:  # the clock has seen it where it was
            raise Fault("unsupported", f"lanes of a warp wait apart at {wait:#x} in a kernel that also tests phases without waiting")
        number = max(index for index, step in enumerate(steps) if step.address == wait and step.values is not None)
        steps.append(steps.pop(number))

    def timed_out(self, cta: Cta, reason: str) -> None:
        """Note a wait that ended without its phase."""
        if self.records(cta):
            self.timeouts.append(reason)

    def answer(self, w: Window, address: np.ndarray) -> bool | None:
        """Return the answer to the question of the one warp of a window, or block the warp until there is one (None)."""
        place = w.cta.rank, w.warps[0]
        if self._asking.setdefault(place, w.lanes.tolist()) != w.lanes.tolist():
            raise Fault("unsupported", "lanes of a warp that have parted test phases, both before one has its answer")
        if place not in self._answers:
            names = dict.fromkeys(w.cta.mbarrier(offset).name for offset in shared_pattern(address).offsets.tolist())
            w.engine.block([self._questions.setdefault(place, Question(", ".join(names)))])
        return self._answers.get(place)

    def forget(self, w: Window) -> None:
        """Forget the answer that a warp has used."""
        del self._answers[w.cta.rank, w.warps[0]], self._asking[w.cta.rank, w.warps[0]]

    def stuck(self, engine: Engine) -> bool:
        """Ask the oracle when no warp can go on. Return True when one can."""
        found = None if self.oracle is None else self.oracle()
        if found is None:
            return False
        rank, warp, self._answers[rank, warp] = found
        engine.wake(self._questions[rank, warp])
        return True

    def records(self, cta: Cta) -> bool:
        """Return True for a CTA of the cluster that is recorded."""
        return cta.cluster.number == self.cluster


def places(block: Block) -> list[tuple[int, bool]]:
    """Return the address of each instruction of a block, and whether it is a pseudo-instruction, which stands for the one behind it."""
    items = [item.instruction for item in block.instructions]
    return [
        (int(str(item.source).split(None, 1)[0], 16), item.opcode == "TRACE")
        for item in items
        if item.opcode == "TRACE" or not (isinstance(item, MachineInstruction) and item.sass is not None and item.sass.base in TRACED)
    ]


def wait_of(block: Block) -> int | None:
    """Return the address of the wait for a phase that a block begins with."""
    first = block.instructions[0].instruction
    is_wait = isinstance(first, MachineInstruction) and first.sass is not None and first.opcode.endswith(".TRYWAIT")
    return int(str(first.source).split(None, 1)[0], 16) if is_wait else None


def traced(ins: SassInstruction) -> Decoded | None:
    """Return the pseudo-instruction ahead of an instruction, or None for one that is not traced."""
    if ins.base not in TRACED:
        return None
    found = lookup("TRACE")
    assert found is not None
    instruction = MachineInstruction("TRACE", [], None, 0, f"{ins.address:#x} {ins.text}", ins)
    return Decoded(instruction, *found, tuple(dict.fromkeys(accesses(ins).reads)), ())


@op("TRACE", pure=False, taint="own", writes=())
def emit_trace(e: Emitter, ins: SassInstruction) -> None:
    """Emit the hand-over of the registers that an instruction reads."""
    registers = tuple(dict.fromkeys(accesses(ins).reads))
    rows = ", ".join(e.row(register, "pred" if register.bank == "p" else "u32") for register in registers)
    names = e.constants.thing(tuple(register.name for register in registers))
    e.line(f"trace_operands(w, {e.constants.number(ins.address)}, {names}, ({rows}{',' if registers else ''}))")


@runtime
def trace_operands(w: Window, address: int, names: tuple[str, ...], rows: tuple[np.ndarray, ...]) -> None:
    """Hand the registers that an instruction reads to the observer."""
    assert isinstance(w.observer, MachineTrace)
    w.observer.operands(w, address, names, rows)


@runtime
def test_phase_now(w: Window, address: np.ndarray, expected: np.ndarray, out: np.ndarray) -> bool:
    """Execute a test of a phase that does not wait. Return False when the warp is blocked and executes this again."""
    observer = w.observer
    if not isinstance(observer, MachineTrace) or observer.oracle is None or not observer.records(w.cta):
        return mbarrier_wait(w, address, expected, out, True, False)
    if w.engine.must_separate(w.lane_warps):
        return False
    answer = observer.answer(w, address)
    if answer is None or (answer and not mbarrier_wait(w, address, expected, out, True, True)):
        return False
    observer.forget(w)
    if not answer:
        out[...] = False
    return True

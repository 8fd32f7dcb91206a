"""Programs of the clock: what each warp of a CTA or cluster issues, in order, with the operands that decide its time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from cute_mla.simulator.frontend.layout import SHARED_WINDOW
from cute_mla.simulator.isa.launch_control import RESPONSE_BYTES
from cute_mla.simulator.sass.accesses import fragment
from cute_mla.simulator.sass.lift import barriers_of_lanes
from cute_mla.simulator.sass.listing import INSTRUCTION_BYTES, Address, Immediate, Listing, Operand, Register, SassInstruction
from cute_mla.simulator.sass.trace import Step
from cute_mla.simulator.state.memory import Buffer

from .instructions import TimedInstruction, count_of, reads_registers, shape_of

BANKS, BANK_BYTES, WARP = 32, 4, 32
SECTOR, LINE = 32, 128
SECTORS = LINE // SECTOR  # of a line
BUFFER_SHIFT = 48
RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1

Issue = tuple[TimedInstruction, Any]  # an instruction, and what its unit needs to know; None for one that has no effect


@dataclass(frozen=True)
class Arrival:
    """Arrivals at one mbarrier. rank: of its CTA. tx: expected bytes."""

    rank: int
    offset: int
    number: int
    tx: int


@dataclass(frozen=True)
class Request:
    """Bytes that an access asks L2 for.

    sectors: returns the distinct ones; only an access that may go to HBM asks. unit: sectors that HBM gives together (a prefetch size of
    the load).
    """

    nbytes: int
    sectors: Callable[[], Sequence[int]]
    unit: int = 1


@dataclass(frozen=True)
class GlobalAccess:
    """An access of a warp to global memory. wavefronts: turns in the port."""

    request: Request
    wavefronts: int


@dataclass(frozen=True)
class TensorLoad:
    """A load by TMA.

    request: of each destination. nbytes: that each receives, zeros included. signals: (destination's rank, arrival). gathers: whether it
    takes four rows by their numbers.
    """

    request: Request
    nbytes: int
    signals: tuple[tuple[int, Arrival], ...]
    gathers: bool = False


@dataclass(frozen=True)
class TensorProduct:
    """A product of the tensor core of a CTA, or of a pair.

    rows: that each of its CTAs has the time of. n, k: of its shape. ctas: that work on it. operands: bytes from each CTA.
    """

    rows: int
    n: int
    k: int
    element_bytes: int
    ctas: int
    operands: int

    @property
    def name(self) -> str:
        """Return the shape."""
        return f"n{self.n}k{self.k}{' of a pair' if self.ctas == 2 else ''}"


@dataclass(frozen=True)
class Product:
    """A matrix product of a warpgroup. n, k: of its shape. from_registers: A is in registers. ends: it ends a group."""

    n: int
    k: int
    element_bytes: int
    from_registers: bool
    ends: bool

    @property
    def name(self) -> str:
        """Return its shape, and where A comes from: registers (RS) or shared memory (SS)."""
        return f"m64n{self.n}k{self.k} {'RS' if self.from_registers else 'SS'}"


class Decoder:
    """Decoder of the traced steps of one kernel.

    timed: its instructions by address. ctas: of a cluster. buffers: global memory (see lines_of).
    """

    def __init__(self, listing: Listing, timed: Mapping[int, TimedInstruction], ctas: int) -> None:
        self.code = {ins.address: ins for ins in listing.instructions}
        self.timed = timed
        self.ctas = ctas
        self.buffers: Sequence[Buffer] = ()
        self._waves: dict[tuple[bytes, int], int] = {}
        self._place = 0, 0
        self._meetings = barriers_of_lanes(listing)
        self._parts: Counter[tuple[int, int]] = Counter()

    def program(self, place: tuple[int, int], steps: Sequence[Step], start: int = 0, is_whole: bool = True) -> tuple[list[Issue], int]:
        """Return what a warp issues from a step on, and the first step that is left. place: rank of its CTA, and its number.

        Unless the steps are whole, the last one is left: what follows may still change it, or show where it branches to. Only a test of a
        phase, which waits for the clock's answer, is taken.
        """
        found: list[Issue] = []
        rank, _ = self._place = place
        stop = len(steps)
        if not is_whole and stop > start and not self.is_question(steps[-1]):
            stop -= 1
        for index in range(start, stop):
            step = steps[index]
            timed = self.timed.get(step.address)
            if timed is None:
                continue
            if timed.kind == "branch":
                taken = index + 1 < len(steps) and steps[index + 1].address != step.address + INSTRUCTION_BYTES
                found.append((timed, taken))
            elif timed.kind == "exit":
                found.append((timed, index + 1 == len(steps)))
            elif not timed.kind:
                found.append((timed, None))
            else:
                found.append((timed, self.operands(rank, self.code[step.address], timed.kind, step)))
        return found, stop

    def is_question(self, step: Step) -> bool:
        """Return True for a test of a phase that does not wait."""
        timed = self.timed.get(step.address)
        return timed is not None and timed.kind == "phase test" and step.values is not None

    def operands(self, rank: int, ins: SassInstruction, kind: str, step: Step) -> Any:
        """Return what the unit of an instruction needs; None where no lane executes it."""
        if kind in ("products wait", "copies wait"):
            return count_of(ins)
        if kind == "local":  # words of a warp's lanes lie side by side
            return -(-width_of(ins) // BANK_BYTES)
        decode = getattr(self, "_" + kind.replace(" ", "_"), None)
        if decode is None:
            return True
        if step.values is None or step.lanes is None:
            return None
        active = self._active(ins, step)
        if not active.any():
            return None
        return decode(rank, ins, step, active)

    def _active(self, ins: SassInstruction, step: Step) -> np.ndarray:
        assert step.values is not None
        assert step.lanes is not None
        if ins.guard is None or ins.guard.number is None:
            return np.full(len(step.lanes), ins.guard is None or not ins.guard.negative)
        guard = step.values.get(ins.guard.registers()[0].name)
        if guard is None:  # a branch around the instruction stands for its guard
            return np.full(len(step.lanes), True)
        return ~guard if ins.guard.negative else guard

    # ------------------------------------------------------------ operands

    def _value(self, operand: Operand, step: Step, active: np.ndarray) -> np.ndarray:
        """Return a 32-bit operand in the active lanes."""
        assert step.values is not None
        if isinstance(operand, Immediate):
            return np.full(int(active.sum()), operand.bits, np.int64)
        assert isinstance(operand, Register)
        if operand.number is None:
            return np.zeros(int(active.sum()), np.int64)
        return step.values[operand.registers()[0].name][active].astype(np.int64)

    def _address(self, operand: Operand, step: Step, active: np.ndarray) -> np.ndarray:
        """Return an address in the active lanes: of shared memory, with the rank in its upper byte, or of global memory."""
        assert isinstance(operand, Address)
        assert step.values is not None
        total = np.full(int(active.sum()), operand.offset, np.int64)
        if operand.base is not None and operand.base.number is not None:
            words = [step.values[register.name][active].astype(np.int64) for register in operand.base.registers(1 + operand.wide)]
            total = total + words[0] + (words[1] << 32 if operand.wide else 0)
        if operand.uniform is not None and operand.uniform.number is not None:
            total = total + step.values[operand.uniform.registers()[0].name][active].astype(np.int64)
        return total if operand.wide else total & 0xFFFFFFFF  # generic addresses of shared memory lie far above both

    def _run(self, operand: Operand, index: int, step: Step, active: np.ndarray) -> int:
        """Return a word of the run of uniform registers behind an operand, in the first active lane."""
        assert isinstance(operand, Address)
        assert operand.uniform is not None
        assert step.values is not None
        return int(step.values[operand.uniform.registers(index + 1)[index].name][active][0])

    # ------------------------------------------------------------ barriers

    def _arrive(self, rank: int, ins: SassInstruction, step: Step, active: np.ndarray) -> tuple[Arrival, ...]:
        places = self._address(ins.operands[1], step, active)
        values = self._value(ins.operands[2], step, active)
        form = ins.modifiers[-1] if ins.modifiers[-1] in ("A1T0", "ART0", "A0TR", "A0T1", "A0TX") else "A1TR"
        remote = "RED" in ins.modifiers
        found: dict[tuple[int, int], list[int]] = {}
        for place, value in zip(places.tolist(), values.tolist(), strict=True):
            target = found.setdefault((place >> RANK_SHIFT if remote else rank, place & OFFSET_MASK), [0, 0])
            target[0] += {"A1": 1, "AR": value, "A0": 0}[form[:2]]
            target[1] += {"T0": 0, "TR": value, "T1": 1, "TX": -value}[form[2:]]
        return tuple(Arrival(*place, *counts) for place, counts in found.items())

    def _initialise(self, rank: int, ins: SassInstruction, step: Step, active: np.ndarray) -> tuple[tuple[int, int], ...]:
        states = self._value(ins.operands[2], step, active)
        counts = (1 << 20) - (states >> 1 & (1 << 20) - 1)
        places = self._address(ins.operands[1], step, active) & OFFSET_MASK
        return tuple(dict.fromkeys(zip(places.tolist(), counts.tolist(), strict=True)))

    def _phase_wait(self, rank: int, ins: SassInstruction, step: Step, active: np.ndarray) -> tuple[tuple[int, int], ...]:
        """Return place and parity of each mbarrier that some lane waits for."""
        places = self._address(ins.operands[1], step, active) & OFFSET_MASK
        parities = self._value(ins.operands[2], step, active) >> 31 & 1
        return tuple(dict.fromkeys(zip(places.tolist(), parities.tolist(), strict=True)))

    _phase_test = _phase_wait

    def _barrier_sync(self, rank: int, ins: SassInstruction, step: Step, active: np.ndarray) -> tuple[int, int] | None:
        """Return number and threads of a barrier; None for lanes of a warp that come ahead of its others, which then count for all."""
        if ins.address in self._meetings:
            self._parts[self._place] += len(active)
            if self._parts[self._place] < step.live:
                return None
            del self._parts[self._place]
        values = [int(self._value(operand, step, active)[0]) for operand in ins.operands if isinstance(operand, Register | Immediate)]
        return values[0], values[1] if len(values) > 1 else 0

    _barrier_arrive = _barrier_sync

    def _copies_arrive(self, rank: int, ins: SassInstruction, step: Step, active: np.ndarray) -> tuple[Arrival, ...]:
        places = (self._address(ins.operands[0], step, active) & OFFSET_MASK).tolist()
        counts = [(place, places.count(place)) for place in dict.fromkeys(places)]
        return tuple(
            Arrival(rank, place, 0, -lanes) if "TRANSCNT" in ins.modifiers else Arrival(rank, place, lanes, 0) for place, lanes in counts
        )

    def _remote_store(self, rank: int, ins: SassInstruction, step: Step, active: np.ndarray) -> tuple[Arrival, ...]:
        place = ins.operands[0]
        assert isinstance(place, Address)
        assert place.base is not None
        assert step.values is not None
        signal = step.values[place.base.registers(2)[1].name][active].tolist()
        size = next((int(word) // 8 for word in ins.modifiers if word in ("64", "128")), 4)
        return tuple(Arrival(item >> RANK_SHIFT, item & OFFSET_MASK, 0, -size * signal.count(item)) for item in dict.fromkeys(signal))

    # ------------------------------------------------------------ memory

    def _shared(self, rank: int, ins: SassInstruction, step: Step, active: np.ndarray) -> int:
        operand = next(item for item in ins.operands if isinstance(item, Address))
        places = self._address(operand, step, active)
        if ins.base in ("LDSM", "STSM"):
            return self._matrix_waves(places, int(ins.modifiers[-1]) if ins.modifiers[-1].isdigit() else 1)
        if ins.base == "ATOMS":  # lanes at one word take turns
            return int(np.bincount(places // BANK_BYTES % BANKS).max())
        return self._wavefronts(places, width_of(ins))

    def _matrix_waves(self, places: np.ndarray, matrices: int) -> int:
        """Return the turns of ldmatrix or stmatrix: lanes 8i to 8i + 7 give the rows of matrix i."""
        return sum(self._wavefronts(places[8 * index : 8 * index + 8], 16) for index in range(matrices))

    def _wavefronts(self, places: np.ndarray, size: int) -> int:
        """Return the turns of an access in the port: lanes that together take 128 bytes go together unless they share a bank."""
        key = places.tobytes(), size
        found = self._waves.get(key)
        if found is None:
            lanes = BANKS * BANK_BYTES // max(size, BANK_BYTES)
            found = self._waves[key] = sum(bank_turns(places[first : first + lanes], size) for first in range(0, len(places), lanes))
        return found

    def _global_load(self, rank: int, ins: SassInstruction, step: Step, active: np.ndarray) -> GlobalAccess:
        operand = next(item for item in ins.operands if isinstance(item, Address))
        places = in_buffers(self._address(operand, step, active), self.buffers)
        size = width_of(ins)
        sectors = np.unique(np.concatenate([places // SECTOR, (places + size - 1) // SECTOR]))
        return GlobalAccess(_request(ins, sectors), max(1, -(-len(places) * size // LINE)))

    def _generic_load(self, rank: int, ins: SassInstruction, step: Step, active: np.ndarray) -> GlobalAccess | int:
        """Return the access to global memory, or the bytes of a load from shared memory of the cluster."""
        operand = next(item for item in ins.operands if isinstance(item, Address))
        if bool((self._address(operand, step, active) >= SHARED_WINDOW).all()):
            return int(active.sum()) * width_of(ins)
        return self._global_load(rank, ins, step, active)

    _global_store = _global_load

    def _copy(self, rank: int, ins: SassInstruction, step: Step, active: np.ndarray) -> GlobalAccess:
        places = self._address(ins.operands[1], step, active)
        condition = ins.operands[2] if len(ins.operands) > 2 else None
        if isinstance(condition, Register) and condition.number is not None:
            assert step.values is not None
            holds = step.values[condition.registers()[0].name][active]
            places = places[~holds if condition.negative else holds]
        sectors = np.unique(in_buffers(places, self.buffers) // SECTOR)
        return GlobalAccess(_request(ins, sectors), max(1, -(-int(active.sum()) * width_of(ins) // LINE)))

    def _prefetch(self, rank: int, ins: SassInstruction, step: Step, active: np.ndarray) -> Request:
        operand = ins.operands[0]
        assert isinstance(operand, Address)
        places = self._address(replace(operand, wide=True), step, active)  # a pair, though the text does not say so
        lines = np.unique(in_buffers(places, self.buffers) // LINE)
        return Request(len(lines) * LINE, (lines[:, None] * SECTORS + np.arange(SECTORS)).ravel().tolist)

    # ------------------------------------------------------------ asynchronous units

    def _tensor_copy(self, rank: int, ins: SassInstruction, step: Step, active: np.ndarray) -> TensorLoad:
        signal = self._run(ins.operands[0], 1, step, active)
        offset, parity = signal & OFFSET_MASK, signal >> RANK_SHIFT & 1
        ranks = tuple(dict.fromkeys(box.rank for box in step.boxes))
        destinations = max(1, len(ranks))
        nbytes = sum(item.box.nbytes for item in step.boxes) // destinations
        places = [(item, item & ~1 | parity if "2CTA" in ins.modifiers else item) for item in ranks]
        signals = tuple((item, Arrival(signalled, offset, 0, -nbytes)) for item, signalled in places)
        return TensorLoad(self._boxes(step, destinations), nbytes, signals, "GATHER4" in ins.modifiers)

    def _tensor_prefetch(self, rank: int, ins: SassInstruction, step: Step, active: np.ndarray) -> Request:
        return self._boxes(step, 1)

    def _boxes(self, step: Step, destinations: int) -> Request:
        """Return the request of the boxes of a step, which each destination receives. What lies outside the tensor is not asked for."""
        boxes = [item.box for item in step.boxes if item.box.layout.inside.size]

        def sectors() -> tuple[int, ...]:
            return tuple(dict.fromkeys(sector for box in boxes for sector in rows_sectors(*box.gmem_rows(), self.buffers)))

        return Request(sum(box.layout.inside.size * box.layout.unit for box in boxes) // destinations, sectors)

    def _bulk_load(self, rank: int, ins: SassInstruction, step: Step, active: np.ndarray) -> TensorLoad:
        if ins.base == "UGETNEXTWORKID":
            place = self._run(ins.operands[1], 0, step, active) & OFFSET_MASK
            ranks = range(self.ctas) if "BROADCAST" in ins.modifiers else (rank,)
            return TensorLoad(Request(0, tuple), RESPONSE_BYTES, tuple((item, Arrival(item, place, 0, -RESPONSE_BYTES)) for item in ranks))
        request = self._bytes(ins.operands[1], ins.operands[2], step, active)
        target, signal = (self._run(ins.operands[0], index, step, active) for index in range(2))
        arrival = Arrival(signal >> RANK_SHIFT, signal & OFFSET_MASK, 0, -request.nbytes)
        return TensorLoad(request, request.nbytes, ((target >> RANK_SHIFT, arrival),))

    def _bulk_prefetch(self, rank: int, ins: SassInstruction, step: Step, active: np.ndarray) -> Request:
        return self._bytes(ins.operands[0], ins.operands[1], step, active)

    def _bytes(self, start: Operand, size: Operand, step: Step, active: np.ndarray) -> Request:
        """Return the request of contiguous bytes: their address in a pair, and their number / 16."""
        first = self._run(start, 0, step, active) + (self._run(start, 1, step, active) << 32)
        nbytes = int(self._value(size, step, active)[0]) << 4
        return Request(nbytes, partial(rows_sectors, np.array([first], np.int64), nbytes, self.buffers))

    def _bulk_copy(self, rank: int, ins: SassInstruction, step: Step, active: np.ndarray) -> Arrival:
        signal = self._run(ins.operands[0], 1, step, active)
        size = int(self._value(ins.operands[2], step, active)[0]) << 4
        return Arrival(signal >> RANK_SHIFT, signal & OFFSET_MASK, 0, -size)

    def _product(self, rank: int, ins: SassInstruction, step: Step, active: np.ndarray) -> Product:
        _, n, k = shape_of(ins)
        return Product(n, k, 32 // k, reads_registers(ins), "gsb0" in ins.text)

    def _tensor_product(self, rank: int, ins: SassInstruction, step: Step, active: np.ndarray) -> TensorProduct:
        """Read the shape from the instruction descriptor (PTX ISA, "Instruction descriptor": N / 8 from bit 17, M / 16 from bit 24).

        D of 64 rows in one CTA takes half of the lanes (layout F), and so the time of 128. All other shapes fill the lanes.
        """
        descriptor = int(self._uniform(ins.operands[4], step, active))
        m, n = (descriptor >> 24 & 31) << 4, (descriptor >> 17 & 63) << 3
        k, size = (32, 1) if ins.base == "UTCQMMA" else (16, 2)
        ctas = 2 if "2CTA" in ins.modifiers else 1
        first = ins.operands[0]
        from_tensor = isinstance(first, Address) and first.space == "tmem"
        rows = max(m, 128) if ctas == 1 and "WS" not in ins.modifiers else m // ctas
        return TensorProduct(rows, n, k, size, ctas, ((0 if from_tensor else m) + n) * k * size // ctas)

    def _commit(self, rank: int, ins: SassInstruction, step: Step, active: np.ndarray) -> tuple[Arrival, ...]:
        place = int(self._uniform(ins.operands[0], step, active))
        ranks = [place >> RANK_SHIFT]
        if "MULTICAST" in ins.modifiers:
            mask = int(self._value(ins.operands[2], step, active)[0])
            ranks = [item for item in range(16) if mask >> item & 1]
        return tuple(Arrival(item, place & OFFSET_MASK, 1, 0) for item in ranks)

    def _tensor_move(self, rank: int, ins: SassInstruction, step: Step, active: np.ndarray) -> int:
        """Return the registers that a load or store of tensor memory moves in each lane."""
        return fragment(ins).registers

    def _uniform(self, operand: Operand, step: Step, active: np.ndarray) -> int:
        """Return the uniform register of an operand in brackets, in the first active lane."""
        return self._run(operand, 0, step, active)


def in_buffers(places: np.ndarray, buffers: Sequence[Buffer]) -> np.ndarray:
    """Return addresses by buffer and offset: every buffer begins with a line, as on a GPU, wherever the host has put it."""
    index = np.searchsorted(np.array([buffer.address for buffer in buffers], np.int64), places, "right") - 1
    starts = np.array([0, *(buffer.address for buffer in buffers)], np.int64)
    ends = np.array([0, *(buffer.address + buffer.nbytes for buffer in buffers)], np.int64)
    found = np.where(places < ends[index + 1], index + 1, 0)
    return (found << BUFFER_SHIFT) + places - starts[found]


def rows_sectors(starts: np.ndarray, nbytes: int, buffers: Sequence[Buffer]) -> tuple[int, ...]:
    """Return the distinct sectors of rows of so many bytes."""
    first = in_buffers(starts, buffers)
    last = first + nbytes - 1
    return tuple(dict.fromkeys(item for low, high in zip(first // SECTOR, last // SECTOR, strict=True) for item in range(low, high + 1)))


def _request(ins: SassInstruction, sectors: np.ndarray) -> Request:
    """Return the request of a load or store of sectors, with the prefetch size that it names."""
    prefetched = next((int(word[3:-1]) for word in ins.modifiers if re.fullmatch(r"LTC\d+B", word)), 0)
    return Request(len(sectors) * SECTOR, sectors.tolist, prefetched // SECTOR if prefetched >= LINE else 1)


def width_of(ins: SassInstruction) -> int:
    """Return the bytes that each lane of an access moves."""
    words = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32, "F32x2": 8, "F32x4": 16}
    return next((words[word] for word in ins.modifiers if word in words), 4)


def bank_turns(places: np.ndarray, size: int) -> int:
    """Return the turns of lanes that would go together: the most distinct words that any bank has to give."""
    if not len(places):
        return 0
    words = np.unique((places[:, None] // BANK_BYTES + np.arange(max(1, size // BANK_BYTES))[None, :]).ravel())
    return int(np.bincount(words % BANKS).max())

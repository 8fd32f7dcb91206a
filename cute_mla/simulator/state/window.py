"""Windows on registers: what generated code runs on. A window gives lanes, their CTA, the engine that runs them, and the observer.

A window is some lanes of a register file: strided views where the lanes form an arithmetic progression, else a compact copy that is
written back. The window chooses the lanes, so generated code never needs masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ..numerics.tma import Box
from .barriers import ClusterBarrier, Mbarrier, NamedBarrier
from .cta import Cta
from .engine_protocol import Engine
from .origin import Origin, instruction_of_caller
from .registers import SHADOWS, WARP, RegisterFile, no_taints, progression

MAX_COMPACTS = 32  # windows on scattered lanes that a slot caches

# attribute of a window -> (bank, dtype of the rows)
ROW_LISTS: dict[str, tuple[str, np.dtype[Any]]] = {
    "P": ("p", np.dtype(bool)),
    "H": ("h", np.dtype(np.uint16)),
    "I": ("h", np.dtype(np.int16)),
    "E": ("h", np.dtype(np.float16)),
    "U": ("r", np.dtype(np.uint32)),
    "S": ("r", np.dtype(np.int32)),
    "F": ("r", np.dtype(np.float32)),
    "D": ("d", np.dtype(np.uint64)),
    "L": ("d", np.dtype(np.int64)),
    "G": ("d", np.dtype(np.float64)),
}
TAINT_LISTS = {"Tp": "p", "Th": "h", "Tr": "r", "Td": "d", "Tlow": "low", "Thigh": "high"}
THREAD_SPECIALS = ("tid.x", "tid.y", "tid.z", "laneid", "warpid", "lanemask_eq", "lanemask_lt", "lanemask_le", "lanemask_gt", "lanemask_ge")


class Observer:
    """Base class of listeners: override what is needed. An observer must not change the machine."""

    def shared_access(self, w: Window, target: Cta, index: np.ndarray | None, offsets: np.ndarray, nbytes: int, write: bool) -> None:
        """Note that lanes (index: positions in the window, None for all) access nbytes each at offsets of target's shared memory."""

    def global_access(self, w: Window, addresses: np.ndarray, nbytes: int, write: bool) -> None:
        """Note that lanes access nbytes each at global addresses."""

    def barrier(self, w: Window, barrier: Mbarrier | NamedBarrier | ClusterBarrier, action: str, number: int) -> None:
        """Note a barrier operation: init, arrive, wait (passed), sync, cluster_arrive, cluster_arrive_relaxed, cluster_wait."""

    def fence(self, w: Window, opcode: str) -> None:
        """Note a fence."""

    def executed(self, cta: Cta, block: int, warps: tuple[int, ...]) -> None:
        """Note that warps of a CTA have executed the block of this index together."""

    def stuck(self, engine: Engine) -> bool:
        """Note that no warp can go on. Return True if the observer has woken one."""
        return False

    def timed_out(self, cta: Cta, reason: str) -> None:
        """Note that a wait for a phase of an mbarrier answers false because nothing else can go on."""

    def async_write(self, target: Cta, box: Box, warp: int) -> None:
        """Note that a TMA load takes effect in target's shared memory. warp: that issued it."""

    def prefetch(self, cta: Cta, warp: int, boxes: Sequence[Box]) -> None:
        """Note that a warp asks TMA to bring boxes to L2. Only machine code tells."""


class _Rows(dict[int, np.ndarray]):
    """Rows of a bank, each viewed on first use: a window sees few of a kernel's thousands of registers."""

    def __init__(self, array: np.ndarray, dtype: np.dtype[Any]) -> None:
        super().__init__()
        self.array = array.view(dtype)

    def __missing__(self, slot: int) -> np.ndarray:
        row = self[slot] = self.array[slot]
        return row


class Window:
    """Some lanes of a register file.

    lanes: thread indices within the CTA, ascending. banks: bank -> [registers, lanes] array; taints: as in the register file.
    cta, engine, observer: as in the slot while it is occupied. lane_warps: the warp of each lane. whole: the lanes are complete warps.
    special: special registers that differ between threads, made on first use. shuffles: cached shuffle patterns (isa/lanes.py).
    parent, index: the window that a compact copy was taken from, and the positions there. dirty: a cached window's poison rows have been
    used. Row lists (P, H, I, E, U, S, F, D, L, G; Tp, Th, Tr, Td, Tlow, Thigh) appear on first use.
    """

    def __init__(self, slot: CtaSlot, lanes: np.ndarray, banks: dict[str, np.ndarray], taints: dict[str, np.ndarray]) -> None:
        self.slot = slot
        self.enter()
        self.lanes = lanes
        self.n = len(lanes)
        self.lane_warps = lanes // WARP
        self.warps: tuple[int, ...] = tuple(dict.fromkeys(self.lane_warps.tolist()))
        self.whole = self.n == len(self.warps) * WARP
        self.banks = banks
        self.taints = taints
        self.special: dict[str, np.ndarray] = _ThreadSpecials(slot.registers.block, lanes)
        self.shuffles: dict[tuple[object, ...], tuple[np.ndarray, np.ndarray]] = {}
        self.parent: Window | None = None
        self.index: np.ndarray | None = None
        self.dirty = False

    def enter(self) -> None:
        """Take over the occupant of the slot. The window is of no use while there is none."""
        self.cta: Cta = self.slot.cta  # type: ignore[assignment]
        self.engine: Engine = self.slot.engine  # type: ignore[assignment]
        self.observer: Observer | None = self.slot.observer

    def __getattr__(self, name: str) -> Any:
        if name in ROW_LISTS:
            bank, dtype = ROW_LISTS[name]
            array = self.banks[bank]
        elif name in TAINT_LISTS:
            array, dtype = self.taints[TAINT_LISTS[name]], np.dtype(bool)
        else:
            raise AttributeError(name)
        rows = _Rows(array, dtype)
        setattr(self, name, rows)
        return rows

    def origin(self) -> Origin:
        """Return the origin of the instruction that runs."""
        return Origin(self.cta.index, self.warps[0], instruction_of_caller())

    def line(self) -> int:
        """Return the PTX line of the instruction that runs, 0 for none."""
        instruction = instruction_of_caller()
        return 0 if instruction is None else instruction.line

    def report(self, kind: str, message: str, barrier: str | None = None) -> None:
        """Report a finding at the instruction that runs."""
        self.engine.report(self.origin(), kind, message, barrier)

    def become_tainted(self) -> None:
        """Switch the running group to tainted code: from now on its poison rows are meaningful."""
        if self.engine.taint_running():
            window: Window | None = self
            while window is not None:
                for shadow in window.taints.values():
                    shadow[...] = False
                window = window.parent

    @cached_property
    def warp_positions(self) -> np.ndarray:
        """Return the position in `warps` of each lane's warp, shape (lanes, 1), or (1, 1) for a single warp."""
        if len(self.warps) == 1:
            return np.zeros((1, 1), np.int64)
        return np.searchsorted(np.array(self.warps), self.lane_warps)[:, None]

    @cached_property
    def lane_in_warp(self) -> np.ndarray:
        """Return the lane number (0 to 31) of each lane."""
        return self.lanes % WARP

    def subset(self, mask: np.ndarray) -> Window | None:
        """Return the window of the lanes where mask is true; None when there are none, itself when all."""
        count = int(np.count_nonzero(mask))
        if count == 0:
            return None
        if count == self.n:
            return self
        index = np.flatnonzero(mask)
        step = progression(index)
        if step is not None:
            rows = slice(int(index[0]), int(index[-1]) + 1, step)
            banks = {bank: array[:, rows] for bank, array in self.banks.items()}
            taints = {bank: array[:, rows] for bank, array in self.taints.items()}
            window = Window(self.slot, self.lanes[index], banks, taints)
        else:
            banks = {bank: array[:, index] for bank, array in self.banks.items()}
            taints = {bank: array[:, index] for bank, array in self.taints.items()}
            window = Window(self.slot, self.lanes[index], banks, taints)
            window.parent, window.index = self, index
        return window

    def write_back(self) -> None:
        """Copy a compact window's registers to where they came from."""
        if self.parent is None:
            return
        for bank, array in self.banks.items():
            self.parent.banks[bank][:, self.index] = array
        for bank, array in self.taints.items():
            self.parent.taints[bank][:, self.index] = array


class _ThreadSpecials(dict[str, np.ndarray]):
    """Special registers of the threads of a window, made on first use."""

    def __init__(self, block: tuple[int, int, int], lanes: np.ndarray) -> None:
        super().__init__()
        self.block = block
        self.lanes = lanes

    def __missing__(self, name: str) -> np.ndarray:
        x, y, _ = self.block
        makers: dict[str, Callable[[], np.ndarray]] = {
            "tid.x": lambda: self.lanes % x,
            "tid.y": lambda: self.lanes // x % y,
            "tid.z": lambda: self.lanes // (x * y),
            "laneid": lambda: self.lanes % WARP,
            "warpid": lambda: self.lanes // WARP,
            "lanemask_eq": lambda: np.left_shift(1, self.lanes % WARP),
            "lanemask_lt": lambda: np.left_shift(1, self.lanes % WARP) - 1,
            "lanemask_le": lambda: np.left_shift(2, self.lanes % WARP) - 1,
            "lanemask_gt": lambda: 0xFFFFFFFF - (np.left_shift(2, self.lanes % WARP) - 1),
            "lanemask_ge": lambda: 0xFFFFFFFF - (np.left_shift(1, self.lanes % WARP) - 1),
        }
        value = makers[name]().astype(np.uint32)
        self[name] = value
        return value


class CtaSlot:
    """Place of a CTA: its registers, and the windows on them. Successive CTAs of a launch occupy a slot in turn; windows stay.

    cta: the occupant; engine: what runs it; observer: who listens.
    """

    def __init__(self, registers: RegisterFile) -> None:
        self.registers = registers
        self.cta: Cta | None = None
        self.engine: Engine | None = None
        self.observer: Observer | None = None
        self.windows: dict[bytes, Window] = {}
        self.compacts: dict[bytes, Window] = {}

    def occupy(self, cta: Cta, engine: Engine, observer: Observer | None) -> None:
        """Let a CTA in."""
        self.cta, self.engine, self.observer = cta, engine, observer
        self._refresh_windows()

    def vacate(self) -> None:
        """Forget the occupant: a cached home must not hold a launch and its memory."""
        self.cta = self.engine = self.observer = None
        self._refresh_windows()

    def _refresh_windows(self) -> None:
        for windows in (self.windows, self.compacts):
            for window in windows.values():
                window.enter()

    def window(self, lanes: np.ndarray) -> Window | None:
        """Return the cached window of lanes that form an arithmetic progression; None for other lanes."""
        key = lanes.tobytes()
        window = self.windows.get(key)
        if window is None:
            step = progression(lanes)
            if step is None:
                return None
            rows = slice(int(lanes[0]), int(lanes[-1]) + 1, step)
            banks = {bank: array[:, rows] for bank, array in self.registers.banks.items()}
            taints = {bank: array[:, rows] for bank, array in self.registers.taints.items()}
            window = self.windows[key] = Window(self, lanes, banks, taints)
        return window

    def compact(self, lanes: np.ndarray, used: dict[str, np.ndarray], tainted: bool) -> Window:
        """Copy the used registers of arbitrary lanes to a cached window, whose other rows mean nothing; finish with store()."""
        key = lanes.tobytes()
        window = self.compacts.get(key)
        if window is None:
            if len(self.compacts) >= MAX_COMPACTS:
                self.compacts.clear()
            banks = {bank: np.empty((array.shape[0], len(lanes)), array.dtype) for bank, array in self.registers.banks.items()}
            window = Window(self, lanes, banks, no_taints(banks))
            self.compacts[key] = window
        if window.dirty and not tainted:
            window.dirty = False
            for shadow in window.taints.values():
                shadow.fill(False)
        for bank, rows in used.items():
            if len(rows):
                window.banks[bank][rows] = self.registers.banks[bank][rows[:, None], lanes]
                for name in SHADOWS[bank] if tainted else ():
                    window.taints[name][rows] = self.registers.taints[name][rows[:, None], lanes]
        return window

    def store(self, window: Window, used: dict[str, np.ndarray], tainted: bool) -> None:
        """Write the used registers of a compact window back."""
        window.dirty |= tainted
        for bank, rows in used.items():
            if len(rows):
                self.registers.banks[bank][rows[:, None], window.lanes] = window.banks[bank][rows]
                for name in SHADOWS[bank] if tainted else ():
                    self.registers.taints[name][rows[:, None], window.lanes] = window.taints[name][rows]

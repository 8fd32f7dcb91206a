"""Register files and windows on them.

A CTA slot holds each register as one row over all its threads. Code runs on a Window: some lanes of the file, as strided
views where the lanes form an arithmetic progression, else as a compact copy that is written back. Since the lanes are
chosen by the window, generated code never needs masks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .cta import Cta

BANK_DTYPES = {"p": np.dtype(bool), "h": np.dtype(np.uint16), "r": np.dtype(np.uint32), "d": np.dtype(np.uint64)}
NAN_BITS = {"p": 1, "h": 0xFFFF, "r": 0xFFFFFFFF, "d": 0xFFFFFFFFFFFFFFFF}  # what an undefined register holds
WARP = 32
MAX_COMPACTS = 32  # windows on scattered lanes that a slot keeps

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
TAINT_LISTS = {"Tp": "p", "Th": "h", "Tr": "r", "Td": "d"}


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

    lanes: thread indices within the CTA, ascending. banks: bank -> [slots, lanes] array; taints: the same shape, bool.
    whole: the lanes are complete warps. Row lists (P, H, I, E, U, S, F, D, L, G; Tp, Th, Tr, Td) appear on first use.
    """

    def __init__(self, slot: CtaSlot, lanes: np.ndarray, banks: dict[str, np.ndarray], taints: dict[str, np.ndarray]) -> None:
        self.slot = slot
        self.cta: Cta = slot.cta  # type: ignore[assignment]  # a window is used only while a CTA occupies its slot
        self.lanes = lanes
        self.n = len(lanes)
        self.lane_warps = lanes // WARP
        self.warps: tuple[int, ...] = tuple(dict.fromkeys(self.lane_warps.tolist()))
        self.whole = self.n == len(self.warps) * WARP
        self.banks = banks
        self.taints = taints
        self.special: dict[str, np.ndarray] = _Special(slot, lanes)
        self.shuffles: dict[tuple[object, ...], tuple[np.ndarray, np.ndarray]] = {}  # of lanes.py
        self.parent: Window | None = None
        self.index: np.ndarray | None = None
        self.dirty = False  # a kept window whose poison rows have been used

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

    @cached_property
    def warp_positions(self) -> np.ndarray:
        """Where in `warps` the warp of each lane stands: (lanes, 1), or (1, 1) for a single warp."""
        if len(self.warps) == 1:
            return np.zeros((1, 1), np.int64)
        return np.searchsorted(np.array(self.warps), self.lane_warps)[:, None]

    @cached_property
    def lane_in_warp(self) -> np.ndarray:
        """Lane number of each lane."""
        return self.lanes % WARP

    def subset(self, mask: np.ndarray) -> Window | None:
        """The window of the lanes where mask is true; None when there are none, itself when all."""
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


class _Special(dict[str, np.ndarray]):
    """Per-thread special registers of a window, made on first use."""

    def __init__(self, slot: CtaSlot, lanes: np.ndarray) -> None:
        super().__init__()
        self.slot = slot
        self.lanes = lanes

    def __missing__(self, name: str) -> np.ndarray:
        x, y, _ = self.slot.block
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


THREAD_SPECIALS = ("tid.x", "tid.y", "tid.z", "laneid", "warpid", "lanemask_eq", "lanemask_lt", "lanemask_le", "lanemask_gt", "lanemask_ge")


class CtaSlot:
    """Registers that successive CTAs of a launch use in turn.

    sizes: bank -> number of registers. block: threads along x, y, z.
    """

    def __init__(self, block: tuple[int, int, int], sizes: dict[str, int]) -> None:
        self.block = block
        self.threads = block[0] * block[1] * block[2]
        self.cta: Cta | None = None
        self.banks = {bank: np.zeros((max(sizes[bank], 1), self.threads), dtype) for bank, dtype in BANK_DTYPES.items()}
        self.taints = {bank: np.zeros(array.shape, bool) for bank, array in self.banks.items()}
        self.windows: dict[bytes, Window] = {}
        self.compacts: dict[bytes, Window] = {}

    def occupy(self, cta: Cta | None) -> None:
        """Give the slot and its windows to a CTA, or (None) to nobody."""
        self.cta = cta
        for windows in (self.windows, self.compacts):
            for window in windows.values():
                window.cta = cta  # type: ignore[assignment]

    @property
    def nbytes(self) -> int:
        """Bytes of all registers and their poison."""
        return sum(array.nbytes for arrays in (self.banks, self.taints) for array in arrays.values())

    def reset(self, undefined: dict[str, list[int]]) -> None:
        """Fill registers that may be read before they are written with NaN patterns."""
        for bank, slots in undefined.items():
            if slots:
                self.banks[bank][slots] = NAN_BITS[bank]

    def window(self, lanes: np.ndarray) -> Window | None:
        """The cached window of lanes that form an arithmetic progression; None for other lanes."""
        key = lanes.tobytes()
        window = self.windows.get(key)
        if window is None:
            step = progression(lanes)
            if step is None:
                return None
            rows = slice(int(lanes[0]), int(lanes[-1]) + 1, step)
            banks = {bank: array[:, rows] for bank, array in self.banks.items()}
            taints = {bank: array[:, rows] for bank, array in self.taints.items()}
            window = self.windows[key] = Window(self, lanes, banks, taints)
        return window

    def compact(self, lanes: np.ndarray, used: dict[str, np.ndarray], tainted: bool) -> Window:
        """A copy of the used registers of arbitrary lanes; finish with store(). Windows are kept: only used rows mean anything."""
        key = lanes.tobytes()
        window = self.compacts.get(key)
        if window is None:
            if len(self.compacts) >= MAX_COMPACTS:
                self.compacts.clear()
            banks = {bank: np.empty((array.shape[0], len(lanes)), array.dtype) for bank, array in self.banks.items()}
            window = Window(self, lanes, banks, {bank: np.zeros(array.shape, bool) for bank, array in banks.items()})
            self.compacts[key] = window
        if window.dirty and not tainted:
            window.dirty = False
            for shadow in window.taints.values():
                shadow.fill(False)
        for bank, rows in used.items():
            if len(rows):
                window.banks[bank][rows] = self.banks[bank][rows[:, None], lanes]
                if tainted:
                    window.taints[bank][rows] = self.taints[bank][rows[:, None], lanes]
        return window

    def store(self, window: Window, used: dict[str, np.ndarray], tainted: bool) -> None:
        """Write a compact window back."""
        window.dirty |= tainted
        for bank, rows in used.items():
            if len(rows):
                self.banks[bank][rows[:, None], window.lanes] = window.banks[bank][rows]
                if tainted:
                    self.taints[bank][rows[:, None], window.lanes] = window.taints[bank][rows]


def progression(index: np.ndarray) -> int | None:
    """The common difference of an ascending index array, or None when there is none."""
    if len(index) == 1:
        return 1
    step = int(index[1] - index[0])
    if int(index[-1] - index[0]) != step * (len(index) - 1):
        return None
    return step if len(index) == 2 or bool((np.diff(index) == step).all()) else None

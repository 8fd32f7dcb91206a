"""Register file of a CTA: each register is one row over all threads, with a shadow of poison."""

from __future__ import annotations

from typing import Any

import numpy as np

BANK_DTYPES: dict[str, np.dtype[Any]] = {
    "p": np.dtype(bool),
    "h": np.dtype(np.uint16),
    "r": np.dtype(np.uint32),
    "d": np.dtype(np.uint64),
}
NAN_BITS = {"p": 1, "h": 0xFFFF, "r": 0xFFFFFFFF, "d": 0xFFFFFFFFFFFFFFFF}  # what an undefined register holds
SHADOWS = {"p": ("p",), "h": ("h",), "r": ("r",), "d": ("d", "low", "high")}  # rows of poison of each bank
WARP = 32


class RegisterFile:
    """Registers of all threads of a CTA.

    banks: bank -> [registers, threads] array; taints: the same shape, bool, true where poisoned. "low" and "high" in taints: true where a
    register of bank "d" is poisoned, but not in this half.
    """

    def __init__(self, block: tuple[int, int, int], sizes: dict[str, int]) -> None:
        """Allocate registers for a block (threads along x, y, z). sizes: bank -> number of registers."""
        self.block = block
        self.threads = block[0] * block[1] * block[2]
        self.banks = {bank: np.zeros((max(sizes[bank], 1), self.threads), dtype) for bank, dtype in BANK_DTYPES.items()}
        self.taints = no_taints(self.banks)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all registers and their poison."""
        return sum(array.nbytes for arrays in (self.banks, self.taints) for array in arrays.values())

    def undefine(self, rows: dict[str, list[int]]) -> None:
        """Fill registers that may be read before they are written with NaN patterns."""
        for bank, numbers in rows.items():
            if numbers:
                self.banks[bank][numbers] = NAN_BITS[bank]

    def clear_taint(self, lanes: np.ndarray) -> None:
        """Reset the poison rows of lanes."""
        step = progression(lanes)
        where = lanes if step is None else slice(int(lanes[0]), int(lanes[-1]) + 1, step)  # a slice is many times as fast
        for shadow in self.taints.values():
            shadow[:, where] = False


def no_taints(banks: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the shadow of registers that are all defined."""
    return {shadow: np.zeros(array.shape, bool) for bank, array in banks.items() for shadow in SHADOWS[bank]}


def progression(index: np.ndarray) -> int | None:
    """Return the common difference of an ascending index array, None when there is none."""
    if len(index) == 1:
        return 1
    step = int(index[1] - index[0])
    if int(index[-1] - index[0]) != step * (len(index) - 1):
        return None
    return step if len(index) == 2 or bool((np.diff(index) == step).all()) else None

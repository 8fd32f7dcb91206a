"""tcgen05.ld and tcgen05.st: which cell of tensor memory each register of each lane of a warp is.

Pure functions. Rows count from the lane of the address, columns from its column.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_HALVES = {"16x32b_t0_t15": slice(0, 16), "16x32b_t16_t31": slice(16, 32)}  # machine code moves 16x32bx2 in two
_REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1, **dict.fromkeys(_HALVES, 1)}
_LARGEST = {"32x32b": 128, "16x64b": 128, "16x128b": 64, "16x256b": 32, "16x32bx2": 128, **dict.fromkeys(_HALVES, 128)}


@dataclass(frozen=True)
class Fragment:
    """A shape with its repetition. packed: two columns of 16 bits share a register. split: second half of 16x32bx2, in columns."""

    shape: str
    count: int
    packed: bool = False
    split: int = 0

    def __post_init__(self) -> None:
        if self.count > _LARGEST[self.shape]:
            raise ValueError(f"{self.shape}.x{self.count} does not exist, the largest is x{_LARGEST[self.shape]}")

    @property
    def registers(self) -> int:
        """Return the number of registers per lane."""
        return self.count * _REGISTERS[self.shape]

    @property
    def rows(self) -> int:
        """Return the number of lanes of tensor memory."""
        return 32 if self.shape == "32x32b" else 16

    @property
    def threads(self) -> slice:
        """Return the lanes of the warp that take part."""
        return _HALVES.get(self.shape, slice(0, 32))

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Return the ranges of columns that the fragment covers."""
        width = self.count * {"16x64b": 2, "16x128b": 4, "16x256b": 8}.get(self.shape, 1) * (1 + self.packed)
        return ((0, width), (self.split, self.split + width)) if self.shape == "16x32bx2" else ((0, width),)

    @cached_property
    def places(self) -> tuple[Array, Array]:
        """Return row and column of each (register, lane that takes part); packed: the first of the two columns."""
        row, column = (places[:, self.threads] for places in _places(self.shape, self.count))
        if self.packed:
            column = column * 2
        if self.split:
            column = column + np.where(np.arange(32) < 16, 0, self.split)
        return row, column


@lru_cache(maxsize=64)
def _places(shape: str, count: int) -> tuple[Array, Array]:
    t = np.arange(32)[None, :]
    i = np.arange(count * _REGISTERS[shape])[:, None]
    nothing = np.zeros_like(i + t)
    if shape == "32x32b":
        return t + nothing, i + nothing
    if shape == "16x64b":
        return (t >> 2) + 8 * (t & 1) + nothing, 2 * i + (t >> 1 & 1)
    if shape == "16x128b":
        return t // 4 + 8 * (i % 2), 4 * (i // 2) + t % 4
    if shape == "16x256b":
        return t // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (t % 4) + i % 2
    return t % 16 + nothing, i + nothing


@lru_cache(maxsize=256)
def fragment(shape: str, count: int, packed: bool = False, split: int = 0) -> Fragment:
    """Return the fragment of a shape. Raises ValueError for a repetition that does not exist."""
    return Fragment(shape, count, packed, split)


def load(cells: Array, where: Fragment, lane: int, column: int) -> Array:
    """Return the registers (registers, lanes that take part) from cells (128, 512) of uint32.

    Packed: the lower halves of two neighbouring columns.
    """
    row, offset = where.places
    if where.packed:
        low = cells[row + lane, offset + column] & np.uint32(0xFFFF)
        return low | cells[row + lane, offset + column + 1] << np.uint32(16)
    if where.shape == "32x32b":
        return cells[lane : lane + 32, column : column + where.count].T
    return cells[row + lane, offset + column]


def load_known(valid: Array, where: Fragment, lane: int, column: int) -> Array:
    """Return the mask of defined registers for load(), from the shadow (128, 512) of bool."""
    row, offset = where.places
    if where.packed:
        return valid[row + lane, offset + column] & valid[row + lane, offset + column + 1]
    return valid[row + lane, offset + column]


def store(cells: Array, values: Array, where: Fragment, lane: int, column: int) -> None:
    """Store registers (registers, lanes that take part) to cells (128, 512) of uint32. Packed: halves go to two neighbouring columns."""
    row, offset = where.places
    if where.packed:
        cells[row + lane, offset + column] = values & np.uint32(0xFFFF)
        cells[row + lane, offset + column + 1] = values >> np.uint32(16)
    elif where.shape == "32x32b":
        cells[lane : lane + 32, column : column + where.count] = values.T
    else:
        cells[row + lane, offset + column] = values


def store_known(valid: Array, known: Array | None, where: Fragment, lane: int, column: int) -> None:
    """Update the shadow as store() does the cells. known: mask of defined registers, None for all."""
    row, offset = where.places
    if where.shape == "32x32b" and known is None and not where.packed:
        valid[lane : lane + 32, column : column + where.count] = True
        return
    valid[row + lane, offset + column] = True if known is None else known
    if where.packed:
        valid[row + lane, offset + column + 1] = True if known is None else known

"""Tensor memory of one CTA: 128 lanes x 512 columns of 32 bits, with a shadow that says which cells have ever been written.

An address is lane << 16 | column. Columns are allocated in powers of two from 32 to 512; a warp may touch only the 32 lanes of its number
in the warpgroup.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..findings import Fault
from .clocks import Knowledge

LANES = 128
COLUMNS = 512
UNIT = 32  # columns; allocations are multiples of it
NAN_WORD = 0xFFFFFFFF  # contents of a cell that was never written


def split_address(address: int) -> tuple[int, int]:
    """Return the lane and the column of an address."""
    return address >> 16, address & 0xFFFF


@dataclass
class TensorMemory:
    """Cells and allocations. allocations: first column -> columns.

    With cta_group::2 both CTAs of a pair allocate together: requested is what this CTA has asked for, granted the first column that it
    got and has not taken yet. freed: deallocations with cta_group::2, on which both CTAs must agree. refused: in machine code, warps that
    found no room since the last deallocation.
    """

    data: np.ndarray = field(default_factory=lambda: np.full((LANES, COLUMNS), NAN_WORD, np.uint32))
    valid: np.ndarray = field(default_factory=lambda: np.zeros((LANES, COLUMNS), bool))
    allocations: dict[int, int] = field(default_factory=dict)
    relinquished: bool = False
    group: int = 0
    requested: int | None = None
    granted: int | None = None
    freed: list[tuple[int, int]] = field(default_factory=list)
    refused: set[int] = field(default_factory=set)
    knowledge: Knowledge = field(default_factory=Knowledge)  # handed over by warps that free columns
    name: str = "tensor memory"

    def reset(self) -> None:
        """Forget contents and allocations."""
        self.data.fill(NAN_WORD)
        self.valid.fill(False)
        self.allocations = {}
        self.relinquished = False
        self.group = 0
        self.requested = self.granted = None
        self.freed = []
        self.refused = set()
        self.knowledge = Knowledge()

    def state(self) -> str:
        """Return in words how much is allocated."""
        taken = f"{sum(self.allocations.values())} of {COLUMNS} columns are allocated"
        return taken if self.requested is None else f"{taken}; with cta_group::2 the peer CTA must allocate {self.requested} too"

    def use_group(self, group: int) -> None:
        """Record the cta_group of a tcgen05 instruction. Raises Fault where it differs from that of an earlier one."""
        if self.group not in (0, group):
            raise Fault("tensor_memory", f"cta_group::{group} in a kernel that has used cta_group::{self.group} before")
        self.group = group

    def check_size(self, columns: int) -> None:
        """Raise Fault for an allocation that is not allowed."""
        if columns not in (32, 64, 128, 256, 512):
            raise Fault("tensor_memory", f"allocation of {columns} columns: must be a power of two from 32 to 512")
        if self.relinquished:
            raise Fault("tensor_memory", "tcgen05.alloc after tcgen05.relinquish_alloc_permit")

    def room(self, columns: int) -> int | None:
        """Return the first column that an allocation would get; None when there is no room now."""
        start = 0
        for first in sorted(self.allocations):
            if first - start >= columns:
                break
            start = first + self.allocations[first]
        return start if start + columns <= COLUMNS else None

    def allocate(self, start: int, columns: int) -> None:
        """Take columns."""
        self.allocations[start] = columns
        self.valid[:, start : start + columns] = False
        self.data[:, start : start + columns] = NAN_WORD

    def release(self, address: int, columns: int) -> None:
        """Free an allocation. Raises Fault unless it is one, whole."""
        lane, column = split_address(address)
        if lane or self.allocations.get(column) != columns:
            have = ", ".join(f"{count} columns at {first:#x}" for first, count in sorted(self.allocations.items())) or "nothing"
            raise Fault("tensor_memory", f"tcgen05.dealloc of {columns} columns at {address:#x}; allocated is {have}")
        del self.allocations[column]
        self.refused.clear()

    def require(self, low: int, high: int, what: str) -> None:
        """Raise Fault unless the columns [low, high) are allocated."""
        column = low
        while column < high:
            first = next((start for start, count in self.allocations.items() if start <= column < start + count), None)
            if first is None:
                raise Fault("tensor_memory", f"{what} of tensor memory columns {low} to {high - 1}: column {column} is not allocated")
            column = first + self.allocations[first]

"""tcgen05.cp: copies of rows of shared memory to lanes of tensor memory, on the queue of the tensor core."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..findings import Fault
from ..numerics import tcgen05 as forms
from ..numerics.tma import CHUNK
from ..numerics.wgmma import Operand
from ..state.cta import Cta
from ..state.origin import Origin
from ..state.tensor_memory import split_address
from ..state.tensor_queue import Cells

_OPCODE = re.compile(
    r"tcgen05\.cp\.cta_group::(?P<group>[12])\."
    r"(?P<shape>128x256b|4x256b|128x128b|64x128b\.warpx2::02_13|64x128b\.warpx2::01_23|32x128b\.warpx4)"
)


@dataclass(frozen=True)
class CopyForm:
    """One spelling of tcgen05.cp. shape: rows of the source x bits of each row, and how rows are repeated."""

    group: int
    shape: str

    @property
    def rows(self) -> int:
        """Return the number of rows of the source."""
        return int(self.shape.split("x", 1)[0])

    @property
    def chunks(self) -> int:
        """Return the number of 16-byte chunks of a row."""
        return 2 if "x256b" in self.shape else 1

    def lanes(self, first: int) -> npt.NDArray[Any]:
        """Return the lanes of each row, shape (copies, rows). Raises ValueError for a first lane that the shape does not allow."""
        if first and (self.shape != "4x256b" or first >= 32):
            raise ValueError(f"tcgen05.cp.{self.shape} to lane {first}")
        row = np.arange(self.rows)
        if self.shape == "4x256b":
            return (first + 32 * row)[None]
        if self.shape.endswith("02_13"):
            return np.stack([row, row + 64])
        if self.shape.endswith("01_23"):
            return np.stack([row // 32 * 64 + row % 32 + 32 * copy for copy in range(2)])
        if self.shape.endswith("warpx4"):
            return np.stack([row + 32 * copy for copy in range(4)])
        return row[None]


@lru_cache(maxsize=64)
def parse_opcode(opcode: str) -> CopyForm:
    """Return the form of an opcode. Raises ValueError for a form that is not supported."""
    match = _OPCODE.fullmatch(opcode)
    if match is None:
        raise ValueError(f"{opcode} is not supported, only the shapes of tcgen05.cp without decompression")
    return CopyForm(int(match["group"]), match["shape"])


@lru_cache(maxsize=1024)
def source(descriptor: int, rows: int, chunks: int) -> Operand:
    """Return the rows in shared memory as a K-major operand. Raises ValueError for a descriptor that is not supported."""
    return Operand(forms.operand_chunks(forms.decode_descriptor(descriptor), rows, False, 1)[:, :chunks].copy(), False)


@dataclass
class SharedToTensor:
    """One copy, in one CTA or in both CTAs of a pair, each from its own shared memory."""

    form: CopyForm
    ctas: tuple[Cta, ...]
    address: int
    descriptor: int
    origin: Origin
    thread: int
    serial: int = 0
    what: str = "a tcgen05.cp"

    def extends(self, other: object) -> bool:
        """Return False: copies are never joined."""
        return False

    def append(self, other: SharedToTensor) -> None:
        """Refuse: copies are never joined."""
        raise AssertionError("a tcgen05.cp takes no further steps")

    def key(self) -> object:
        """Return the same key for copies of the same bytes to the same cells."""
        return self.form, self.address, self.descriptor

    def operand(self) -> Operand:
        """Return the source in each CTA."""
        return source(self.descriptor, self.form.rows, self.form.chunks)

    def written(self) -> list[Cells]:
        """Return the cells that the copy writes."""
        lane, column = split_address(self.address)
        blocks = sum({1 << int(block) for block in np.unique(self.form.lanes(lane) // 16)})
        return [Cells(cta.rank, blocks, column, column + 4 * self.form.chunks) for cta in self.ctas]

    def read(self) -> list[Cells]:
        """Return no cells: the copy reads shared memory only."""
        return []

    def sources(self) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
        """Yield CTA rank and byte ranges of the source."""
        for cta in self.ctas:
            yield cta.rank, self.operand().ranges

    def execute(self) -> None:
        """Copy, with poison. Raises Fault out of bounds."""
        lane, column = split_address(self.address)
        where = self.operand()
        words = slice(column, column + self.form.chunks * CHUNK // 4)
        for cta in self.ctas:
            memory = cta.tensor_memory()
            if where.ranges[-1][1] > cta.smem.nbytes:
                raise Fault("out_of_bounds", f"tcgen05.cp reads shared memory up to {where.ranges[-1][1]:#x} of {cta.smem.nbytes:#x}")
            values = where.read(cta.smem.data).view(np.uint32)
            known = where.read(cta.smem.valid).view(np.uint8).reshape(*values.shape, 4).all(axis=2)
            for lanes in self.form.lanes(lane):
                memory.data[lanes, words] = values
                memory.valid[lanes, words] = known

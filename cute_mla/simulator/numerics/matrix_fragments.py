"""ldmatrix, stmatrix, movmatrix: 8x8 matrices of 16-bit elements (16x16 or 16x8 of bytes) in shared memory and registers of a warp.

Lanes 8i to 8i+7 give the shared offsets of rows 0 to 7 (16 bytes each) of matrix i, which is register i of every lane. Lane t holds
elements (t/4, 2*(t%4)) and (t/4, 2*(t%4)+1) of a matrix, lower half first; with .trans it holds them of the transposed matrix.
Arrays have lanes last; dimensions before them (warps) are carried through. Rows are aligned and inside of the memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

LANES = 32
ROW_BYTES = 16
_ROW = np.dtype("V16")


def row_offsets(offsets: Array, count: int) -> Array:
    """Return the shared offsets (int64) of the rows that `count` matrices use, shape (..., 8 * count), from one offset per lane."""
    return np.asarray(offsets)[..., : 8 * count].astype(np.int64)


def _chunks(smem: Array) -> Array:
    return smem[: smem.size & -ROW_BYTES].view(_ROW)


def load_matrices(smem: Array, offsets: Array, count: int, transposed: bool) -> list[Array]:
    """Execute ldmatrix: `count` registers, uint32 of the shape of offsets (..., 32), from smem (uint8) at one offset per lane."""
    rows = row_offsets(offsets, count)
    chunks = _chunks(smem).take(rows >> 4)
    elements = chunks.view(np.uint16).reshape(*rows.shape[:-1], count, 8, 8)
    if transposed:
        elements = np.ascontiguousarray(elements.swapaxes(-1, -2))
    registers = elements.view(np.uint32).reshape(*rows.shape[:-1], count, LANES)
    return [registers[..., i, :] for i in range(count)]


def load_byte_matrices(smem: Array, offsets: Array, count: int) -> list[Array]:
    """Execute ldmatrix.m16n16.trans.b8: 2 * `count` registers, uint32 of the shape of offsets (..., 32).

    Lanes 16i to 16i+15 give the rows of matrix i. Byte k of its register j holds in lane t element (4*(t%4) + k, t/4 + 8*j).
    """
    rows = row_offsets(offsets, 2 * count)
    elements = _chunks(smem).take(rows >> 4).view(np.uint8).reshape(*rows.shape[:-1], count, 16, 16)
    columns = np.ascontiguousarray(elements.swapaxes(-1, -2))
    registers = columns.view(np.uint32).reshape(*rows.shape[:-1], 2 * count, LANES)
    return [registers[..., i, :] for i in range(2 * count)]


def store_matrices(smem: Array, offsets: Array, registers: list[Array], transposed: bool) -> None:
    """Execute stmatrix: write the registers (uint32 of the shape of offsets) to smem, warps in order, rows of a warp too."""
    count = len(registers)
    rows = row_offsets(offsets, count)
    words = np.stack(registers, axis=-2).astype(np.uint32, copy=False)
    elements = words.view(np.uint16).reshape(*rows.shape[:-1], count, 8, 8)
    if transposed:
        elements = np.ascontiguousarray(elements.swapaxes(-1, -2))
    _chunks(smem)[rows >> 4] = elements.view(_ROW).reshape(rows.shape)


def transpose_matrix(register: Array) -> Array:
    """Execute movmatrix: return a register (uint32 of the shape (..., 32)) that holds the transposed matrix."""
    elements = np.ascontiguousarray(register).view(np.uint16).reshape(*register.shape[:-1], 8, 8)
    return np.ascontiguousarray(elements.swapaxes(-1, -2)).view(np.uint32).reshape(register.shape)


def store_byte_matrices(smem: Array, offsets: Array, registers: list[Array]) -> None:
    """Execute stmatrix.m16n8.trans.b8: each column of a 16x8 matrix of bytes goes to one row of shared memory.

    Lane t holds elements (t/4, 2*(t%4)) and (t/4, 2*(t%4)+1) of a matrix, then those of row t/4 + 8.
    """
    count = len(registers)
    rows = row_offsets(offsets, count)
    words = np.stack(registers, axis=-2).astype(np.uint32, copy=False)
    elements = words.view(np.uint8).reshape(*rows.shape[:-1], count, 8, 4, 2, 2)  # row % 8, column // 2, row // 8, column % 2
    columns = np.moveaxis(elements, (-3, -1, -2, -4), (-4, -3, -2, -1)).reshape(*rows.shape, ROW_BYTES)
    _chunks(smem)[rows >> 4] = np.ascontiguousarray(columns).view(_ROW).reshape(rows.shape)

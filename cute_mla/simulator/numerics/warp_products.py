"""mma.sync.m16n8k16 and m16n8k32: products of a warp, whose operands and sums lie in its registers.

Lane 4g + t holds of A rows g and g + 8, of B column g, in depth two floats of 16 bits from 2t on, or four of 8 bits from 4t on, and those
8 or 16 further; of D rows g and g + 8 in columns 2t and 2t + 1.
Arrays are (warps, 32), one word or float for each lane.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .elementwise import FP8_FORMATS, fp8_to_f32, half_to_f32

Array = npt.NDArray[Any]

_NO_SCALE = 0xFF  # of UE8M0: NaN
_ROW_LANES, _COLUMN_LANES = (0, 1), (0,)  # of a quad, whose scales are those of rows g and g + 8, of column g


def operand_of_rows(words: list[Array], kind: str) -> Array:
    """Return A (warps, 16, depth) of four registers."""
    upper, lower, upper_far, lower_far = (_floats(word, kind) for word in words)
    return np.concatenate([np.concatenate([upper, upper_far], 2), np.concatenate([lower, lower_far], 2)], 1)


def operand_of_columns(words: list[Array], kind: str) -> Array:
    """Return B (warps, 8, depth), by column, of two registers."""
    return np.concatenate([_floats(word, kind) for word in words], 2)


def _floats(words: Array, kind: str) -> Array:
    """Return (warps, g, half of the depth) of a register."""
    words = np.ascontiguousarray(words, np.uint32)
    floats = fp8_to_f32(words.view(np.uint8), kind) if kind in FP8_FORMATS else half_to_f32(words.view(np.uint16), kind)
    return floats.reshape(len(words), 8, -1).astype(np.float64)


def sums_of_lanes(sums: Array) -> list[Array]:
    """Return the four registers of D (warps, 16, 8)."""
    parts = sums.reshape(-1, 2, 32, 2)  # rows g and g + 8; lane 4g + t; columns 2t and 2t + 1
    return [np.ascontiguousarray(parts[:, half, :, index]) for half in range(2) for index in range(2)]


def scales_of_lanes(words: Array, lanes: tuple[int, ...]) -> Array:
    """Return (warps, rows of A or columns of B, 1) of UE8M0 scales: byte 0 of lane 4g + each of `lanes`, which are 8 rows further each."""
    codes = np.ascontiguousarray(words, np.uint32).view(np.uint8).reshape(-1, 8, 4, 4)[..., 0]
    chosen = np.concatenate([codes[..., lane] for lane in lanes], 1)
    return np.where(chosen == _NO_SCALE, np.nan, np.ldexp(1.0, chosen.astype(np.int32) - 127))[..., None]


def multiply(left: list[Array], right: list[Array], addend: list[Array], kind: str, scales: tuple[Array, ...] = ()) -> list[Array]:
    """Return the registers of A B + C, in f32. Products and sums are exact in float64 but for its own rounding, then rounded once.

    left, right: words. addend: f32. kind: "f16", "bf16" or "e4m3". scales: words of the rows of A and of the columns of B.
    """
    rows, columns = operand_of_rows(left, kind), operand_of_columns(right, kind)
    if scales:
        rows, columns = rows * scales_of_lanes(scales[0], _ROW_LANES), columns * scales_of_lanes(scales[1], _COLUMN_LANES)
    products = rows @ columns.transpose(0, 2, 1)
    return [(part + term).astype(np.float32) for part, term in zip(sums_of_lanes(products), addend, strict=True)]


def poison(left: list[Array], right: list[Array], addend: list[Array], scales: tuple[Array, ...] = ()) -> list[Array]:
    """Return which sums are undefined: those of undefined rows of A or columns of B or scales of theirs, or with an undefined addend."""
    rows = np.concatenate([(left[half] | left[half + 2]).reshape(-1, 8, 4).any(2) for half in range(2)], 1)
    columns = np.asarray((right[0] | right[1]).reshape(-1, 8, 4).any(2))
    if scales:
        rows = rows | np.concatenate([scales[0].reshape(-1, 8, 4)[..., lane] for lane in _ROW_LANES], 1)
        columns = columns | scales[1].reshape(-1, 8, 4)[..., _COLUMN_LANES[0]]
    return [part | term for part, term in zip(sums_of_lanes(rows[:, :, None] | columns[:, None, :]), addend, strict=True)]

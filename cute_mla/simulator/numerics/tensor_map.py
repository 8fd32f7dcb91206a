"""Description of a TMA tensor map, as cuTensorMapEncodeTiled takes it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Swizzle(StrEnum):
    """Swizzle of a box in shared memory: the span in bytes within which 16-byte chunks are XORed."""

    NONE = "none"
    B32 = "32B"
    B64 = "64B"
    B128 = "128B"


@dataclass(frozen=True)
class TensorMap:
    """One tiled tensor map.

    dtype: element type name ("bf16", "fp16", "fp32", "u8", "i32").
    address: global address of element 0, a multiple of 16.
    dims: extents in elements, innermost first, rank 1 to 5.
    strides: bytes between neighbours along dims 1, 2, ..., each a multiple of 16 (dim 0 is contiguous).
    box: extents of the box that one TMA instruction moves, innermost first, each 1 to 256.
    """

    dtype: str
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: Swizzle = Swizzle.NONE

"""wgmma.mma_async: descriptors, operands in shared memory and in registers, accumulators, and the product itself.

An operand is read as whole 16-byte chunks: its descriptor gives an array of absolute chunk indices, made once per descriptor, so that
reading is one gather. A run of wgmmas on one accumulator may be read as one operand of the summed depth and multiplied at once.

Shapes: A (64, k), B (n, k), D (64, n); registers (register, thread) with the 128 threads of the warpgroup. Products are summed in
f64, rounded to f32 after every ROUNDED instructions and added to D; integers are exact. The hardware sums in another order and rounds more
often. Bad opcodes, descriptors and ranges raise ValueError.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import elementwise
from .blas import products, rounded
from .tensor_map import Swizzle
from .tma import CHUNK, SWIZZLE_SPAN, swizzle_chunks

Array = npt.NDArray[Any]

M = 64
THREADS = 128
DEPTH_BYTES = 32  # bytes of one row of A or B along k
ROUNDED = 4  # instructions whose products are rounded together: 128 bytes of depth, a row of a swizzled box
_CHUNK = np.dtype("V16")
_ITEM_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
_FP8 = ("e4m3", "e5m2")
_INT8 = ("s8", "u8")


# ---- opcodes ------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    """One wgmma.mma_async form: D (64, n) of type d += A (64, k) of type a times B (n, k) of type b."""

    n: int
    k: int
    d: str
    a: str
    b: str
    satfinite: bool = False

    @property
    def item_bytes(self) -> int:
        """Return the bytes of an element of A and B."""
        return _ITEM_BYTES[self.a]

    @property
    def accumulator_registers(self) -> int:
        """Return the number of 32-bit registers of D per thread."""
        return self.n // 4 if self.d == "f16" else self.n // 2

    @property
    def transposable(self) -> bool:
        """Return whether the operands end with imm-trans-a, imm-trans-b (those of them that lie in shared memory)."""
        return self.item_bytes == 2

    @property
    def negatable(self) -> bool:
        """Return whether the operands have imm-scale-a and imm-scale-b (all but the integer forms)."""
        return self.d != "s32"


_OPCODE = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)(\.satfinite)?\.(f32|f16|s32)\.(\w+)\.(\w+)")


def _supported(form: Instruction) -> bool:
    if form.a not in _ITEM_BYTES or form.b not in _ITEM_BYTES or form.k * form.item_bytes != DEPTH_BYTES:
        return False
    if form.a in _INT8:
        sizes = form.n % 16 == 0 or form.n in (8, 24)
        return form.b in _INT8 and form.d == "s32" and sizes
    if form.satfinite:
        return False
    if form.a in _FP8:
        return form.b in _FP8 and form.d in ("f16", "f32")
    return form.a == form.b and (form.d == "f32" or (form.d == "f16" and form.a == "f16"))


@lru_cache(maxsize=256)
def parse_opcode(opcode: str) -> Instruction:
    """Return the form of an opcode with all its modifiers. Raises ValueError for a form that is not supported."""
    match = _OPCODE.fullmatch(opcode)
    if match:
        n, k, satfinite, d, a, b = match.groups()
        form = Instruction(int(n), int(k), d, a, b, satfinite is not None)
        if 8 <= form.n <= 256 and form.n % 8 == 0 and _supported(form):
            return form
    raise ValueError(
        f"{opcode} is not supported, only wgmma.mma_async.sync.aligned.m64nNkK{{.satfinite}}.D.A.B with N a multiple of 8 up to 256, "
        f"{DEPTH_BYTES} bytes of K, dense f16, bf16, tf32, e4m3, e5m2, s8 and u8"
    )


# ---- operands in shared memory ------------------------------------------------------------------------------------------------------


class Descriptor(NamedTuple):
    """A decoded shared-memory descriptor; all numbers in bytes. start is a shared offset, without the CTA rank."""

    start: int
    leading: int
    stride: int
    swizzle: Swizzle


_SWIZZLES = (Swizzle.NONE, Swizzle.B128, Swizzle.B64, Swizzle.B32)
_FIELD = 0x3FFF
_BASE_OFFSET = 7 << 49
_RESERVED = ((1 << 64) - 1) & ~(_FIELD | _FIELD << 16 | _FIELD << 32 | _BASE_OFFSET | 3 << 62)


def decode_descriptor(descriptor: int) -> Descriptor:
    """Return the fields of a 64-bit descriptor. Raises ValueError for a base offset or reserved bits that are not zero."""
    if descriptor & (_BASE_OFFSET | _RESERVED):
        raise ValueError(f"wgmma descriptor {descriptor:#018x}: a base offset and reserved bits other than 0 are not supported")
    return Descriptor(
        start=(descriptor & _FIELD) << 4,
        leading=(descriptor >> 16 & _FIELD) << 4,
        stride=(descriptor >> 32 & _FIELD) << 4,
        swizzle=_SWIZZLES[descriptor >> 62],
    )


def _operand_chunks(descriptor: Descriptor, extent: int, mn_major: bool) -> Array:
    """Return absolute chunk indices: K-major (extent, 2 chunks along k); MN-major, 16-bit only, (16 k, extent / 8 chunks)."""
    start, leading, stride, swizzle = descriptor
    span = SWIZZLE_SPAN[swizzle]
    if mn_major:
        k = np.arange(DEPTH_BYTES // 2, dtype=np.intp)[:, None]
        byte = np.arange(extent * 2 // CHUNK, dtype=np.intp)[None, :] * CHUNK
        if swizzle is Swizzle.NONE:
            offset = (k // 8) * leading + (k % 8) * CHUNK + (byte // CHUNK) * stride
        else:
            offset = (k // 8) * stride + (k % 8) * span + (byte // span) * leading + byte % span
    else:
        row = np.arange(extent, dtype=np.intp)[:, None]
        byte = np.arange(DEPTH_BYTES // CHUNK, dtype=np.intp)[None, :] * CHUNK
        along_k = (byte // CHUNK) * leading if swizzle is Swizzle.NONE else byte
        offset = (row // 8) * stride + (row % 8) * span + along_k
    return swizzle_chunks((start + offset) // CHUNK, swizzle)


class Operand:
    """Place in shared memory of an operand, or of the operands of a run of wgmmas side by side along k.

    chunks: absolute indices of 16-byte chunks; K-major (extent, chunks along k), MN-major (k, chunks along the extent).
    """

    def __init__(self, chunks: Array, mn_major: bool) -> None:
        chunks.flags.writeable = False
        self.chunks = chunks
        self.mn_major = mn_major
        self.words: Array | None = None  # cached by checks/races.py

    @cached_property
    def touched(self) -> Array:
        """Return the distinct chunk indices, ascending."""
        return np.unique(self.chunks)

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Return the distinct byte ranges [start, stop) of shared memory that are read, ascending."""
        starts = self.touched[np.r_[True, np.diff(self.touched) > 1]]
        stops = self.touched[np.r_[np.diff(self.touched) > 1, True]] + 1
        return tuple((int(start) * CHUNK, int(stop) * CHUNK) for start, stop in zip(starts, stops, strict=True))

    def read(self, smem: Array) -> Array:
        """Return the raw chunks of shared memory (uint8), in the shape of `chunks`. Raises ValueError if they are not all inside it."""
        try:
            return smem[: smem.size & -CHUNK].view(_CHUNK).take(self.chunks)
        except IndexError as error:
            low, high = self.ranges[0][0], self.ranges[-1][1]
            raise ValueError(f"wgmma operand: shared bytes {low:#x} to {high:#x} are not within 0 to {smem.size:#x}") from error


def overlapping(ranges: tuple[tuple[int, int], ...], low: int, high: int) -> tuple[tuple[int, int], ...]:
    """Return those of an operand's byte ranges that meet [low, high)."""
    return ranges[bisect_right(ranges, low, key=itemgetter(1)) : bisect_left(ranges, high, key=itemgetter(0))]


@lru_cache(maxsize=2048)
def operand(descriptors: tuple[int, ...], extent: int, mn_major: bool = False) -> Operand:
    """Return the operand of one wgmma, or of several in a row, from their descriptors; extent: 64 for A, n for B.

    mn_major: imm-trans is 1 (16-bit elements only). Raises ValueError for a descriptor that is not supported.
    """
    parts = [_operand_chunks(decode_descriptor(value), extent, mn_major) for value in descriptors]
    return Operand(parts[0] if len(parts) == 1 else np.concatenate(parts, axis=0 if mn_major else 1), mn_major)


def _tf32(raw: Array) -> Array:
    return (raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)  # the hardware ignores the low 13 bits


TO_F32: dict[str, Callable[[Array], Array]] = {
    "f16": lambda raw: elementwise.f16_to_f32(raw.view(np.uint16)),
    "bf16": lambda raw: elementwise.bf16_to_f32(raw.view(np.uint16)),
    "tf32": _tf32,
    "e4m3": lambda raw: elementwise.fp8_to_f32(raw.view(np.uint8), "e4m3"),
    "e5m2": lambda raw: elementwise.fp8_to_f32(raw.view(np.uint8), "e5m2"),
    "s8": lambda raw: raw.view(np.int8).astype(np.float32),
    "u8": lambda raw: raw.view(np.uint8).astype(np.float32),
}


def operand_values(where: Operand, smem: Array, dtype: str) -> Array:
    """Return the elements of an operand as float32 (extent, k), exactly. Raises ValueError if it is not all inside smem (uint8)."""
    values = TO_F32[dtype](where.read(smem))
    return values.T if where.mn_major else values


# ---- registers ----------------------------------------------------------------------------------------------------------------------


def a_from_registers(registers: Array, dtype: str) -> Array:
    """Return A as float32 (64, k) from its four uint32 registers per thread, shape (4, 128).

    Register j of a thread holds row 16*warp + lane/4 + 8*(j%2) and the 4/size elements from k = (lane%4 + 4*(j/2)) * 4/size on.
    """
    ordered = np.ascontiguousarray(registers, dtype=np.uint32).reshape(2, 2, 4, 8, 4).transpose(2, 1, 3, 0, 4)
    return TO_F32[dtype](np.ascontiguousarray(ordered).reshape(M, DEPTH_BYTES // 4))


@lru_cache(maxsize=64)
def accumulator_map(n: int, dtype: str) -> tuple[Array, Array]:
    """Return the rows and columns of D that the accumulator registers hold.

    f32 and s32: two arrays (n/2 registers, 128 threads). f16: two arrays (n/4, 128, 2), the lower half of a register first.
    """
    thread = np.arange(THREADS)
    warp, lane = thread // 32, thread % 32
    if dtype == "f16":
        register = np.arange(n // 4)[:, None, None]
        half = np.arange(2)
        row = (16 * warp + lane // 4)[:, None] + 8 * (register % 2) + 0 * half
        column = 8 * (register // 2) + (2 * (lane % 4))[:, None] + half
    else:
        register = np.arange(n // 2)[:, None]
        row = 16 * warp + lane // 4 + 8 * ((register // 2) % 2)
        column = 8 * (register // 4) + 2 * (lane % 4) + register % 2
    return row, column


@lru_cache(maxsize=64)
def _tile_index(n: int) -> Array:
    """Return the position in the flat tile of each (register, thread) of an f32 or s32 accumulator."""
    row, column = accumulator_map(n, "f32")
    return row * n + column


@lru_cache(maxsize=64)
def _register_index(n: int) -> Array:
    """Return the flat (register, thread) that holds each position of the flat tile."""
    index = np.empty(M * n, dtype=np.intp)
    index[_tile_index(n).reshape(-1)] = np.arange(M * n)
    return index.reshape(M, n)


def registers_to_tile(registers: Array, n: int, dtype: str) -> Array:
    """Return the accumulator D (64, n) in float32, int32 or float16 from its registers: (n/2 or n/4, 128) of any 32-bit type."""
    words = np.ascontiguousarray(registers)
    if dtype == "f16":
        pairs = words.reshape(n // 8, 2, 4, 8, 4).transpose(2, 1, 3, 0, 4)
        return np.ascontiguousarray(pairs).view(np.float16).reshape(M, n)
    tile = words.reshape(-1).take(_register_index(n))
    return tile.view(np.int32 if dtype == "s32" else np.float32)


def tile_to_registers(tile: Array, dtype: str) -> Array:
    """Return the uint32 registers (n/2 or n/4, 128) of an accumulator tile (64, n) as registers_to_tile returns it."""
    n = tile.shape[1]
    tile = np.ascontiguousarray(tile)
    if dtype == "f16":
        pairs = tile.view(np.uint32).reshape(4, 2, 8, n // 8, 4).transpose(3, 1, 0, 2, 4)
        return np.ascontiguousarray(pairs).reshape(n // 4, THREADS)
    return tile.view(np.uint32).reshape(-1).take(_tile_index(n))


# ---- the product --------------------------------------------------------------------------------------------------------------------


def multiply_accumulate(form: Instruction, a: Array, b: Array, c: Array | None, negate: bool = False) -> Array:
    """Return D (64, n) = a b^T + c, with a (64, k) and b (n, k) in float32, k any multiple of the instruction's.

    c: the accumulator tile, None with scale-d 0 (it is then not read). negate: imm-scale-a * imm-scale-b is -1. float32 sums are rounded
    after every ROUNDED instructions, so that a product has the same bits if others follow from A in registers or in shared memory.
    Returns float32, float16 (rounded once from the f32 sum) or int32, wrapping or, with satfinite, clamped.
    """
    if form.d != "s32":
        for first in range(0, a.shape[1], depth := ROUNDED * form.k):
            product = rounded(products(a[:, first : first + depth], b[:, first : first + depth]))
            if negate:
                np.negative(product, out=product)
            c = product if c is None else np.add(product, c, out=product)
        assert c is not None, "a product has a depth"
        return c if form.d == "f32" else c.astype(np.float16)
    total = products(a, b).astype(np.int64)
    if negate:
        np.negative(total, out=total)
    if c is not None:
        total += c
    if form.satfinite:
        total = np.clip(total, -(2**31), 2**31 - 1)
    return total.astype(np.int32)

"""tcgen05.mma: opcodes, instruction descriptors, shared-memory descriptors, and where the rows of D lie in tensor memory.

Pure functions. Forms that do not exist or are not supported raise ValueError.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .tensor_map import Swizzle
from .tma import CHUNK, SWIZZLE_SPAN, swizzle_chunks
from .wgmma import Operand

Array = npt.NDArray[Any]

DEPTH_BYTES = 32  # bytes of one row of A or B along k
STEP_COLUMNS = DEPTH_BYTES // 4  # columns of A in tensor memory that one instruction takes
ITEM_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}

# ---- opcodes ------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MmaForm:
    """One spelling of tcgen05.mma. group: CTAs. ws: weight stationary. kind: f16, tf32, f8f6f4 or i8."""

    group: int
    ws: bool
    kind: str


_OPCODE = re.compile(
    r"tcgen05\.mma\.cta_group::(?P<group>[12])\.kind::(?P<kind>f16|tf32|f8f6f4|i8)(\.collector::a::(?P<use_a>fill|use|lastuse|discard))?"
    r"|tcgen05\.mma\.ws\.cta_group::1\.kind::(?P<ws>f16|tf32|f8f6f4|i8)"
    r"(\.collector::(?P<buffer>b[0-3])::(?P<use_b>fill|use|lastuse|discard))?"
)


@lru_cache(maxsize=64)
def parse_opcode(opcode: str) -> MmaForm:
    """Return the form of an opcode, without its use of the collector. Raises ValueError for a form that is not supported."""
    match = _OPCODE.fullmatch(opcode)
    if match is None:
        raise ValueError(f"{opcode} is not supported, only dense tcgen05.mma and tcgen05.mma.ws of kind f16, tf32, f8f6f4 and i8")
    if match["ws"]:
        return MmaForm(1, True, match["ws"])
    return MmaForm(int(match["group"]), False, match["kind"])


class CollectorUse(NamedTuple):
    """A product's use of the buffer that keeps an operand. buffer: "a", or "b0" to "b3". usage: "fill", "use", "lastuse" or "discard"."""

    buffer: str
    usage: str


@lru_cache(maxsize=64)
def parse_collector(opcode: str) -> CollectorUse:
    """Return the use of the collector that a supported opcode names, by default discard."""
    match = _OPCODE.fullmatch(opcode)
    assert match is not None
    if match["ws"]:
        return CollectorUse(match["buffer"] or "b0", match["use_b"] or "discard")
    return CollectorUse("a", match["use_a"] or "discard")


# ---- instruction descriptors --------------------------------------------------------------------------------------------------------


class Product(NamedTuple):
    """A decoded instruction descriptor: D (m, n) of type d, A of type a, B of type b. *_mn: MN-major in shared memory."""

    m: int
    n: int
    d: str
    a: str
    b: str
    negate: bool
    a_mn: bool
    b_mn: bool
    saturate: bool

    @property
    def item_bytes(self) -> int:
        """Return the bytes of an element of A and B."""
        return ITEM_BYTES[self.a]


_D_TYPES = {"f16": {0: "f16", 1: "f32"}, "tf32": {1: "f32"}, "f8f6f4": {0: "f16", 1: "f32"}, "i8": {2: "s32"}}
_OPERANDS = {"f16": {0: "f16", 1: "bf16"}, "tf32": {2: "tf32"}, "f8f6f4": {0: "e4m3", 1: "e5m2"}, "i8": {0: "u8", 1: "s8"}}


def _field(value: int, low: int, bits: int) -> int:
    return value >> low & (1 << bits) - 1


@lru_cache(maxsize=256)
def decode_instruction(form: MmaForm, descriptor: int) -> Product:
    """Return the fields of a 32-bit instruction descriptor. Raises ValueError for reserved bits, types and shapes that do not exist."""
    where = f"instruction descriptor {descriptor:#010x}"
    if descriptor & (7 | 1 << 6 | 1 << 23 | 1 << 29):
        raise ValueError(f"{where}: sparsity and reserved bits (0 to 2, 6, 23, 29) must be 0")
    if descriptor >> 30 and not form.ws:
        raise ValueError(f"{where}: bits 30 and 31 are for tcgen05.mma.ws only")
    d = _D_TYPES[form.kind].get(_field(descriptor, 4, 2))
    a = _OPERANDS[form.kind].get(_field(descriptor, 7, 3))
    b = _OPERANDS[form.kind].get(_field(descriptor, 10, 3))
    if d is None or a is None or b is None:
        raise ValueError(f"{where}: no such types of D, A and B in kind {form.kind}, or 6- and 4-bit types, which are not supported")
    if form.kind == "f16" and (a != b or (d == "f16" and a != "f16")):
        raise ValueError(f"{where}: {d} += {a} x {b} does not exist")
    integer = form.kind == "i8"
    if (descriptor >> 3 & 1 and not integer) or (descriptor >> 13 & 3 and integer):
        raise ValueError(f"{where}: saturation is for integers, negation for floating point")
    m, n = _field(descriptor, 24, 5) << 4, _field(descriptor, 17, 6) << 3
    check_shape(form, m, n, where)
    negate = bool((descriptor >> 13 ^ descriptor >> 14) & 1)
    return Product(m, n, d, a, b, negate, bool(descriptor >> 15 & 1), bool(descriptor >> 16 & 1), bool(descriptor >> 3 & 1))


def check_shape(form: MmaForm, m: int, n: int, where: str) -> None:
    """Raise ValueError for an M and N that the form does not have."""
    if form.ws:
        good, text = m in (32, 64, 128) and n in (64, 128, 256), "M 32, 64 or 128 and N 64, 128 or 256"
    elif form.group == 2:
        good, text = m in (128, 256) and 16 <= n <= 256 and n % 16 == 0, "M 128 or 256 and N a multiple of 16 up to 256"
    elif form.kind == "i8":
        good = m in (64, 128) and (n in (8, 24) or (16 <= n <= 256 and n % 16 == 0))
        text = "M 64 or 128 and N 8, 24 or a multiple of 16 up to 256"
    else:
        # The PTX ISA wants multiples of 16 for M 128; NVIDIA's mixed-input decode GEMM uses N 8.
        good, text = m in (64, 128) and 8 <= n <= 256, "M 64 or 128 and N a multiple of 8 up to 256"
    if not good:
        raise ValueError(f"{where}: M {m}, N {n}; this form has {text}")


# ---- shared-memory descriptors ------------------------------------------------------------------------------------------------------


class Descriptor(NamedTuple):
    """A decoded shared-memory descriptor; all numbers in bytes. wide_atom: 128-byte swizzle of 32-byte atoms."""

    start: int
    leading: int
    stride: int
    swizzle: Swizzle
    wide_atom: bool


_SWIZZLES = {0: Swizzle.NONE, 1: Swizzle.B128, 2: Swizzle.B128, 4: Swizzle.B64, 6: Swizzle.B32}
_RESERVED = 3 << 14 | 3 << 30 | 0xFF << 53
_VERSION = 1 << 46
_BASE_OFFSET = 7 << 49
_ABSOLUTE = 1 << 52


def decode_descriptor(descriptor: int) -> Descriptor:
    """Return the fields of a 64-bit descriptor. Raises ValueError for one that does not exist or is not supported."""
    where = f"shared memory descriptor {descriptor:#018x}"
    if descriptor & 7 << 46 != _VERSION:
        raise ValueError(f"{where}: bits 46 to 48 must be 0b001")
    if descriptor & _RESERVED:
        raise ValueError(f"{where}: reserved bits (14, 15, 30, 31, 53 to 60) must be 0")
    if descriptor & (_BASE_OFFSET | _ABSOLUTE):
        raise ValueError(f"{where}: a base offset and an absolute leading dimension are not supported")
    layout = descriptor >> 61
    if layout not in _SWIZZLES:
        raise ValueError(f"{where}: swizzle {layout} does not exist")
    return Descriptor(
        _field(descriptor, 0, 14) << 4, _field(descriptor, 16, 14) << 4, _field(descriptor, 32, 14) << 4, _SWIZZLES[layout], layout == 1
    )


def permute(chunks: Array, where: Descriptor) -> Array:
    """Return absolute chunk indices after the swizzle."""
    if where.wide_atom:
        return chunks ^ ((chunks >> 3) & 3) << 1
    return swizzle_chunks(chunks, where.swizzle)


def operand_chunks(where: Descriptor, extent: int, mn_major: bool, item: int) -> Array:
    """Return absolute chunk indices: K-major (extent, 2 chunks along k); MN-major (k, chunks along the extent)."""
    span = SWIZZLE_SPAN[where.swizzle]
    if mn_major:
        k = np.arange(DEPTH_BYTES // item, dtype=np.intp)[:, None]
        byte = np.arange(-(-extent * item // CHUNK), dtype=np.intp)[None, :] * CHUNK
        if where.swizzle is Swizzle.NONE:
            offset = (k // 8) * where.leading + (k % 8) * CHUNK + (byte // CHUNK) * where.stride
        else:
            rows = 4 if where.wide_atom else 8
            offset = (k // rows) * where.stride + (k % rows) * span + (byte // span) * where.leading + byte % span
    else:
        row = np.arange(extent, dtype=np.intp)[:, None]
        byte = np.arange(DEPTH_BYTES // CHUNK, dtype=np.intp)[None, :] * CHUNK
        along_k = (byte // CHUNK) * where.leading if where.swizzle is Swizzle.NONE else byte
        offset = (row // 8) * where.stride + (row % 8) * span + along_k
    return permute((where.start + offset) // CHUNK, where)


@lru_cache(maxsize=8192)
def operand(descriptors: tuple[int, ...], extent: int, mn_major: bool, item: int) -> Operand:
    """Return the operand of one product, or of several side by side along k, from their descriptors. item: bytes of an element.

    Raises ValueError for a descriptor or major-ness that is not supported.
    """
    decoded = [decode_descriptor(value) for value in descriptors]
    for where in decoded:
        if mn_major and (item == 4) != where.wide_atom and where.swizzle is not Swizzle.NONE:
            raise ValueError("MN-major operands of 4-byte elements, and only those, have the 128-byte swizzle of 32-byte atoms")
    parts = [operand_chunks(where, extent, mn_major, item) for where in decoded]
    return Operand(parts[0] if len(parts) == 1 else np.concatenate(parts, axis=0 if mn_major else 1), mn_major)


# ---- D in tensor memory -------------------------------------------------------------------------------------------------------------


class Slab(NamedTuple):
    """Lanes of one CTA whose D columns are the product of its rows of A with some rows of B.

    lanes: of D, and of A in tensor memory. rows: of A in shared memory. low, high: the columns of the whole D.
    """

    lanes: slice | Array
    rows: slice
    low: int
    high: int


@lru_cache(maxsize=64)
def slabs(form: MmaForm, m: int, n: int, first_lane: int) -> tuple[Slab, ...]:
    """Return the slabs of D in each CTA. Raises ValueError for a first lane that the layout does not allow."""
    if first_lane and not (m == 64 and form.group == 1 and not form.ws and first_lane == 16):
        raise ValueError(f"D of M {m} at lane {first_lane}")
    if form.ws:
        parts = 128 // m
        return tuple(Slab(slice(m * i, m * i + m), slice(0, m), n // parts * i, n // parts * (i + 1)) for i in range(parts))
    if form.group == 2 and m == 128:
        return tuple(Slab(slice(64 * i, 64 * i + 64), slice(0, 64), n // 2 * i, n // 2 * (i + 1)) for i in range(2))
    if m == 64:
        row = np.arange(64)
        return (Slab(row // 16 * 32 + row % 16 + first_lane, slice(0, 64), 0, n),)
    return (Slab(slice(0, 128), slice(0, 128), 0, n),)


def lane_blocks(form: MmaForm, m: int, first_lane: int) -> int:
    """Return the blocks of 16 lanes that D covers, as a bit mask."""
    if m == 64 and form.group == 1 and not form.ws:
        return 0xAA if first_lane else 0x55
    return 0xFF


def footprint(form: MmaForm, product: Product) -> int:
    """Return the number of columns of tensor memory that D takes."""
    if form.ws:
        return product.n * product.m // 128
    return product.n // 2 if form.group == 2 and product.m == 128 else product.n

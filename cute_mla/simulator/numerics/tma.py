"""Boxes of tiled tensor maps: where each 16-byte chunk lies in shared and in global memory, and moving them.

A box is linear in shared memory (dimension 0 innermost, rows packed), except that the swizzle permutes the 16-byte chunks by their absolute
address. Elements outside the tensor are filled with zeros by a load, and left out by a store or a reduction. A transaction always
counts the whole box.

Kernels move the same box at thousands of coordinates, so everything but the global offset is cached: by box, alignment of the
destination and the part of the box that lies inside the tensor.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import elementwise
from .tensor_map import Swizzle, TensorMap

Array = npt.NDArray[Any]

CHUNK = 16  # bytes that move together under every swizzle
SWIZZLE_PERIOD = 1024  # bytes after which every swizzle pattern repeats
DESTINATION_ALIGNMENT = 128
_MAX_BOX = 256

SWIZZLE_SPAN = {Swizzle.NONE: CHUNK, Swizzle.B32: 32, Swizzle.B64: 64, Swizzle.B128: 128}
_SWIZZLE_MASK = {Swizzle.NONE: 0, Swizzle.B32: 1, Swizzle.B64: 3, Swizzle.B128: 7}

_ITEM_TYPES: dict[str, npt.DTypeLike] = {
    "u8": np.uint8,
    "u16": np.uint16,
    "fp16": np.float16,
    "bf16": np.uint16,
    "u32": np.uint32,
    "i32": np.int32,
    "fp32": np.float32,
    "u64": np.uint64,
    "i64": np.int64,
    "fp64": np.float64,
}
ITEM_BYTES = {name: np.dtype(item).itemsize for name, item in _ITEM_TYPES.items()}
_UNIT_TYPES = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)} | {CHUNK: np.dtype("V16")}


def swizzle_chunks(chunks: Array, swizzle: Swizzle) -> Array:
    """Swizzle absolute indices of 16-byte chunks (address / 16); an involution."""
    return chunks ^ ((chunks >> 3) & _SWIZZLE_MASK[swizzle])


# ---- geometry -----------------------------------------------------------------------------------------------------------------------


def validate(tensor_map: TensorMap) -> None:
    """Check what the hardware's encoder checks. Raises ValueError with the values."""
    rank = len(tensor_map.dims)
    if tensor_map.dtype not in ITEM_BYTES:
        raise ValueError(f"tensor map: dtype {tensor_map.dtype!r} is not supported, only {', '.join(ITEM_BYTES)}")
    if not 1 <= rank <= 5 or len(tensor_map.box) != rank or len(tensor_map.strides) != rank - 1:
        raise ValueError(
            f"tensor map: dims {tensor_map.dims}, strides {tensor_map.strides}, box {tensor_map.box}: rank must be 1 to 5, with one stride "
            "less than dims and as many box extents"
        )
    if tensor_map.address % 16:
        raise ValueError(f"tensor map: address {tensor_map.address:#x} is not a multiple of 16")
    if not all(1 <= extent <= 2**32 for extent in tensor_map.dims):
        raise ValueError(f"tensor map: dims {tensor_map.dims} must each be 1 to 2**32")
    if not all(0 <= stride < 2**40 and stride % 16 == 0 for stride in tensor_map.strides):
        raise ValueError(f"tensor map: strides {tensor_map.strides} must be multiples of 16 bytes below 2**40")
    if not all(1 <= extent <= _MAX_BOX for extent in tensor_map.box):
        raise ValueError(f"tensor map: box {tensor_map.box} must be 1 to {_MAX_BOX} in each dimension")
    inner = tensor_map.box[0] * ITEM_BYTES[tensor_map.dtype]
    if inner % CHUNK:
        raise ValueError(f"tensor map: a box row of {inner} bytes is not a multiple of {CHUNK}")
    if tensor_map.swizzle is not Swizzle.NONE and inner > SWIZZLE_SPAN[tensor_map.swizzle]:
        raise ValueError(f"tensor map: a box row of {inner} bytes exceeds the swizzle span of {SWIZZLE_SPAN[tensor_map.swizzle]}")


class _Layout(NamedTuple):
    """The shared-memory side of a box; indices count units from the swizzle period that holds the destination.

    unit: bytes of an item that moves as one. inside: index of each item inside the tensor, shape outermost dimension first.
    outside: flat indices of the others, None if there are none. low, high: bytes touched, from the start of that period.
    """

    unit: int
    inside: Array
    outside: Array | None
    low: int
    high: int


@lru_cache(maxsize=2048)
def _layout(box: tuple[int, ...], itemsize: int, swizzle: Swizzle, phase: int, low: tuple[int, ...], high: tuple[int, ...]) -> _Layout:
    """Return the layout of a box whose elements low <= index < high lie inside the tensor; phase: destination % SWIZZLE_PERIOD."""
    whole_chunks = (low[0] * itemsize) % CHUNK == 0 and (high[0] * itemsize) % CHUNK == 0
    unit = CHUNK if whole_chunks else itemsize
    per_chunk = CHUNK // unit
    shape = (*reversed(box[1:]), box[0] * itemsize // unit)
    linear = phase // unit + np.arange(int(np.prod(shape)), dtype=np.intp)
    swizzled = swizzle_chunks(linear // per_chunk, swizzle) * per_chunk + linear % per_chunk
    index = swizzled.reshape(shape)
    window = (
        *(slice(start, stop) for start, stop in zip(low[:0:-1], high[:0:-1], strict=True)),
        slice(low[0] * itemsize // unit, high[0] * itemsize // unit),
    )
    outside: Array | None = None
    if index[window].size < index.size:
        mask = np.ones(shape, dtype=bool)
        mask[window] = False
        outside = index[mask]
    inside = np.ascontiguousarray(index[window])
    inside.flags.writeable = False
    return _Layout(unit, inside, outside, int(index.min()) * unit, (int(index.max()) + 1) * unit)


class Box(NamedTuple):
    """One box at its place.

    tensor_map: the map. nbytes: what the transaction counts, the whole box whatever lies outside the tensor.
    smem_base: shared offset that the layout counts from. layout: the shared-memory side.
    gmem_offset: bytes from the map's address to the first element inside the tensor. gmem_strides: bytes, outermost dimension first.
    """

    tensor_map: TensorMap
    nbytes: int
    smem_base: int
    layout: _Layout
    gmem_offset: int
    gmem_strides: tuple[int, ...]

    @property
    def smem_range(self) -> tuple[int, int]:
        """Return the first shared offset touched and the end of the last; a box of whole swizzle spans touches all between."""
        return self.smem_base + self.layout.low, self.smem_base + self.layout.high

    @property
    def gmem_range(self) -> tuple[int, int]:
        """Return the lowest global address touched and the one after the highest; equal if the box lies wholly outside the tensor."""
        first = self.tensor_map.address + self.gmem_offset
        shape = self.layout.inside.shape
        if 0 in shape:
            return first, first
        last = sum((extent - 1) * stride for extent, stride in zip(shape, self.gmem_strides, strict=True))
        return first, first + last + self.layout.unit

    def gmem_rows(self) -> tuple[Array, int]:
        """Return the global addresses (int64) of the contiguous rows that are touched, and the bytes of each row."""
        shape = self.layout.inside.shape
        starts = np.full(1, self.tensor_map.address + self.gmem_offset, dtype=np.int64)
        for extent, stride in zip(shape[:-1], self.gmem_strides[:-1], strict=True):
            starts = (starts[:, None] + np.arange(extent, dtype=np.int64) * stride).reshape(-1)
        return starts, shape[-1] * self.layout.unit


def _check_alignment(smem_offset: int) -> None:
    if smem_offset % DESTINATION_ALIGNMENT:
        raise ValueError(f"TMA: shared offset {smem_offset:#x} is not a multiple of {DESTINATION_ALIGNMENT}")


class BoxPlan:
    """Plan of one tensor map, which places its boxes."""

    def __init__(self, tensor_map: TensorMap) -> None:
        """Raise ValueError if the map is not valid."""
        validate(tensor_map)
        self.tensor_map = tensor_map
        self.itemsize = ITEM_BYTES[tensor_map.dtype]
        self.nbytes = int(np.prod(tensor_map.box)) * self.itemsize
        self._strides = (self.itemsize, *tensor_map.strides)
        self._outer_strides = tuple(reversed(tensor_map.strides))
        self._origin = (0,) * len(tensor_map.dims)

    def place(self, coordinates: tuple[int, ...], smem_offset: int) -> Box:
        """Return the box whose first element has these coordinates (innermost first, may be outside), at this offset in shared memory.

        Raises ValueError for a wrong number of coordinates or a misaligned offset.
        """
        if len(coordinates) != len(self.tensor_map.box):
            raise ValueError(f"TMA: coordinates {coordinates} for a tensor map of rank {len(self.tensor_map.box)}")
        _check_alignment(smem_offset)
        return self._place(coordinates, smem_offset)

    def place_rows(self, column: int, rows: tuple[int, ...], smem_offset: int) -> tuple[Box, ...]:
        """Return the rows (any, in any order, may be outside) that tile::gather4 and tile::scatter4 move as one box of four rows.

        Raises ValueError for a map that is not of rank 2 with boxes of one row, or a misaligned offset.
        """
        tensor_map = self.tensor_map
        if len(tensor_map.box) != 2 or tensor_map.box[1] != 1:
            raise ValueError(f"TMA: gather4 and scatter4 need a tensor map of rank 2 with boxes of one row, not boxes of {tensor_map.box}")
        _check_alignment(smem_offset)
        return tuple(self._place((column, row), smem_offset + place * self.nbytes) for place, row in enumerate(rows))

    def _place(self, coordinates: tuple[int, ...], smem_offset: int) -> Box:
        tensor_map = self.tensor_map
        extents = tensor_map.box
        low, high = self._origin, extents
        offset = 0
        for start, extent, size, stride in zip(coordinates, extents, tensor_map.dims, self._strides, strict=True):
            if start < 0 or start + extent > size:
                low, high = self._clip(coordinates)
                return self._at(coordinates, smem_offset, low, high)
            offset += start * stride
        phase = smem_offset % SWIZZLE_PERIOD
        layout = _layout(extents, self.itemsize, tensor_map.swizzle, phase, low, high)
        return Box(tensor_map, self.nbytes, smem_offset - phase, layout, offset, (*self._outer_strides, layout.unit))

    def _clip(self, coordinates: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the bounds of the part of the box inside the tensor; all zero if it is empty."""
        low = tuple(max(0, -start) for start in coordinates)
        high = tuple(min(e, n - start) for e, n, start in zip(self.tensor_map.box, self.tensor_map.dims, coordinates, strict=True))
        if any(stop <= start for start, stop in zip(low, high, strict=True)):
            return self._origin, self._origin
        return low, high

    def _at(self, coordinates: tuple[int, ...], smem_offset: int, low: tuple[int, ...], high: tuple[int, ...]) -> Box:
        phase = smem_offset % SWIZZLE_PERIOD
        layout = _layout(self.tensor_map.box, self.itemsize, self.tensor_map.swizzle, phase, low, high)
        offset = 0
        if layout.inside.size:
            offset = sum((c + start) * stride for c, start, stride in zip(coordinates, low, self._strides, strict=True))
        strides = (*self._outer_strides, layout.unit)
        return Box(self.tensor_map, self.nbytes, smem_offset - phase, layout, offset, strides)


@lru_cache(maxsize=1024)
def plan(tensor_map: TensorMap) -> BoxPlan:
    """Return the plan of a map, made once. Raises ValueError if the map is not valid."""
    return BoxPlan(tensor_map)


# ---- moving -------------------------------------------------------------------------------------------------------------------------
#
# gmem is a contiguous uint8 array whose byte 0 has the global address gmem_address; smem is a CTA's shared memory, uint8. The same calls
# move any byte-per-byte shadow of the two memories.


def _shared_items(box: Box, smem: Array) -> Array:
    return smem[box.smem_base : box.smem_base + box.layout.high].view(_UNIT_TYPES[box.layout.unit])


def _global_items(box: Box, gmem: Array, gmem_address: int) -> Array:
    offset = box.tensor_map.address + box.gmem_offset - gmem_address
    layout = box.layout
    try:
        return np.ndarray(layout.inside.shape, _UNIT_TYPES[layout.unit], gmem.data, offset, box.gmem_strides)
    except (TypeError, ValueError) as error:
        low, high = box.gmem_range
        raise ValueError(
            f"TMA: global bytes {low:#x} to {high:#x} are not within {gmem_address:#x} to {gmem_address + gmem.size:#x}"
        ) from error


def _check_shared(box: Box, smem: Array) -> None:
    low, high = box.smem_range
    if low < 0 or high > smem.size:
        raise ValueError(f"TMA: shared bytes {low:#x} to {high:#x} are not within 0 to {smem.size:#x}")


def load_box(box: Box, gmem: Array, gmem_address: int, smem: Array, fill: int = 0) -> None:
    """Copy global to shared memory; elements outside the tensor become bytes of fill. Raises ValueError if a range leaves its array."""
    _check_shared(box, smem)
    items = _shared_items(box, smem)
    if box.layout.inside.size:
        items[box.layout.inside] = _global_items(box, gmem, gmem_address)
    if box.layout.outside is not None:
        items[box.layout.outside] = np.frombuffer(bytes([fill]) * box.layout.unit, items.dtype)[0]


def store_box(box: Box, gmem: Array, gmem_address: int, smem: Array) -> None:
    """Copy shared to global memory; leave out elements outside the tensor. Raises ValueError if a range leaves its array."""
    _check_shared(box, smem)
    if box.layout.inside.size:
        _global_items(box, gmem, gmem_address)[...] = _shared_items(box, smem).take(box.layout.inside)


def read_shared(box: Box, smem: Array) -> Array:
    """Return the items inside the tensor, as raw units, from shared memory: the read of a store."""
    _check_shared(box, smem)
    return _shared_items(box, smem).take(box.layout.inside)


def write_global(box: Box, gmem: Array, gmem_address: int, items: Array) -> None:
    """Write items that read_shared() returned to global memory."""
    if box.layout.inside.size:
        _global_items(box, gmem, gmem_address)[...] = items


def add_box(box: Box, gmem: Array, gmem_address: int, smem: Array) -> None:
    """Add shared to global memory in the map's dtype (cp.reduce.async.bulk.tensor.add), each sum rounded to nearest even."""
    _check_shared(box, smem)
    if not box.layout.inside.size:
        return
    target = _global_items(box, gmem, gmem_address)
    added = np.ascontiguousarray(_shared_items(box, smem).take(box.layout.inside))
    old = np.ascontiguousarray(target)
    dtype = box.tensor_map.dtype
    if dtype in ("bf16", "fp16"):
        kind = "bf16" if dtype == "bf16" else "f16"
        total = elementwise.half_arithmetic("add", kind)(old.view(np.uint16), added.view(np.uint16))
    else:
        item = _ITEM_TYPES[dtype]
        total = old.view(item) + added.view(item)
    target[...] = total.view(target.dtype)


# ---- the native 128-byte form -------------------------------------------------------------------------------------------------------

_NATIVE_DTYPES = {
    "u8": 0,
    "u16": 1,
    "u32": 2,
    "i32": 3,
    "u64": 4,
    "i64": 5,
    "fp16": 6,
    "fp32": 7,
    "fp64": 9,
    "bf16": 10,
}
_DTYPE_OF_CODE = {code: name for name, code in _NATIVE_DTYPES.items()}
_NATIVE_SWIZZLES = (Swizzle.NONE, Swizzle.B32, Swizzle.B64, Swizzle.B128)
_NATIVE_KIND = 2  # bits 0-3 of a tiled map
_LARGE_TENSOR_BIT = 1 << 21
_LARGE_TENSOR_BYTES = 128 * 1024
_NATIVE = struct.Struct("<QI4II5I3s5s68x")  # address, flags, strides / 16, their high nibbles, dims - 1, element strides - 1, box - 1


def encode_native_tensor_map(tensor_map: TensorMap) -> bytes:
    """Return the 128 bytes the hardware reads. Raises ValueError if the map is not valid."""
    validate(tensor_map)
    rank = len(tensor_map.dims)
    flags = _NATIVE_KIND | (rank - 1) << 4 | _NATIVE_DTYPES[tensor_map.dtype] << 7
    flags |= _NATIVE_SWIZZLES.index(tensor_map.swizzle) << 13
    extent = tensor_map.dims[-1] * (tensor_map.strides[-1] if rank > 1 else ITEM_BYTES[tensor_map.dtype])
    if extent >= _LARGE_TENSOR_BYTES:
        flags |= _LARGE_TENSOR_BIT
    strides = [stride >> 4 for stride in tensor_map.strides] + [0] * (5 - rank)
    nibbles = sum((stride >> 32) << (4 * i) for i, stride in enumerate(strides))
    dims = [extent - 1 for extent in tensor_map.dims] + [0] * (5 - rank)
    box = bytes(extent - 1 for extent in tensor_map.box) + bytes(5 - rank)
    low = [stride & 0xFFFFFFFF for stride in strides]
    return _NATIVE.pack(tensor_map.address, flags, *low, nibbles, *dims, bytes(3), box)


def decode_native_tensor_map(raw: bytes) -> TensorMap:
    """Return the description of a map in the native form. Raises ValueError if it is not a tiled map of a supported kind."""
    if len(raw) != _NATIVE.size:
        raise ValueError(f"native tensor map: {len(raw)} bytes, must be {_NATIVE.size}")
    address, flags, *words = _NATIVE.unpack(raw)
    element_strides, box_bytes = words[10], words[11]
    rank, code, interleave = ((flags >> 4) & 7) + 1, (flags >> 7) & 15, (flags >> 11) & 3
    if flags & 15 != _NATIVE_KIND or interleave or flags >> 19 & 1 or any(element_strides):
        raise ValueError(
            f"native tensor map: flags {flags:#x}, element strides - 1 {element_strides.hex()}: only tiled maps without interleave, "
            "without the 32-byte atom and with element strides of 1 are supported"
        )
    if code not in _DTYPE_OF_CODE:
        raise ValueError(f"native tensor map: dtype code {code} is not supported, only {sorted(_DTYPE_OF_CODE)}")
    strides = tuple((words[i] | ((words[4] >> (4 * i)) & 15) << 32) << 4 for i in range(rank - 1)) if rank <= 5 else ()
    tensor_map = TensorMap(
        dtype=_DTYPE_OF_CODE[code],
        address=address,
        dims=tuple(extent + 1 for extent in words[5:10][:rank]),
        strides=strides,
        box=tuple(extent + 1 for extent in box_bytes[:rank]),
        swizzle=_NATIVE_SWIZZLES[(flags >> 13) & 3],
    )
    validate(tensor_map)
    return tensor_map

"""Global and shared memory, with a shadow that says which bytes have ever been written."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..findings import Fault
from .access import GlobalAccess, SharedPattern, all_true

_UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
_UNITS: dict[int, np.dtype[Any]] = {**_UNSIGNED, 16: np.dtype("V16"), 32: np.dtype("V32")}
_ONES = b"\1" * 32


@dataclass
class Buffer:
    """A registered piece of host memory. valid: 1 for each byte that has been written, None when all have."""

    name: str
    address: int
    nbytes: int
    writable: bool
    data: np.ndarray
    valid: np.ndarray | None
    _units: dict[int, np.ndarray] = field(default_factory=dict)
    _valid_units: dict[int, np.ndarray] = field(default_factory=dict)

    def units(self, size: int) -> np.ndarray:
        """Return data in units of a size; index 0 is the buffer's first byte."""
        found = self._units.get(size)
        if found is None:
            found = self._units[size] = self.data[: self.nbytes // size * size].view(_UNITS[size])
        return found

    def unit_of(self, total: int, size: int) -> int:
        """Return the bytes that can be moved at once for an access of total bytes in elements of size; 0 for less than an element."""
        return next((unit for unit in (total, size) if self.address % unit == 0), 0)

    def valid_units(self, size: int) -> np.ndarray:
        """Return valid in units of a size."""
        found = self._valid_units.get(size)
        if found is None:
            assert self.valid is not None
            found = self._valid_units[size] = self.valid[: self.nbytes // size * size].view(_UNITS[size])
        return found


class GlobalMemory:
    """Host memory that kernels may touch, at its real addresses."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._starts: list[int] = []

    def add(
        self, name: str, address: int, nbytes: int, *, writable: bool = True, initialised: bool = True, written: np.ndarray | None = None
    ) -> None:
        """Register nbytes at an address. The memory must stay alive for as long as launches use it.

        initialised False: reading a byte before a kernel wrote it gives poison. written (uint8): 1 for each byte that has been written
        so far, which launches go on with. Raises ValueError for an overlap.
        """
        if nbytes <= 0:
            return
        index = bisect_right(self._starts, address)
        neighbours = self.buffers[max(index - 1, 0) : index + 1]
        for other in neighbours:
            if address < other.address + other.nbytes and other.address < address + nbytes:
                raise ValueError(f"buffer {name!r} at {address:#x} ({nbytes} bytes) overlaps {other.name!r}")
        data = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        valid = None if initialised else np.zeros(nbytes, np.uint8) if written is None else written
        self.buffers.insert(index, Buffer(name, address, nbytes, writable, data, valid))
        self._starts.insert(index, address)

    def find(self, low: int, high: int) -> Buffer | None:
        """Return the buffer that holds [low, high), None for none."""
        index = bisect_right(self._starts, low) - 1
        if index < 0:
            return None
        buffer = self.buffers[index]
        return buffer if high <= buffer.address + buffer.nbytes else None

    def describe(self, address: int) -> str:
        """Describe an address in words."""
        index = bisect_right(self._starts, address) - 1
        near = self.buffers[index] if index >= 0 else None
        if near is None:
            return f"global address {address:#x}, below every buffer"
        return f"global address {address:#x}, {address - near.address} bytes from the start of {near.name!r} ({near.nbytes} bytes)"

    def require(self, low: int, high: int, write: bool) -> Buffer:
        """Return the buffer that holds [low, high). Raises Fault when there is none or it is read-only and written."""
        buffer = self.find(low, high)
        if buffer is None:
            raise Fault("out_of_bounds", f"{'write to' if write else 'read of'} {high - low} bytes at {self.describe(low)}")
        if write and not buffer.writable:
            raise Fault("read_only", f"write to {self.describe(low)}, which is read-only")
        return buffer

    def load(self, access: GlobalAccess, size: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Load elements of size bytes: unsigned (elements of an access, lanes), and the mask of poisoned ones (None for none)."""
        total, count = access.nbytes, access.nbytes // size
        buffer = self._common(access, False)
        unit = 0 if buffer is None else buffer.unit_of(total, size)
        if buffer is None or not unit:
            return self._load_each(access.addresses, size, count)
        values = access.take(buffer.units(unit), buffer.address, unit, total // unit).view(_UNSIGNED[size]).reshape(-1, count).T
        poison = None
        if buffer.valid is not None:
            valid = access.take(buffer.valid_units(unit), buffer.address, unit, total // unit)
            known = valid.view(_UNSIGNED[size]) == all_valid(size)
            poison = None if all_true(known) else ~known.reshape(-1, count).T
        return values, poison

    def _common(self, access: GlobalAccess, write: bool) -> Buffer | None:
        """Return the single buffer that all lanes touch, or None when they touch several (checked lane by lane later).

        Raises Fault for misaligned accesses, and where they write to a read-only buffer.
        """
        if not access.aligned:
            check_alignment(access.addresses, access.nbytes, "global")
        buffer = self.find(access.low, access.high)
        if buffer is not None and write and not buffer.writable:
            self.require(access.low, access.high, write)
        return buffer

    def _load_each(self, address: np.ndarray, size: int, count: int) -> tuple[np.ndarray, np.ndarray | None]:
        values = np.zeros((count, address.size), _UNSIGNED[size])
        poison = np.zeros((count, address.size), bool)
        for buffer, lanes, places in self._by_buffer(address.ravel(), size * count, False):
            values[:, lanes] = buffer.data[places].view(_UNSIGNED[size]).T
            if buffer.valid is not None:
                poison[:, lanes] = ~buffer.valid[places].reshape(len(lanes), count, size).all(axis=2).T
        return values, poison if poison.any() else None

    def _by_buffer(self, address: np.ndarray, nbytes: int, write: bool) -> Iterator[tuple[Buffer, np.ndarray, np.ndarray]]:
        """Yield the buffers that lanes access: (buffer, numbers of the lanes, places of their bytes in it [lanes, nbytes]).

        Raises Fault for the first lane whose bytes no buffer holds, or only a read-only one and written.
        """
        left = np.arange(len(address))
        while len(left):
            first = int(address[left[0]])
            buffer = self.require(first, first + nbytes, write)
            offsets = address[left].astype(np.int64) - buffer.address
            inside = (offsets >= 0) & (offsets <= buffer.nbytes - nbytes)
            yield buffer, left[inside], offsets[inside, None] + np.arange(nbytes)
            left = left[~inside]

    def store(self, access: GlobalAccess, values: list[np.ndarray]) -> None:
        """Write values (one array over the lanes per element) of each access; later lanes win."""
        total = access.nbytes
        buffer = self._common(access, True)
        unit = 0 if buffer is None else buffer.unit_of(total, values[0].dtype.itemsize)
        if buffer is None or not unit:
            self._store_each(access.addresses, values)
            return
        dtype = _UNITS[unit]
        access.put(buffer.units(unit), buffer.address, unit, total // unit, packed(values, len(access.addresses)).view(dtype))
        if buffer.valid is not None:
            ones = np.frombuffer(_ONES, dtype, 1)[0]
            access.put(buffer.valid_units(unit), buffer.address, unit, total // unit, ones)

    def _store_each(self, address: np.ndarray, values: list[np.ndarray]) -> None:
        lanes_of = packed(values, address.size).view(np.uint8).reshape(address.size, -1)
        for buffer, lanes, places in self._by_buffer(address.ravel(), lanes_of.shape[1], True):
            buffer.data[places] = lanes_of[lanes]
            if buffer.valid is not None:
                buffer.valid[places] = 1


class SharedMemory:
    """The shared memory of one CTA slot, addressed by offset in the CTA's window."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        padded = -(-nbytes // 1024) * 1024
        self.data = np.zeros(padded, np.uint8)
        self.valid = np.zeros(padded, np.uint8)
        self.views = {size: self.data.view(dtype) for size, dtype in _UNITS.items()}
        self.valid_views = {size: self.valid.view(dtype) for size, dtype in _UNITS.items()}

    def reset(self) -> None:
        """Forget all contents."""
        self.data.fill(0xFF)
        self.valid.fill(0)

    def check(self, low: int, high: int, what: str) -> None:
        """Raise Fault unless [low, high) lies in the memory that the launch asked for."""
        if low < 0 or high > self.nbytes:
            raise Fault("out_of_bounds", f"{what} of shared bytes {low:#x} to {high:#x}; the CTA has {self.nbytes:#x}")

    def require(self, pattern: SharedPattern, nbytes: int, what: str) -> None:
        """Raise Fault for accesses of nbytes that are misaligned or not in the memory that the launch asked for."""
        if pattern.bits & (nbytes - 1):
            check_alignment(pattern.offsets, nbytes, "shared")
        self.check(pattern.low, pattern.high + nbytes, what)

    def load(self, pattern: SharedPattern, size: int, count: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Load count elements of size bytes at each offset: unsigned (count, lanes), and the mask of poisoned ones (None for none)."""
        total = size * count
        self.require(pattern, total, "read")
        index = pattern.index(total)
        values = self.views[total].take(index).view(_UNSIGNED[size]).reshape(-1, count).T
        known = self.valid_views[total].take(index).view(_UNSIGNED[size]) == all_valid(size)
        return values, None if all_true(known) else ~known.reshape(-1, count).T

    def store(self, pattern: SharedPattern, values: list[np.ndarray], poison: list[np.ndarray | None] | None = None) -> None:
        """Write values (one array over the lanes per element). poison marks lanes whose value is not defined. Later lanes win."""
        size, lanes = values[0].dtype.itemsize, len(pattern.offsets)
        total = size * len(values)
        self.require(pattern, total, "write")
        index, unit = pattern.index(total), _UNITS[total]
        self.views[total][index] = packed(values, lanes).view(unit)[:, 0]
        if poison is None:
            self.mark_valid(pattern, total)
        else:
            shadow = [all_valid(size) if bad is None else np.where(bad, _ZERO[size], all_valid(size)) for bad in poison]
            self.valid_views[total][index] = packed(shadow, lanes).view(unit)[:, 0]

    def mark_valid(self, pattern: SharedPattern, nbytes: int) -> None:
        """Record that accesses of nbytes have been written."""
        self.valid_views[nbytes][pattern.index(nbytes)] = np.frombuffer(_ONES, _UNITS[nbytes], 1)[0]


def merged_regions(regions: Iterable[tuple[int, int, str]]) -> Iterator[tuple[str, int, int]]:
    """Yield name, first address and end of regions, given as (first address, end, name), that do not overlap.

    Tensors that interleave, such as slices of one storage, become one region with the names of all.
    """
    ordered = sorted(set(regions))
    while ordered:
        start, stop, name = ordered.pop(0)
        while ordered and ordered[0][0] < stop:
            _, other_stop, other_name = ordered.pop(0)
            stop, name = max(stop, other_stop), name if name == other_name else f"{name}+{other_name}"
        yield name, start, stop


def packed(values: list[np.ndarray], lanes: int) -> np.ndarray:
    """Return the elements of each lane side by side, shape (lanes, elements)."""
    result = np.empty((lanes, len(values)), values[0].dtype)
    for element, value in enumerate(values):
        result[:, element] = value
    return result


_ZERO = {size: np.zeros((), dtype) for size, dtype in _UNSIGNED.items()}
_VALID = {size: np.array(int.from_bytes(b"\1" * size, "little"), dtype) for size, dtype in _UNSIGNED.items()}


def all_valid(size: int) -> np.ndarray:
    """Return the shadow word of `size` written bytes."""
    return _VALID[size]


def check_alignment(address: np.ndarray, total: int, space: str) -> None:
    """Raise Fault unless every address is a multiple of total bytes."""
    if total > 1 and int(np.bitwise_or.reduce(address, axis=None)) & (total - 1):
        bad = next(int(value) for value in address.ravel() if int(value) % total)
        raise Fault("misaligned", f"{space} access of {total} bytes at {bad:#x}")

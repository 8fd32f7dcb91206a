"""Global and shared memory, with a shadow that says which bytes have ever been written."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..findings import Fault

_UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}


@dataclass
class Buffer:
    """A registered piece of host memory. valid: 1 for each byte that has been written, None when all have."""

    name: str
    address: int
    nbytes: int
    writable: bool
    data: np.ndarray
    valid: np.ndarray | None
    views: dict[int, np.ndarray] = field(default_factory=dict)

    def view(self, size: int, of: np.ndarray) -> np.ndarray:
        """View data or valid as unsigned integers of a size; index 0 is the buffer's first byte."""
        return of[: self.nbytes // size * size].view(_UNSIGNED[size])


class GlobalMemory:
    """Host memory that kernels may touch, at its real addresses."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._starts: list[int] = []

    def add(self, name: str, address: int, nbytes: int, *, writable: bool = True, initialised: bool = True) -> None:
        """Register nbytes at an address. The memory must stay alive for as long as launches use it.

        initialised False: reading a byte before a kernel wrote it gives poison. Raises ValueError for an overlap.
        """
        if nbytes <= 0:
            return
        index = bisect_right(self._starts, address)
        neighbours = self.buffers[max(index - 1, 0) : index + 1]
        for other in neighbours:
            if address < other.address + other.nbytes and other.address < address + nbytes:
                raise ValueError(f"buffer {name!r} at {address:#x} ({nbytes} bytes) overlaps {other.name!r}")
        data = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        valid = None if initialised else np.zeros(nbytes, np.uint8)
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

    def load(self, address: np.ndarray, size: int, count: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Load count elements of size bytes at each address: unsigned (count, lanes), and the mask of poisoned ones (None for none)."""
        total = size * count
        check_alignment(address, total, "global")
        buffer = self._common(address, total, False)
        if buffer is None:
            return self._load_each(address, size, count)
        index = (address - np.uint64(buffer.address)).astype(np.int64)
        if buffer.address % size:
            return self._load_each(address, size, count)
        index = index // size if count == 1 else index // size + np.arange(count)[:, None]
        values = np.atleast_2d(buffer.view(size, buffer.data).take(index))
        poison = None
        if buffer.valid is not None:
            known = buffer.view(size, buffer.valid).take(index) == all_valid(size)
            poison = None if known.all() else ~np.atleast_2d(known)
        return values, poison

    def _common(self, address: np.ndarray, total: int, write: bool) -> Buffer | None:
        """Return the single buffer that all lanes touch, or None when they touch several (checked lane by lane later)."""
        low, high = int(address.min()), int(address.max()) + total
        buffer = self.find(low, high)
        if buffer is not None and write and not buffer.writable:
            self.require(low, high, write)
        return buffer

    def _load_each(self, address: np.ndarray, size: int, count: int) -> tuple[np.ndarray, np.ndarray | None]:
        values = np.zeros((count, address.size), _UNSIGNED[size])
        poison = np.zeros((count, address.size), bool)
        for lane, where in enumerate(address.ravel()):
            buffer = self.require(int(where), int(where) + size * count, False)
            offset = int(where) - buffer.address
            raw = buffer.data[offset : offset + size * count]
            values[:, lane] = np.frombuffer(raw.tobytes(), _UNSIGNED[size])
            if buffer.valid is not None:
                poison[:, lane] = ~buffer.valid[offset : offset + size * count].reshape(count, size).all(axis=1)
        return values, poison if poison.any() else None

    def store(self, address: np.ndarray, values: list[np.ndarray]) -> None:
        """Write values (one array over the lanes per element) at each address; later lanes win."""
        size, count = values[0].dtype.itemsize, len(values)
        total = size * count
        check_alignment(address, total, "global")
        buffer = self._common(address, total, True)
        if buffer is None or buffer.address % size:
            self._store_each(address, values)
            return
        index = (address - np.uint64(buffer.address)).astype(np.int64) // size
        view = buffer.view(size, buffer.data)
        valid = None if buffer.valid is None else buffer.view(size, buffer.valid)
        for element, value in enumerate(values):
            where = index + element if element else index
            view[where] = value
            if valid is not None:
                valid[where] = all_valid(size)

    def _store_each(self, address: np.ndarray, values: list[np.ndarray]) -> None:
        size = values[0].dtype.itemsize
        lanes = [np.broadcast_to(value, address.shape) for value in values]
        for lane, where in enumerate(address.ravel()):
            buffer = self.require(int(where), int(where) + size * len(values), True)
            offset = int(where) - buffer.address
            for element, value in enumerate(lanes):
                start = offset + element * size
                buffer.data[start : start + size] = np.frombuffer(value[lane].tobytes(), np.uint8)
                if buffer.valid is not None:
                    buffer.valid[start : start + size] = 1


class SharedMemory:
    """The shared memory of one CTA slot, addressed by offset in the CTA's window."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        padded = -(-nbytes // 1024) * 1024
        self.data = np.zeros(padded, np.uint8)
        self.valid = np.zeros(padded, np.uint8)
        self.views = {size: self.data.view(dtype) for size, dtype in _UNSIGNED.items()}
        self.valid_views = {size: self.valid.view(dtype) for size, dtype in _UNSIGNED.items()}

    def reset(self) -> None:
        """Forget all contents."""
        self.data.fill(0xFF)
        self.valid.fill(0)

    def check(self, low: int, high: int, what: str) -> None:
        """Raise Fault unless [low, high) lies in the memory that the launch asked for."""
        if low < 0 or high > self.nbytes:
            raise Fault("out_of_bounds", f"{what} of shared bytes {low:#x} to {high:#x}; the CTA has {self.nbytes:#x}")

    def load(self, offset: np.ndarray, size: int, count: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Load count elements of size bytes at each offset (int64): unsigned (count, lanes), and the mask of poisoned ones."""
        check_alignment(offset, size * count, "shared")
        self.check(int(offset.min()), int(offset.max()) + size * count, "read")
        index = offset // size if count == 1 else offset // size + np.arange(count)[:, None]
        values = np.atleast_2d(self.views[size].take(index))
        known = self.valid_views[size].take(index) == all_valid(size)
        return values, None if known.all() else ~np.atleast_2d(known)

    def store(self, offset: np.ndarray, values: list[np.ndarray], poison: list[np.ndarray | None] | None = None) -> None:
        """Write values (one array over the lanes per element); poison marks lanes whose value is not defined."""
        size, count = values[0].dtype.itemsize, len(values)
        check_alignment(offset, size * count, "shared")
        self.check(int(offset.min()), int(offset.max()) + size * count, "write")
        index = offset // size
        for element, value in enumerate(values):
            where = index + element if element else index
            self.views[size][where] = value
            bad = poison[element] if poison else None
            self.valid_views[size][where] = all_valid(size) if bad is None else np.where(bad, 0, all_valid(size))


_VALID = {size: np.array(int.from_bytes(b"\1" * size, "little"), dtype) for size, dtype in _UNSIGNED.items()}


def all_valid(size: int) -> np.ndarray:
    """Return the shadow word of `size` written bytes."""
    return _VALID[size]


def check_alignment(address: np.ndarray, total: int, space: str) -> None:
    """Raise Fault unless every address is a multiple of total bytes."""
    if total > 1 and int(np.bitwise_or.reduce(address, axis=None)) & (total - 1):
        bad = next(int(value) for value in address.ravel() if int(value) % total)
        raise Fault("misaligned", f"{space} access of {total} bytes at {bad:#x}")

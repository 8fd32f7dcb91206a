"""Kernel arguments: the values that callers hand to a launch, and the memory from which the driver copies them."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeAlias

from ..spec.abi import Param, ParamKind
from ..spec.tensor_map import TensorMap
from .driver import TENSOR_MAP_ALIGNMENT, TENSOR_MAP_BYTES
from .tensor_map import encode

_SCALAR_FORMATS = {ParamKind.INT32: "i", ParamKind.INT64: "q", ParamKind.FLOAT32: "f"}
_RANKS = {ParamKind.TENSOR_MAP: 0, ParamKind.POINTER: 1}  # scalars come last


class Memory(Protocol):
    """A pointer argument: a torch tensor, or a Span of one."""

    def data_ptr(self) -> int:
        """Return the address of the first byte."""
        ...


class Span(NamedTuple):
    """`nbytes` bytes of a tensor from `offset`."""

    tensor: Any
    offset: int
    nbytes: int

    def data_ptr(self) -> int:
        """Return the address of the first byte."""
        address: int = self.tensor.data_ptr()
        return address + self.offset


Argument: TypeAlias = int | float | Memory | TensorMap | None  # None: the null pointer


def address_of(memory: Memory | None) -> int:
    """Return the address that a pointer argument stands for."""
    return 0 if memory is None else memory.data_ptr()


class ArgumentBlock:
    """Memory for one launch's arguments, and the table of pointers to them that the driver takes. Made once, filled often.

    Parameters are tensor maps, pointers and scalars, in this order; ValueError otherwise. maps: memory for the encoded tensor maps.
    """

    def __init__(self, params: Sequence[Param]) -> None:
        maps = sum(param.kind is ParamKind.TENSOR_MAP for param in params)
        pointers = sum(param.kind is ParamKind.POINTER for param in params)
        ranks = [_RANKS.get(param.kind, len(_RANKS)) for param in params]
        if ranks != sorted(ranks):
            raise ValueError(f"parameters are {', '.join(param.kind for param in params)}; supported: tensor maps, pointers, scalars")
        self._pointers_at = maps * TENSOR_MAP_BYTES
        self._scalars_at = self._pointers_at + pointers * ParamKind.POINTER.size
        offsets, layout, size = _places(tuple(params))
        memory = ctypes.create_string_buffer(size + TENSOR_MAP_ALIGNMENT)
        start = -ctypes.addressof(memory) % TENSOR_MAP_ALIGNMENT
        first = ctypes.addressof(memory) + start
        self._bytes = memoryview(memory).cast("B")[start : start + size]
        self._table = (ctypes.c_void_p * len(params))(*(first + offset for offset in offsets))
        self.maps = [self._bytes[offset : offset + TENSOR_MAP_BYTES] for offset in offsets[:maps]]
        self._pointers = pointers
        self._pack_pointers = struct.Struct(f"<{pointers}Q").pack_into
        self._pack_scalars = struct.Struct(layout).pack_into
        self.table_address = ctypes.addressof(self._table)

    def fill(self, args: Sequence[Any]) -> None:
        """Write the arguments, in the order of the parameters."""
        pointers, scalars = len(self.maps), len(self.maps) + self._pointers
        for place, tensor_map in zip(self.maps, args[:pointers], strict=True):
            place[:] = encode(tensor_map)
        self._pack_pointers(self._bytes, self._pointers_at, *[address_of(memory) for memory in args[pointers:scalars]])
        self.set_scalars(args[scalars:])

    def take_pointer(self, i: int, word: int) -> None:
        """Let the driver read pointer i from the 8 bytes at address `word`, at every launch."""
        self._table[len(self.maps) + i] = word

    def set_scalars(self, scalars: Sequence[int | float]) -> None:
        """Write the scalar arguments, which follow the pointers."""
        self._pack_scalars(self._bytes, self._scalars_at, *scalars)


@lru_cache(maxsize=256)
def _places(params: tuple[Param, ...]) -> tuple[tuple[int, ...], str, int]:
    """Return the offset of each argument, the struct format of the scalars, and the bytes of all."""
    offsets, layout, size = [], "<", 0
    for param in params:
        padding = -size % param.size
        offsets.append(size + padding)
        if param.kind in _SCALAR_FORMATS:
            layout += f"{padding}x{_SCALAR_FORMATS[param.kind]}"
        size += padding + param.size
    return tuple(offsets), layout, size

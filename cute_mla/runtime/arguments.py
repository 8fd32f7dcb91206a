"""Kernel arguments: what callers hand to a launch, and the memory from which the driver copies them."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from ..spec.abi import Param, ParamKind
from ..spec.tensor_map import TensorMap
from .driver import TENSOR_MAP_ALIGNMENT
from .tensor_map import encode

_FORMATS = {ParamKind.POINTER: "Q", ParamKind.INT32: "i", ParamKind.INT64: "q", ParamKind.FLOAT32: "f", ParamKind.TENSOR_MAP: "128s"}
_ALIGNMENTS = {ParamKind.TENSOR_MAP: TENSOR_MAP_ALIGNMENT}


class Memory(Protocol):
    """A pointer argument: a torch tensor, or a Span of one."""

    def data_ptr(self) -> int:
        """The address of the first byte."""
        ...


class Span(NamedTuple):
    """`nbytes` bytes of a tensor from `offset`. Without a tensor it is the null pointer, of memory never accessed."""

    tensor: Any = None
    offset: int = 0
    nbytes: int = 0

    def data_ptr(self) -> int:
        """The address of the first byte."""
        return self.tensor.data_ptr() + self.offset if self.tensor is not None else 0


NULL = Span()


def or_null(memory: Memory | None) -> Memory:
    """The pointer argument of an operand that may be absent."""
    return NULL if memory is None else memory


Argument: TypeAlias = int | float | Memory | TensorMap


class ArgumentBlock:
    """Memory for one launch's arguments, and the table of pointers to them that the driver takes; made once, filled often."""

    def __init__(self, params: Sequence[Param]) -> None:
        layout = "<"
        offsets = []
        size = 0
        for param in params:
            padding = -size % _ALIGNMENTS.get(param.kind, param.size)
            offsets.append(size + padding)
            layout += f"{padding}x{_FORMATS[param.kind]}" if padding else _FORMATS[param.kind]
            size += padding + param.size
        self._memory = ctypes.create_string_buffer(size + TENSOR_MAP_ALIGNMENT)
        self._start = -ctypes.addressof(self._memory) % TENSOR_MAP_ALIGNMENT
        first = ctypes.addressof(self._memory) + self._start
        self._table = (ctypes.c_void_p * len(params))(*(first + offset for offset in offsets))
        self._pack_into = struct.Struct(layout).pack_into
        self._pointers = tuple(i for i, param in enumerate(params) if param.kind is ParamKind.POINTER)
        self._tensor_maps = tuple(i for i, param in enumerate(params) if param.kind is ParamKind.TENSOR_MAP)
        self.table_address = ctypes.addressof(self._table)

    def fill(self, args: Sequence[Any]) -> None:
        """Writes the arguments, in the order of the parameters."""
        values = list(args)
        for i in self._pointers:
            values[i] = values[i].data_ptr()
        for i in self._tensor_maps:
            values[i] = encode(values[i])
        self._pack_into(self._memory, self._start, *values)

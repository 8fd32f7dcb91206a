"""The kernel parameter ABI: gmem pointers, scalars and by-value tensor maps, nothing else.

An op lists its parameters once, as a NamedTuple whose annotations are the types below. The manifest's table is derived from it,
and the same tuple carries the arguments through host function and kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, TypeAlias, get_type_hints


class ParamKind(StrEnum):
    """Kind of a kernel parameter. The manifest stores the value."""

    POINTER = "pointer"
    INT32 = "int32"
    INT64 = "int64"
    FLOAT32 = "float32"
    TENSOR_MAP = "tensor_map"

    @property
    def size(self) -> int:
        """Bytes that the parameter takes."""
        return _SIZES[self]


_SIZES = {
    ParamKind.POINTER: 8,
    ParamKind.INT32: 4,
    ParamKind.INT64: 8,
    ParamKind.FLOAT32: 4,
    ParamKind.TENSOR_MAP: 128,
}


@dataclass(frozen=True)
class Param:
    """One kernel parameter: its name in the kernel's signature, and its kind."""

    name: str
    kind: ParamKind

    @property
    def size(self) -> int:
        """Bytes that the parameter takes."""
        return self.kind.size


Pointer: TypeAlias = Annotated[Any, ParamKind.POINTER]
Int32: TypeAlias = Annotated[Any, ParamKind.INT32]
Int64: TypeAlias = Annotated[Any, ParamKind.INT64]
Float32: TypeAlias = Annotated[Any, ParamKind.FLOAT32]
TensorMap: TypeAlias = Annotated[Any, ParamKind.TENSOR_MAP]


def params_of(arguments: type) -> tuple[Param, ...]:
    """Return the parameters that a NamedTuple of the types above lists, in order."""
    hints = get_type_hints(arguments, include_extras=True)
    return tuple(Param(name, hint.__metadata__[0]) for name, hint in hints.items())

"""Example arguments that fix the types of a kernel's host function for cute.compile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64
from cutlass.cute import runtime
from cutlass.cute.typing import AddressSpace

from ..spec.abi import Param, ParamKind, params_of


def example_arguments(arguments: type, elements: Mapping[str, type[cutlass.Numeric]]) -> Any:
    """Return an instance of an op's NamedTuple of arguments.

    elements: what pointers point to, by name; int32 if not named. A pointer stands in for a tensor map: the host function makes
    a typed map from it.
    """

    def example(param: Param) -> Any:
        match param.kind:
            case ParamKind.POINTER | ParamKind.TENSOR_MAP:
                element = elements.get(param.name, Int32)
                return runtime.make_ptr(element, 0, AddressSpace.gmem, assumed_align=element.width // 8)
            case ParamKind.INT32:
                return Int32(1)
            case ParamKind.INT64:
                return Int64(1)
            case ParamKind.FLOAT32:
                return Float32(1)

    return arguments(*(example(param) for param in params_of(arguments)))

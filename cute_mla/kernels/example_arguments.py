"""Example arguments that fix the types of a kernel's host function for cute.compile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64
from cutlass.cute import runtime
from cutlass.cute.typing import AddressSpace

from ..spec.abi import Param, ParamKind


def example_arguments(params: tuple[Param, ...], elements: Mapping[str, type[cutlass.Numeric]]) -> tuple[Any, ...]:
    """One argument per parameter. Pointers are to int32 unless `elements` says otherwise; a tensor map is stood for by a
    pointer, from which the host function makes a typed map."""

    def argument(param: Param) -> Any:
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

    return tuple(argument(param) for param in params)

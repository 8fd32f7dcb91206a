"""Arguments of a launch as the kernel sees them: parameter bytes and tensor maps."""

from __future__ import annotations

from ..findings import Fault
from ..frontend.layout import PARAM_WINDOW, WINDOW_MASK
from ..numerics import tma
from ..numerics.tensor_map import TensorMap
from ..state.memory import GlobalMemory
from .launch import Launch

TENSOR_MAP_BYTES = 128


def pack_params(launch: Launch) -> bytes:
    """Return the parameter space of a launch; tensor maps are left out."""
    layout = launch.target.layout
    data = bytearray(layout.param_bytes)
    for param, arg in zip(launch.target.params, launch.args, strict=True):
        if not isinstance(arg, TensorMap):
            offset = layout.params[param.name]
            data[offset : offset + param.size] = arg
    return bytes(data)


class TensorMaps:
    """The tensor maps that a launch can reach: as parameters, in the bytes of a parameter that is a struct, or in global memory."""

    def __init__(self, launch: Launch, memory: GlobalMemory) -> None:
        self.launch = launch
        self.memory = memory
        self._by_offset: dict[int, tma.BoxPlan] = {}

    def find(self, address: int) -> tma.BoxPlan:
        """Return the tensor map at a generic (parameter) or global address. Raises Fault where there is none, or a bad one."""
        try:
            return self._in_params(address & WINDOW_MASK) if address >= PARAM_WINDOW else self._in_memory(address)
        except ValueError as error:
            raise Fault("tensor_map", str(error)) from error

    def _in_memory(self, address: int) -> tma.BoxPlan:
        buffer = self.memory.require(address, address + TENSOR_MAP_BYTES, False)
        start = address - buffer.address
        return tma.plan(tma.decode_native_tensor_map(buffer.data[start : start + TENSOR_MAP_BYTES].tobytes()))

    def _in_params(self, offset: int) -> tma.BoxPlan:
        if offset in self._by_offset:
            return self._by_offset[offset]
        target = self.launch.target
        for param, arg in zip(target.params, self.launch.args, strict=True):
            start = offset - target.layout.params[param.name]
            if 0 <= start <= param.size - TENSOR_MAP_BYTES and (start == 0 or not isinstance(arg, TensorMap)):
                found = arg if isinstance(arg, TensorMap) else tma.decode_native_tensor_map(arg[start : start + TENSOR_MAP_BYTES])
                self._by_offset[offset] = tma.plan(found)
                return self._by_offset[offset]
        raise Fault("tensor_map", f"no tensor map at parameter offset {offset}")

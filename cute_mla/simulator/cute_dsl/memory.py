"""CPU tensors as host code takes them: in the address space of a device."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from ..findings import SimulationError

_HOST_MEMORY, _DEVICE_MEMORY = 1, 2  # DLDeviceType
_DEVICE_TYPE = 8  # offset of it in a DLManagedTensor


@dataclass(frozen=True)
class DeviceView:
    """A tensor that DLPack says lies in device memory, as copies and tensor maps ask for."""

    tensor: Any

    def __dlpack__(self, **_options: Any) -> Any:
        """Return a capsule of the tensor. SimulationError for one that is not in host memory."""
        capsule = self.tensor.__dlpack__()
        address = ctypes.pythonapi.PyCapsule_GetPointer
        address.restype, address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        device_type = ctypes.c_int32.from_address(address(capsule, b"dltensor") + _DEVICE_TYPE)
        if device_type.value != _HOST_MEMORY:
            raise SimulationError(f"a tensor lies on DLPack device type {device_type.value}; supported: CPU tensors")
        device_type.value = _DEVICE_MEMORY
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return type and number of the device."""
        return _DEVICE_MEMORY, 0

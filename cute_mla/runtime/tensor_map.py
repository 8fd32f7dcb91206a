"""Encoded tensor maps: from a spec.TensorMap to the 128 bytes that a kernel takes by value."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ..spec.tensor_map import Swizzle, TensorMap
from . import driver

# Drivers up to this one set a flag in the tensor maps of small tensors that the hardware must not see: a bit of the second 64-bit word.
# NVIDIA's CUTLASS clears it in the same way.
_SMALL_TENSOR_DRIVER = 13010
_SMALL_TENSOR_BYTES = 131_072
_SMALL_TENSOR_FLAG = 1 << 21

_MAX_MAPS = 256  # a model has a cache for each of its layers

_ELEMENTS = {"bf16": ("BFLOAT16", 2), "fp16": ("FLOAT16", 2), "fp32": ("FLOAT32", 4), "i32": ("INT32", 4), "u8": ("UINT8", 1)}
_SWIZZLES = {Swizzle.NONE: "NONE", Swizzle.B32: "32B", Swizzle.B64: "64B", Swizzle.B128: "128B"}


@lru_cache(maxsize=4096)
def encode(tensor_map: TensorMap) -> bytes:
    """Return the encoded tensor map. DeviceError if the driver refuses it. Cached: a KV cache keeps its address for its lifetime."""
    element, _ = _ELEMENTS[tensor_map.dtype]
    encoded = driver.encode_tensor_map(
        element, tensor_map.address, tensor_map.dims, tensor_map.strides, tensor_map.box, _SWIZZLES[tensor_map.swizzle]
    )
    if driver.version() <= _SMALL_TENSOR_DRIVER and extent_bytes(tensor_map) < _SMALL_TENSOR_BYTES:
        word = int.from_bytes(encoded[8:16], "little") & ~_SMALL_TENSOR_FLAG
        encoded = encoded[:8] + word.to_bytes(8, "little") + encoded[16:]
    return encoded


class EncodedMaps(dict[int, bytes]):
    """Encoded tensor maps of tensors of one layout, by address. A bounded cache: it is cleared when it is full.

    layout: the map of such a tensor, at any address.
    """

    def __init__(self, layout: TensorMap) -> None:
        self._layout = layout

    def __missing__(self, address: int) -> bytes:
        if len(self) >= _MAX_MAPS:
            self.clear()
        encoded = self[address] = encode(replace(self._layout, address=address))
        return encoded


def extent_bytes(tensor_map: TensorMap) -> int:
    """Return the bytes from the first element of the tensor to the end of its last."""
    _, element_bytes = _ELEMENTS[tensor_map.dtype]
    steps = (element_bytes, *tensor_map.strides)
    return sum((dim - 1) * step for dim, step in zip(tensor_map.dims, steps, strict=True)) + element_bytes

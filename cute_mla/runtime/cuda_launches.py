"""The launches of a prepared call on a CUDA device: the end of the path that ../decode_call.py describes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import driver
from .arguments import ArgumentBlock
from .device import CallSteps, Place, Step
from .tensor_map import EncodedMaps

_WORD = 8  # bytes of an address

# The raw handle of torch's current stream on a device: what compiled torch code calls; the public way costs more than a launch. Where torch
# was built without CUDA there is no tensor to ask it for.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # type: ignore[assignment]


class CudaLaunches:
    """The launches of a call: each time they write addresses and start. Threads do not share what is written to."""

    def __init__(self, device: int, context: Any, call: CallSteps, kernels: Sequence[Any]) -> None:
        self._device = device
        self._context = context
        self._call = call
        self._kernels = kernels
        self._maps = [EncodedMaps(mapped.layout) for step in call.steps for mapped in step.maps]
        self._free = [self._make()]

    def __call__(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> None:
        """As Launches."""
        stream = current_stream(self._device)
        try:
            prepared = self._free.pop()
        except IndexError:
            prepared = self._make()
        try:
            prepared.write(addresses)
            if stream != prepared.stream:
                prepared.set_stream(stream)
            prepared.start()
        finally:
            self._free.append(prepared)

    def again(self) -> Callable[[], None]:
        """Starts the launches as they were started last, and does nothing besides."""
        return self._free[-1].start

    def _make(self) -> _Prepared:
        return _Prepared(self._device, self._context, self._call, self._kernels, self._maps)


class _Prepared:
    """Launches that lack addresses and a stream.

    Every address is written once, to one of a row of words, and all launches take their pointers from there: first the tensors, then the
    places within them, then the null pointer.
    """

    def __init__(self, device: int, context: Any, call: CallSteps, kernels: Sequence[Any], maps: Sequence[EncodedMaps]) -> None:
        pointers = [place for step in call.steps for place in step.pointers]
        self._inner = sorted({(place.tensor, place.offset) for place in pointers if place is not None and place.offset})
        self._words = ctypes.create_string_buffer(_WORD * (call.tensors + len(self._inner) + 1))
        self._pack = struct.Struct(f"{call.tensors + len(self._inner)}P").pack_into
        self._null = call.tensors + len(self._inner)
        self._tensors = call.tensors
        self._arguments = [self._block(step) for step in call.steps]
        blocks = zip(call.steps, self._arguments, strict=True)
        places = [(block, i, mapped.tensor) for step, block in blocks for i, mapped in enumerate(step.maps)]
        self._maps = list(zip(maps, places, strict=True))
        self._configs = [_config(step) for step in call.steps]
        tables = [block.table_address for block in self._arguments]
        self.start = driver.starter(device, context, list(zip(self._configs, kernels, tables, strict=True)))
        self.stream: int | None = None

    def write(self, addresses: Sequence[int]) -> None:
        """Writes the addresses of the call's tensors wherever launches look for them."""
        self._pack(self._words, 0, *addresses, *[addresses[tensor] + offset for tensor, offset in self._inner])
        for maps, (block, i, tensor) in self._maps:
            block.set_map(i, maps[addresses[tensor]])

    def set_stream(self, raw: int) -> None:
        """Has the launches go to the stream with this handle."""
        for config in self._configs:
            config.hStream = driver.stream(raw)
        self.stream = raw

    def _block(self, step: Step) -> ArgumentBlock:
        block = ArgumentBlock(step.kernel.params)
        block.set_scalars(step.scalars)
        for i, place in enumerate(step.pointers):
            block.take_pointer(i, ctypes.addressof(self._words) + _WORD * self._word(place))
        return block

    def _word(self, place: Place | None) -> int:
        if place is None:
            return self._null
        return self._tensors + self._inner.index((place.tensor, place.offset)) if place.offset else place.tensor


def _config(step: Step) -> Any:
    entry = step.kernel
    config = driver.launch_config(entry.block, entry.cluster, entry.smem_bytes, pdl=step.pdl)
    config.gridDimX, config.gridDimY, config.gridDimZ = step.grid
    return config

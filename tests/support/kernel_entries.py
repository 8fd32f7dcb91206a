"""Manifest entries of kernels that are not built."""

from __future__ import annotations

from typing import Any

from cute_mla.manifest import KernelEntry, kernel_name


def kernel_entry(op: str, arch: str, config_name: str, **fields: Any) -> KernelEntry:
    """Return an entry whose other fields are made up. fields: those that matter."""
    name = kernel_name(op, arch, config_name)
    made_up: dict[str, Any] = {
        "config": {},
        "entry": f"{name}_0",
        "cubin": f"{name}.cubin",
        "cubin_sha256": "a" * 64,
        "ptx": f"{name}.ptx",
        "ptx_sha256": "b" * 64,
        "params": (),
        "block": (256, 1, 1),
        "cluster": (1, 1, 1),
        "smem_bytes": 1024,
        "registers": 128,
        "stack_bytes": 0,
        "fingerprint": "c" * 64,
    }
    return KernelEntry(name=name, op=op, arch=arch, **{**made_up, **fields})

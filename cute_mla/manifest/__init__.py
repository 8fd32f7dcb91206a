"""Manifest and provenance of the kernels: the record that ties build to runtime. Only this room reads or writes them."""

from __future__ import annotations

from .documents import MANIFEST_NAME, PROVENANCE_NAME, Manifest, Provenance, manifest_sha256
from .entries import Barrier, KernelEntry, NamedBarrier, Role, kernel_name
from .files import ManifestError, read_verified

__all__ = [
    "MANIFEST_NAME",
    "PROVENANCE_NAME",
    "Barrier",
    "KernelEntry",
    "Manifest",
    "ManifestError",
    "NamedBarrier",
    "Provenance",
    "Role",
    "kernel_name",
    "manifest_sha256",
    "read_verified",
]

"""Manifest and provenance: one entry per shipped kernel, and the origin of a wheel's kernels."""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..spec.abi import Param, ParamKind
from ..spec.arch import ARCHS
from .decoding import (
    _SHA256,
    _boolean,
    _dim3,
    _integer,
    _mapping,
    _matching,
    _Mismatch,
    _one_of,
    _record,
    _sequence,
    _setting,
    _string,
    _without_format,
)
from .entries import Barrier, KernelEntry, NamedBarrier, Role, kernel_name
from .files import _digest, _read, _write, read_file

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 2
PROVENANCE_NAME = "provenance.json"
PROVENANCE_VERSION = 2


@dataclass(frozen=True)
class Manifest:
    """The shipped kernels, by name."""

    kernels: dict[str, KernelEntry]

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read and checks folder/manifest.json. ManifestError names the file, what was found and what is expected."""
        manifest: Manifest = _read(
            folder / MANIFEST_NAME, "the manifest that `cute-mla build` writes", lambda raw: cls(_decode_manifest(raw))
        )
        return manifest

    def save(self, folder: Path) -> None:
        """Write folder/manifest.json in one step: a reader sees the old file or the new one. Equal manifests give equal bytes."""
        kernels = {name: asdict(entry) for name, entry in self.kernels.items()}
        _write(folder / MANIFEST_NAME, {"format": FORMAT_VERSION, "kernels": kernels})


def manifest_sha256(folder: Path) -> str | None:
    """Return the sha256 of folder/manifest.json, which holds those of all kernels; None without a manifest."""
    path = folder / MANIFEST_NAME
    return hashlib.sha256(read_file(path)).hexdigest() if path.is_file() else None


@dataclass(frozen=True)
class Provenance:
    """Origin of a wheel's kernels, as far as the manifest does not say it.

    The manifest has the sha256 of every file, the versions of compiler and assembler, and a fingerprint of the sources. The file has
    a sha256 of its own content too.

    version: version of this package. commit: git commit of the sources. clean: whether the tree had no local changes.
    tools: versions of the programs that built the kernels and the wheel, by name. manifest_sha256: sha256 of the manifest.
    """

    version: str
    commit: str
    clean: bool
    tools: dict[str, str]
    manifest_sha256: str

    @property
    def source(self) -> str:
        """Return the commit, and whether there were local changes."""
        return f"commit {self.commit}" + ("" if self.clean else " with local changes")

    @classmethod
    def load(cls, folder: Path) -> Provenance | None:
        """Read folder/provenance.json; None in a source tree, which has no such file. ManifestError if it is damaged."""
        path = folder / PROVENANCE_NAME
        return _read(path, "the provenance of a wheel", _decode_provenance) if os.path.lexists(path) else None

    def save(self, folder: Path) -> None:
        """Write folder/provenance.json in one step, as Manifest.save does."""
        fields = {"format": PROVENANCE_VERSION, **asdict(self)}
        _write(folder / PROVENANCE_NAME, {**fields, "sha256": _digest(fields)})


_FILE_NAME = _matching(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", "the name of a file beside the manifest")
_ENTRY = _record(
    KernelEntry,
    name=_FILE_NAME,
    op=_string,
    arch=_one_of(tuple(ARCHS)),
    config=_mapping(_setting),
    entry=_matching(r"[A-Za-z_$][A-Za-z0-9_$]*", "the name of an entry"),
    cubin=_FILE_NAME,
    cubin_sha256=_SHA256,
    ptx=_FILE_NAME,
    ptx_sha256=_SHA256,
    params=_sequence(
        _record(
            lambda name, kind: Param(name, ParamKind(kind)),
            name=_string,
            kind=_one_of(tuple(kind.value for kind in ParamKind)),
        )
    ),
    block=_dim3,
    cluster=_dim3,
    smem_bytes=_integer(0),
    registers=_integer(1),
    stack_bytes=_integer(0),
    fingerprint=_SHA256,
    tmem_columns=_integer(0),
    barriers=_sequence(_record(Barrier, name=_string, offset=_integer(0), count=_integer(1))),
    named_barriers=_sequence(_record(NamedBarrier, name=_string, barrier_id=_integer(0))),
    roles=_sequence(_record(Role, name=_string, first_warp=_integer(0), warps=_integer(1))),
    instructions=_mapping(_integer(0)),
    tools=_mapping(_string),
)
_PROVENANCE = _record(
    Provenance,
    version=_string,
    commit=_matching(r"[0-9a-f]{40,64}", "the name of a commit"),
    clean=_boolean,
    tools=_mapping(_string),
    manifest_sha256=_SHA256,
)


def _decode_provenance(raw: Any) -> Provenance:
    fields = _without_format(raw, PROVENANCE_VERSION)
    found = fields.pop("sha256", None)
    provenance: Provenance = _PROVENANCE(fields, "provenance")
    expected = _digest({"format": PROVENANCE_VERSION, **fields})
    if found != expected:
        raise _Mismatch("provenance.sha256", found, f"{expected}, that of the other fields")
    return provenance


def _decode_manifest(raw: Any) -> dict[str, KernelEntry]:
    fields = _without_format(raw, FORMAT_VERSION)
    if fields.keys() != {"kernels"}:
        raise _Mismatch("the file", sorted(raw), "exactly the fields ['format', 'kernels']")
    kernels: dict[str, KernelEntry] = _mapping(_ENTRY)(fields["kernels"], "kernels")
    for key, entry in kernels.items():
        _check_entry(key, entry)
    return kernels


def _check_entry(key: str, entry: KernelEntry) -> None:
    """Raise _Mismatch unless the fields of an entry agree with each other."""
    where = f"kernels.{key}"
    if entry.name != key or not key.startswith(kernel_name(entry.op, entry.arch, "")):
        raise _Mismatch(f"{where}.name", entry.name, f"its key {key}, beginning with its op and arch")
    for barrier in entry.barriers:
        if barrier.offset % 8 or barrier.offset + 8 * barrier.count > entry.smem_bytes:
            raise _Mismatch(f"{where}.barriers", barrier, f"8-byte aligned words inside {entry.smem_bytes} bytes of shared memory")
    warps = -(-entry.block[0] * entry.block[1] * entry.block[2] // 32)
    for role in entry.roles:
        if role.first_warp + role.warps > warps:
            raise _Mismatch(f"{where}.roles", role, f"warps among the {warps} of a block")

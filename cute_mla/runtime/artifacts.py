"""Artefacts on disk: their folder, and checks that they match the manifest."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from ..manifest import (
    MANIFEST_NAME,
    PROVENANCE_NAME,
    KernelEntry,
    Manifest,
    ManifestError,
    Provenance,
    kernel_name,
    manifest_sha256,
    read_verified,
)
from ..spec.abi import Param
from ..spec.arch import ARCHS
from ..spec.kernel_ops import PARAMS_OF
from .errors import ArtifactError
from .fork_lock import ForkLock

FOLDER_VARIABLE = "CUTE_MLA_ARTIFACTS"
DISTRIBUTION = "cute-mla"

_REBUILD = "build the kernels again with `cute-mla build`, or install the wheel again"
_TREE = Path(__file__).resolve().parents[2]  # of a source tree, which has a Makefile

_ELF_MAGIC = b"\x7fELF"
_ELF_MACHINE_CUDA = 190
_ABI_SM_IN_BYTE_0 = 7  # written by CUDA 12 for sm_90
_ABI_SM_IN_BYTE_1 = 8


def artifacts_folder() -> Path:
    """Return the folder of the artefacts: $CUTE_MLA_ARTIFACTS, else cute_mla/artifacts."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    return Path(chosen) if chosen else Path(__file__).resolve().parent.parent / "artifacts"


@dataclass(frozen=True)
class Artifacts:
    """A folder of built kernels and its manifest. provenance: that of a wheel's kernels; None in a source tree."""

    folder: Path
    manifest: Manifest
    provenance: Provenance | None = None

    def damages(self) -> list[str]:
        """Read every file. Return an error for each that is missing, damaged, or of another architecture or manifest."""
        found = []
        if self.provenance is not None and manifest_sha256(self.folder) != self.provenance.manifest_sha256:
            found.append(f"{self.folder / MANIFEST_NAME} is not the one of {self.folder / PROVENANCE_NAME}, which names another sha256")
        for entry in self.manifest.kernels.values():
            for read in (self.cubin, self.ptx, self.check_params):
                try:
                    read(entry)
                except ArtifactError as error:
                    found.append(str(error))
        return found

    def entry(self, op: str, arch: str, config_name: str) -> KernelEntry:
        """Return the manifest entry of a variant. ArtifactError if it was not built."""
        name, kernels = kernel_name(op, arch, config_name), self.manifest.kernels
        entry = kernels.get(name)
        if entry is None:
            near = difflib.get_close_matches(name, sorted(kernels))
            nearest = f"; nearest: {', '.join(near)}" if near else ""
            raise ArtifactError(f"{self.folder}: found no kernel {name} among the {len(kernels)} that are built{nearest}; {_rebuild(name)}")
        self.check_params(entry)
        return entry

    def check_params(self, entry: KernelEntry) -> None:
        """Raise ArtifactError unless a kernel takes the parameters that its op passes."""
        expected = PARAMS_OF.get(entry.op, entry.params)
        if entry.params != expected:
            where = f"{self.folder / MANIFEST_NAME}: kernels.{entry.name}.params"
            raise ArtifactError(f"{where}: found {_params_text(entry.params, expected)}; {_rebuild(entry.name)}")

    def cubin(self, entry: KernelEntry) -> bytes:
        """Return the kernel's machine code. ArtifactError if it is damaged or for another architecture."""
        cubin = self._read(entry, entry.cubin, entry.cubin_sha256)
        built_for = cubin_sm(cubin)
        major, minor = ARCHS[entry.arch].compute_capabilities[0]  # the first of the family is in the file
        if built_for != major * 10 + minor:
            raise ArtifactError(
                f"{self.folder / entry.cubin} is {'not a cubin' if built_for is None else f'a cubin for sm_{built_for}'}; "
                f"the manifest says {ARCHS[entry.arch].gpu_arch}; {_rebuild(entry.name)}"
            )
        return cubin

    def ptx(self, entry: KernelEntry) -> str:
        """Return the PTX that the cubin was made from. ArtifactError if it is damaged."""
        try:
            return self._read(entry, entry.ptx, entry.ptx_sha256).decode()
        except UnicodeDecodeError as error:
            raise ArtifactError(f"{self.folder / entry.ptx} is not text: {error}; {_rebuild(entry.name)}") from error

    def _read(self, entry: KernelEntry, name: str, sha256: str) -> bytes:
        try:
            return read_verified(self.folder / name, sha256)
        except ManifestError as error:
            raise ArtifactError(f"{error}; {_rebuild(entry.name)}") from error


def _rebuild(kernel: str) -> str:
    """Say how to get a kernel that is missing or damaged."""
    return f"build it with `cute-mla build --kernel {kernel}`, or install the wheel again"


def _params_text(found: tuple[Param, ...], expected: tuple[Param, ...]) -> str:
    """Describe the first difference between two lists of parameters."""
    if len(found) != len(expected):
        return f"{len(found)} parameters, expected {len(expected)}"
    i, (other, param) = next((i, pair) for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
    return f"[{i}] {other.kind} {other.name}, expected {param.kind} {param.name}"


def cubin_sm(cubin: bytes) -> int | None:
    """Return the SM number (90 for sm_90a) in a cubin's ELF header, or None if these bytes are not a cubin."""
    if len(cubin) < 64 or not cubin.startswith(_ELF_MAGIC) or int.from_bytes(cubin[18:20], "little") != _ELF_MACHINE_CUDA:
        return None
    flags = cubin[48:52]
    return {_ABI_SM_IN_BYTE_0: flags[0], _ABI_SM_IN_BYTE_1: flags[1]}.get(cubin[8])


def cubin_toolkit(cubin: bytes) -> tuple[int, int] | None:
    """Return the CUDA version whose ptxas made a cubin, or None if the cubin does not say (CUDA 12 for sm_90)."""
    found = re.search(rb"Cuda compilation tools, release (\d+)\.(\d+)", cubin)
    return (int(found[1]), int(found[2])) if found else None


_loaded: dict[Path, tuple[int, Artifacts]] = {}
_lock = ForkLock()


def load_artifacts(folder: Path | None = None) -> Artifacts:
    """Return the artefacts of a folder (default: artifacts_folder()). Read them again when the manifest was rewritten."""
    folder = artifacts_folder() if folder is None else folder
    try:
        stamp = (folder / MANIFEST_NAME).stat().st_mtime_ns
    except OSError as error:
        targets = "`make quick` (those of a first verdict) or `make build` (all)" if (_TREE / "Makefile").is_file() else "`cute-mla build`"
        raise ArtifactError(f"no {MANIFEST_NAME} in {folder}: build the kernels with {targets}") from error
    with _lock:
        known = _loaded.get(folder)
        if known is None or known[0] != stamp:
            try:
                known = stamp, Artifacts(folder, Manifest.load(folder), _load_provenance(folder))
            except ManifestError as error:
                raise ArtifactError(f"{error}; {_REBUILD}") from error
            _loaded[folder] = known
    return known[1]


def _load_provenance(folder: Path) -> Provenance | None:
    """Return the provenance, or None in a source tree. ManifestError if it is damaged, or missing from an installed wheel."""
    provenance = Provenance.load(folder)
    if provenance is None and _was_installed(folder):
        raise ManifestError(f"{folder / PROVENANCE_NAME}: found no such file, expected the one that was installed with the kernels")
    return provenance


def _was_installed(folder: Path) -> bool:
    """Return whether the installer's list of files (RECORD) has a provenance in this folder."""
    for installed in distributions(name=DISTRIBUTION):
        names = (line.split(",", 1)[0] for line in (installed.read_text("RECORD") or "").splitlines())
        for name in names:
            if name.endswith(f"/{PROVENANCE_NAME}") and Path(str(installed.locate_file(name))).parent.resolve() == folder.resolve():
                return True
    return False

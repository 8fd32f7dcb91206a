"""Manifest and provenance: one entry per shipped kernel, and the origin of a wheel's kernels. Only this module reads or writes them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .spec.abi import Param, ParamKind
from .spec.arch import ARCHS

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 2
PROVENANCE_NAME = "provenance.json"
PROVENANCE_VERSION = 2

_MAX_FILE_BYTES = 1 << 30
_MAX_INT32 = (1 << 31) - 1


class ManifestError(ValueError):
    """Error of the manifest or the provenance: missing, damaged or of another format version."""


@dataclass(frozen=True)
class Barrier:
    """A named group of mbarriers in shared memory: `count` of 8 bytes each, from `offset`."""

    name: str
    offset: int
    count: int


@dataclass(frozen=True)
class NamedBarrier:
    """A hardware barrier (bar.sync id) with its meaning."""

    name: str
    barrier_id: int


@dataclass(frozen=True)
class Role:
    """A role of warps first_warp .. first_warp + warps - 1 of a CTA."""

    name: str
    first_warp: int
    warps: int


@dataclass(frozen=True)
class KernelEntry:
    """Manifest entry of one kernel, for the runtime and the simulator.

    name: "<op>_<arch>_<config name>", the key of the manifest and the stem of both files.
    cubin, ptx: file names beside the manifest; *_sha256: hex digests of their bytes.
    block, cluster: threads and CTAs along x, y, z. smem_bytes: dynamic shared memory of one CTA.
    tmem_columns: columns of tensor memory that one CTA allocates, 0 without tensor memory.
    stack_bytes: per-thread local memory, 0 in everything that ships.
    config: the variant's fields, for display. instructions: counts of selected SASS mnemonics, for display and gates.
    fingerprint: sha256 over sources, tool versions and options; an equal one means that the kernel is up to date.
    """

    name: str
    op: str
    arch: str
    config: dict[str, Any]
    entry: str
    cubin: str
    cubin_sha256: str
    ptx: str
    ptx_sha256: str
    params: tuple[Param, ...]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    registers: int
    stack_bytes: int
    fingerprint: str
    tmem_columns: int = 0
    barriers: tuple[Barrier, ...] = ()
    named_barriers: tuple[NamedBarrier, ...] = ()
    roles: tuple[Role, ...] = ()
    instructions: dict[str, int] = field(default_factory=dict)
    tools: dict[str, str] = field(default_factory=dict)

    @property
    def matrix_products(self) -> int:
        """Tensor-core instructions of the cubin."""
        return sum(number for mnemonic, number in self.instructions.items() if re.fullmatch(r"[HQI]GMMA|UTC[HQIO]MMA", mnemonic))


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


def kernel_name(op: str, arch: str, config_name: str) -> str:
    """Return the manifest key of a variant."""
    return f"{op}_{arch}_{config_name}"


def manifest_sha256(folder: Path) -> str | None:
    """Return the sha256 of folder/manifest.json, which holds those of all kernels; None without a manifest."""
    path = folder / MANIFEST_NAME
    return hashlib.sha256(read_file(path)).hexdigest() if path.is_file() else None


def read_file(path: Path) -> bytes:
    """Return the content of a regular file up to 1 GiB. OSError for anything else: reading a pipe or a device may never end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    if status.st_size > _MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"{status.st_size} bytes, more than {_MAX_FILE_BYTES}", str(path))
    return path.read_bytes()


def read_verified(path: Path, sha256: str) -> bytes:
    """Return the content of a regular file. ManifestError if it cannot be read, or its sha256 is not this one, the manifest's."""
    try:
        content = read_file(path)
    except OSError as error:
        raise ManifestError(f"cannot read {path}: {error.strerror}") from error
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ManifestError(f"{path} is damaged: sha256 {found}, the manifest says {sha256}")
    return content


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


def _read(path: Path, what: str, decode: Callable[[Any], Any]) -> Any:
    """Decode a JSON file. ManifestError names the file, what was found and what is expected."""
    try:
        return decode(json.loads(read_file(path)))
    except FileNotFoundError:
        raise ManifestError(f"{path}: found no such file, expected {what}") from None
    except _Mismatch as mismatch:
        raise ManifestError(f"{path}: {mismatch}") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: also integers of thousands of digits
        raise ManifestError(f"{path}: found unreadable content ({error}), expected a JSON object") from error


def _digest(fields: dict[str, Any]) -> str:
    """Return the sha256 of a JSON object, whatever the order of its fields."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _write(path: Path, raw: dict[str, Any]) -> None:
    """Write JSON in one step: a reader sees the old file or the new one."""
    text = json.dumps(raw, sort_keys=True, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8") as file:
        temporary = Path(file.name)
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            temporary.chmod(0o644)  # a temporary file is private to its owner, a shipped one is not
            temporary.replace(path)
        except BaseException:
            temporary.unlink()
            raise


class _Mismatch(Exception):
    """Error of a value in a file: where it stands, the value found, and the value expected."""

    def __init__(self, where: str, found: object, expected: str) -> None:
        shown = repr(found)
        super().__init__(f"{where}: found {shown if len(shown) <= 120 else shown[:117] + '...'}, expected {expected}")


_Decoder = Callable[[Any, str], Any]


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise _Mismatch(where, value, "a non-empty string of printable characters")
    return value


def _setting(value: Any, where: str) -> str | int:
    if not isinstance(value, str | int) or (isinstance(value, str) and not value.isprintable()):
        raise _Mismatch(where, value, "a string of printable characters, an integer, true or false")
    return value


def _matching(pattern: str, expected: str) -> _Decoder:
    def decode(value: Any, where: str) -> str:
        if not isinstance(value, str) or re.fullmatch(pattern, value) is None:
            raise _Mismatch(where, value, expected)
        return value

    return decode


def _one_of(allowed: tuple[str, ...]) -> _Decoder:
    def decode(value: Any, where: str) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise _Mismatch(where, value, f"one of {', '.join(allowed)}")
        return value

    return decode


def _boolean(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise _Mismatch(where, value, "true or false")
    return value


def _integer(least: int) -> _Decoder:
    def decode(value: Any, where: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MAX_INT32:
            raise _Mismatch(where, value, f"an integer >= {least} of 32 bits")
        return value

    return decode


def _dim3(value: Any, where: str) -> tuple[int, int, int]:
    if not isinstance(value, list) or len(value) != 3:
        raise _Mismatch(where, value, "a list of three integers")
    x, y, z = (_integer(1)(extent, f"{where}[{axis}]") for axis, extent in enumerate(value))
    return x, y, z


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Mismatch(where, value, "an object")
    return value


def _mapping(item: _Decoder) -> _Decoder:
    def decode(value: Any, where: str) -> dict[str, Any]:
        return {_string(key, where): item(member, f"{where}.{key}") for key, member in _object(value, where).items()}

    return decode


def _sequence(item: _Decoder) -> _Decoder:
    def decode(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _Mismatch(where, value, "a list")
        return tuple(item(member, f"{where}[{index}]") for index, member in enumerate(value))

    return decode


def _record(make: Callable[..., Any], **fields: _Decoder) -> _Decoder:
    def decode(value: Any, where: str) -> Any:
        found = _object(value, where)
        if found.keys() != fields.keys():
            raise _Mismatch(where, sorted(found), f"exactly the fields {sorted(fields)}")
        return make(**{name: decode_field(found[name], f"{where}.{name}") for name, decode_field in fields.items()})

    return decode


_SHA256 = _matching(r"[0-9a-f]{64}", "64 hexadecimal digits")
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


def _without_format(raw: Any, version: int) -> dict[str, Any]:
    """Return the fields of a file of this format version."""
    fields = dict(_object(raw, "the file"))
    found = fields.pop("format", None)
    if found != version:
        raise _Mismatch("format", found, f"{version}, the one that this version reads")
    return fields


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

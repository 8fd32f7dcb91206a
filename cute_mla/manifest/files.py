"""Files of artefacts: read whole and verified, written in one step."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .decoding import _Mismatch

_MAX_FILE_BYTES = 1 << 30


class ManifestError(ValueError):
    """Error of the manifest or the provenance: missing, damaged or of another format version."""


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

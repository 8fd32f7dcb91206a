"""Disassemblies kept on disk: nvdisasm takes 0.4 s a kernel, reading its text back 10 ms.

A file holds the text of one cubin from one release of nvdisasm, compressed, behind its sha256. Files are written whole or not at all, and a
damaged one is made again. No error of the disk reaches the caller: without a usable folder, nothing is kept.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .disassembler import PACKAGE, disassemble

FOLDER_VARIABLE = "XDG_CACHE_HOME"
MAX_BYTES = 64 << 20  # all built kernels take 9 MB

_DIGEST_BYTES = hashlib.sha256().digest_size
_SUFFIX = ".sass"


def cache_folder() -> Path:
    """Return the folder of this user: cute-mla/disassembly in $XDG_CACHE_HOME, by default ~/.cache."""
    chosen = os.environ.get(FOLDER_VARIABLE, "")
    root = Path(chosen) if Path(chosen).is_absolute() else Path.home() / ".cache"  # a relative path is to be ignored, says the standard
    return root / "cute-mla" / "disassembly"


@dataclass(frozen=True)
class TextCache:
    """Texts by key in a folder of at most max_bytes; the ones used longest ago go first."""

    folder: Path
    max_bytes: int = MAX_BYTES

    def get(self, key: str, make: Callable[[], str]) -> str:
        """Return the text of a key; make and keep it if it is missing or damaged."""
        path = self.folder / f"{key}{_SUFFIX}"
        text = self._read(path)
        if text is None:
            text = make()
            self._write(path, text)
        return text

    def _read(self, path: Path) -> str | None:
        try:
            if not self._is_private():
                return None
            content = path.read_bytes()
            data = content[_DIGEST_BYTES:]
            if hashlib.sha256(data).digest() != content[:_DIGEST_BYTES]:
                return None
            text = zlib.decompress(data).decode()
            os.utime(path)
        except (OSError, zlib.error, UnicodeDecodeError):
            return None
        return text

    def _write(self, path: Path, text: str) -> None:
        data = zlib.compress(text.encode(), 1)
        content = hashlib.sha256(data).digest() + data
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_private():
                return
            self._make_room(len(content))
            handle, name = tempfile.mkstemp(suffix=".tmp", dir=self.folder)  # only its owner may read it
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(content)
                Path(name).replace(path)
            except OSError:
                Path(name).unlink(missing_ok=True)
        except OSError:
            return

    def _is_private(self) -> bool:
        """Return whether the folder is this user's own and no other may write to it. OSError if it does not exist."""
        status = self.folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            return False
        return os.name != "posix" or (status.st_uid == os.geteuid() and not status.st_mode & 0o022)

    def _make_room(self, count: int) -> None:
        """Delete the files used longest ago until `count` more bytes fit, with what writers that were killed have left."""
        files = sorted((status.st_mtime_ns, status.st_size, path) for path in self.folder.iterdir() if (status := path.lstat()))
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total + count <= self.max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size


def disassembly(cubin: bytes) -> str:
    """Return the machine code of a cubin as text with its encodings, as `disassemble` does, from the cache if it is there."""
    try:
        release = version(PACKAGE)
    except PackageNotFoundError:
        return disassemble(cubin)  # which says what to install
    return TextCache(cache_folder()).get(f"{hashlib.sha256(cubin).hexdigest()}-{release}", lambda: disassemble(cubin))

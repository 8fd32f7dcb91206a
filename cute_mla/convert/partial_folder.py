"""Folder that a conversion writes: complete under its own name, or incomplete under another one, where a second run goes on."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..layer.checkpoint import INDEX, Entry, read_headers, read_json, tensor_files
from .report import ConversionReport, LayerReport
from .source import FLOATS
from .target import Tensors

REPORT_JSON, REPORT_TEXT = "conversion.json", "conversion.txt"
_STATE = "conversion.lock"
_SPARE = 1 << 24  # bytes beside the weights: tokenizer and reports


@dataclass(frozen=True)
class PartialFolder:
    """Folder OUT.partial beside the folder OUT: a file of weights per layer, and one for the rest of the model.

    A layer is complete if its report is there, which is written after its weights. Neither config.json nor an index is there before the
    last step, so that nothing loads the folder; then it is renamed to OUT.
    """

    out: Path
    layers: int

    @property
    def folder(self) -> Path:
        """Return the path of the incomplete folder."""
        return self.out.with_name(f"{self.out.name}.partial")

    @contextmanager
    def opened(self, fingerprint: str) -> Iterator[None]:
        """Make the folder, or go on in it, as the only process.

        fingerprint: hash of the source, the options and the calibration. Raises ValueError if the folder is of another conversion, or if
        another process is converting into it.
        """
        self.folder.mkdir(exist_ok=True)
        state = self.folder / _STATE
        with state.open("a+") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"another process converts into {self.out}; supported: one at a time") from error
            held.seek(0)
            known = held.read()
            if known not in ("", fingerprint):
                raise ValueError(
                    f"{self.folder} is from a conversion of other weights or with other options; supported: the same again, to go on "
                    "with it, or no such folder: delete it"
                )
            held.write("" if known else fingerprint)
            held.flush()
            yield

    def finished(self, layer: int) -> LayerReport | None:
        """Return the report of a layer that is complete, else None."""
        path = self._report_of(layer)
        return LayerReport(**read_json(path)) if path.is_file() and (self.folder / self._shard(layer)).is_file() else None

    def write_layer(self, layer: int, weights: Tensors, dtype: torch.dtype, report: LayerReport) -> None:
        """Write the weights of a layer, then its report. Raise OSError if they cannot be written."""
        self._write_weights(layer, {f"model.layers.{layer}.{name}": weight for name, weight in weights.items()}, dtype)
        _write_file(self._report_of(layer), json.dumps(asdict(report)).encode())

    def finish(self, outer: Tensors, dtype: torch.dtype, config: Mapping[str, Any], report: ConversionReport) -> None:
        """Write the weights outside the layers, the reports, the index and the configuration, and give the folder its name."""
        self._write_weights(self.layers, outer, dtype)
        _write_file(self.folder / REPORT_JSON, _text(report.to_json()))
        _write_file(self.folder / REPORT_TEXT, report.words().encode())
        _write_file(self.folder / INDEX, _text(self._index()))
        _write_file(self.folder / "config.json", _text(config))
        for layer in range(self.layers):
            self._report_of(layer).unlink()
        (self.folder / _STATE).unlink()
        _sync(self.folder)
        self.folder.rename(self.out)
        _sync(self.out.parent)

    def copy(self, file: Path) -> None:
        """Copy a file beside the weights, such as the tokenizer."""
        _write_file(self.folder / file.name, file.read_bytes())

    def check_space(self, needed: int) -> None:
        """Raise OSError if the disk has less than this many bytes for the weights that are not yet written."""
        written = sum(path.stat().st_size for path in self.folder.glob("*.safetensors")) if self.folder.is_dir() else 0
        free = shutil.disk_usage(self.out.parent).free
        if needed + _SPARE - written > free:
            said = f"no space for the converted weights: {needed / 1e9:.3f} GB are needed, {free / 1e9:.3f} GB are free"
            raise OSError(errno.ENOSPC, said, str(self.out))

    def _shard(self, index: int) -> str:
        return f"model-{index + 1:05d}-of-{self.layers + 1:05d}.safetensors"

    def _report_of(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:05d}.json"

    def _write_weights(self, index: int, weights: Tensors, dtype: torch.dtype) -> None:
        from safetensors.torch import save

        rounded = {name: weight.to(dtype).contiguous() for name, weight in weights.items()}
        bad = [name for name, weight in rounded.items() if not bool(torch.isfinite(weight).all())]
        if bad:
            raise ValueError(f"{bad[0]} overflows {dtype}; supported: bf16 and fp32, which have the same range")
        _write_file(self.folder / self._shard(index), save(rounded, metadata={"format": "pt"}))

    def _index(self) -> dict[str, Any]:
        """Return the index of the weights from the headers of their files."""
        entries: dict[str, Entry] = {}
        for index in range(self.layers + 1):
            entries |= read_headers(tensor_files(self.folder / self._shard(index)))
        total = sum(math.prod(entry.shape) * FLOATS[entry.dtype].itemsize for entry in entries.values())
        places = {name: entry.file.name for name, entry in entries.items()}
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}


def check_paths(source: Path, out: Path) -> None:
    """Raise ValueError unless `out` is a new folder outside the source."""
    resolved, inside = out.resolve(), source.resolve()
    if resolved == inside or inside in resolved.parents or resolved in inside.parents:
        raise ValueError(f"the output {out} is the input {source}, or one lies in the other; supported: a folder of its own")
    if out.exists() or out.is_symlink():
        raise ValueError(f"the output {out} exists; supported: the name of a new folder")


def _write_file(path: Path, content: bytes) -> None:
    """Write a whole file atomically and durably. Raise OSError with the name of the file if that fails."""
    partial = path.with_name(f"{path.name}.writing")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def _sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _text(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()

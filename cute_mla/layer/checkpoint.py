"""Files of a checkpoint in safetensors: where each tensor lies, its shape and dtype, and its values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..ops.arguments import check_integer

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_LAYERS = 65_536  # of a model; names of more layers are not made

_MOST_NAMES = 5  # in an error
_MODELS = ("model.", "language_model.model.", "model.language_model.")  # what names begin with; the last two: of multimodal models


class Entry(NamedTuple):
    """Tensor of a checkpoint: its file, shape and dtype, the last as safetensors names it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def read_json(path: Path) -> Any:
    """Return the value of a JSON file. Raise ValueError if it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}; supported: the files of a checkpoint") from error


def tensor_files(path: Path) -> dict[str, Path]:
    """Return the file of each tensor of a checkpoint: of a .safetensors file, or of a folder by its index, if it has one.

    Raises ValueError for a damaged index or file, FileNotFoundError if the file is missing, and ModuleNotFoundError without the
    safetensors package.
    """
    index = path / INDEX
    if not index.is_file():
        file = path / SINGLE if path.is_dir() else path
        with _opened(file) as stored:
            return dict.fromkeys(stored.keys(), file)
    content = read_json(index)
    places = content.get("weight_map") if isinstance(content, Mapping) else None
    if not isinstance(places, Mapping) or not all(isinstance(file, str) and _is_name(file) for file in places.values()):
        raise ValueError(f"{index} has no weight_map from names to files beside it; supported: the index of a checkpoint")
    return {name: path / file for name, file in places.items()}


def read_headers(files: Mapping[str, Path]) -> dict[str, Entry]:
    """Return shapes and dtypes of all tensors. Raise the errors of tensor_files, ValueError also for tensors that are not in their file."""
    entries: dict[str, Entry] = {}
    for file, names in _by_file(files, files).items():
        with _opened(file) as stored:
            slices = {name: stored.get_slice(name) for name in names}
            entries |= {name: Entry(file, tuple(weight.get_shape()), weight.get_dtype()) for name, weight in slices.items()}
    return entries


def read_tensors(files: Mapping[str, Path], names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return tensors by name, each from its file. Raise the errors of read_headers."""
    read: dict[str, torch.Tensor] = {}
    for file, held in _by_file(files, names).items():
        with _opened(file) as stored:
            read |= {name: stored.get_tensor(name) for name in held}
    return read


def read_attention(path: str | Path, layer: int, shared: Iterable[str] = ()) -> tuple[dict[str, torch.Tensor], str]:
    """Return the tensors of a layer's attention, and what their names begin with. Raise the errors of read_headers.

    shared: names of tensors that all layers of the model share, which the result has among those of the layer, where there are any.
    """
    check_integer("layer", layer, 0)
    files = tensor_files(Path(path))
    prefixes = [f"{model}layers.{layer}.self_attn." for model in _MODELS]
    held = {prefix: [name for name in files if name.startswith(prefix)] for prefix in prefixes}
    found = [prefix for prefix in prefixes if held[prefix]]
    if len(found) > 1:
        raise ValueError(f"{path} has tensors named {' and '.join(f'{prefix}*' for prefix in found)}; supported: one model")
    prefix = found[0] if found else prefixes[0]
    common = {f"{prefix.removesuffix(f'layers.{layer}.self_attn.')}{name}": f"{prefix}{name}" for name in shared}
    read = read_tensors(files, [*held[prefix], *(name for name in common if name in files)])
    return {common.get(name, name): tensor for name, tensor in read.items()}, prefix


def listed(names: Iterable[str]) -> str:
    """Return names for an error, five at most."""
    first = sorted(names)
    rest = f" and {len(first) - _MOST_NAMES} more" if len(first) > _MOST_NAMES else ""
    return ", ".join(first[:_MOST_NAMES]) + rest


def _is_name(file: str) -> bool:
    return file not in ("", "..") and Path(file).name == file


def _by_file(files: Mapping[str, Path], names: Iterable[str]) -> dict[Path, list[str]]:
    held: dict[Path, list[str]] = {}
    for name in names:
        held.setdefault(files[name], []).append(name)
    return held


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file; errors of safetensors become ValueError."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "checkpoints are read with the package safetensors, which is not installed: pip install 'cute-mla[weights]'", name="safetensors"
        ) from error
    if not file.is_file():
        raise FileNotFoundError(2, "no such file of weights", str(file))
    try:
        with safe_open(file, framework="pt") as stored:
            yield stored
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged: {error}; supported: whole safetensors files") from error

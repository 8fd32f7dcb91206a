"""Description of the launch of a kernel that is not ours, read from a JSON file (README.md has the format)."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...simulator import GlobalMemory
from ...simulator.numerics.tma import encode_native_tensor_map
from ...spec.tensor_map import Swizzle, TensorMap

_ALIGNMENT = 256  # of buffers, as allocations of a GPU
_POISON = 0xFF
_NUMBERS = {"int32": "<i", "int64": "<q", "float32": "<f"}
_KEYS = {"name", "grid", "block", "cluster", "smem_bytes", "blocks", "cold", "sharing", "roles", "buffers", "parameters"}
_NEEDED = ("grid", "block", "parameters")
_MAP_KEYS = {"buffer", "offset", "dtype", "dims", "strides", "box", "swizzle"}
_BUFFER_KEYS = {"bytes", "fill", "hex", "file", *_NUMBERS}


class PeerError(ValueError):
    """Description that cannot be used; the message names the key, what was given and what is supported."""


@dataclass(frozen=True)
class PeerRole:
    """Warps of a CTA that do the same, for the table of waits."""

    name: str
    first_warp: int
    warps: int


@dataclass(frozen=True)
class PeerLaunch:
    """A launch. blocks: of keys that the first cluster handles, None if not given. cold: whether loads come from HBM at first.

    sharing: clusters that load the same keys. parameters: bytes of each. memory: bytes of each buffer by name.
    """

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    blocks: int | None
    cold: bool
    sharing: int
    roles: tuple[PeerRole, ...]
    parameters: tuple[bytes, ...]
    memory: Mapping[str, np.ndarray]

    def global_memory(self) -> GlobalMemory:
        """Return the buffers as memory of a launch."""
        memory = GlobalMemory()
        for name, data in self.memory.items():
            memory.add(name, data.ctypes.data, data.nbytes)
        return memory


def read_peer_launch(path: Path) -> PeerLaunch:
    """Read a description. PeerError if it cannot be read, lacks a key or has one that is not supported."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PeerError(f"{path}: {error}") from error
    try:
        return peer_launch(document, path.parent, path.stem)
    except (KeyError, TypeError, ValueError, OverflowError, OSError, struct.error) as error:
        what = f"{error.args[0]} is missing" if isinstance(error, KeyError) and error.args else str(error)
        raise PeerError(f"{path}: {what}") from error


def peer_launch(document: Any, folder: Path, name: str) -> PeerLaunch:
    """Return the launch of a document. folder: of the files that it names. name: for a document without one."""
    _check_keys("the description", document, _KEYS, _NEEDED)
    memory = {str(key): _buffer(str(key), entry, folder) for key, entry in document.get("buffers", {}).items()}
    smem, blocks, sharing = (_whole(key, document.get(key, default)) for key, default in (("smem_bytes", 0), ("blocks", 0), ("sharing", 1)))
    return PeerLaunch(
        name=str(document.get("name", name)),
        grid=_extents("grid", document["grid"]),
        block=_extents("block", document["block"]),
        cluster=_extents("cluster", document.get("cluster", (1, 1, 1))),
        smem_bytes=smem,
        blocks=blocks or None,
        cold=bool(document.get("cold", True)),
        sharing=max(sharing, 1),
        roles=tuple(PeerRole(str(role[0]), int(role[1]), int(role[2])) for role in document.get("roles", ())),
        parameters=tuple(_parameter(entry, memory) for entry in document["parameters"]),
        memory=memory,
    )


def _check_keys(what: str, entry: Any, known: set[str], needed: Sequence[str] = ()) -> None:
    if not isinstance(entry, dict):
        raise PeerError(f"{what} is {type(entry).__name__}; supported: an object")
    unknown = sorted(entry.keys() - known)
    if unknown:
        raise PeerError(f"{what} has {', '.join(unknown)}; supported: {', '.join(sorted(known))}")
    for key in needed:
        if key not in entry:
            raise PeerError(f"{what}: {key} is missing")


def _whole(key: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise PeerError(f"{key} is {value!r}; supported: a whole number, 0 or more")
    return value


def _extents(key: str, value: Any) -> tuple[int, int, int]:
    if not isinstance(value, list | tuple) or len(value) != 3 or any(type(extent) is not int or extent < 1 for extent in value):
        raise PeerError(f"{key} is {value!r}; supported: three whole numbers, each 1 or more")
    return value[0], value[1], value[2]


def _buffer(name: str, entry: Any, folder: Path) -> np.ndarray:
    """Return the memory of a buffer: zeros, or the contents that its description gives."""
    _check_keys(f"buffer {name}", entry, _BUFFER_KEYS)
    given = [key for key in ("hex", "file", *_NUMBERS) if key in entry]
    if len(given) > 1:
        raise PeerError(f"buffer {name} has {' and '.join(given)}; supported: one of them")
    contents = b""
    if "hex" in entry:
        contents = bytes.fromhex(entry["hex"])
    elif "file" in entry:
        contents = (folder / entry["file"]).read_bytes()
    elif given:
        contents = b"".join(struct.pack(_NUMBERS[given[0]], number) for number in entry[given[0]])
    size = max(_whole(f"bytes of buffer {name}", entry.get("bytes", len(contents))), 1)
    if len(contents) > size:
        raise PeerError(f"buffer {name} has {len(contents)} bytes of contents in {size} bytes")
    space = np.zeros(size + _ALIGNMENT, np.uint8)
    data = space[-space.ctypes.data % _ALIGNMENT :][:size]
    fill = entry.get("fill", "zeros")
    if fill not in _FILLS:
        raise PeerError(f"fill of buffer {name} is {fill!r}; supported: {', '.join(_FILLS)}")
    _FILLS[fill](data)
    data[: len(contents)] = np.frombuffer(contents, np.uint8)
    return data


def _fill_bf16(data: np.ndarray) -> None:
    """Fill with bf16 values of N(0, 0.1)."""
    values = np.random.default_rng(0).normal(0, 0.1, data.size // 2).astype(np.float32)
    data[: values.size * 2] = (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)


_FILLS: Mapping[str, Callable[[np.ndarray], None]] = {
    "zeros": lambda data: None,
    "ones": lambda data: data.fill(_POISON),
    "bf16": _fill_bf16,
}


def _parameter(entry: Any, memory: Mapping[str, np.ndarray]) -> bytes:
    """Return the bytes of a parameter: of one piece, or of several in a row."""
    return b"".join(_piece(piece, memory) for piece in (entry if isinstance(entry, list) else [entry]))


def _piece(entry: Any, memory: Mapping[str, np.ndarray]) -> bytes:
    if isinstance(entry, dict) and "buffer" in entry:
        _check_keys("a pointer", entry, {"buffer", "offset"})
        return struct.pack("<Q", _address(entry, memory))
    if not isinstance(entry, dict) or len(entry) != 1:
        raise PeerError(
            f"a parameter has {entry!r}; supported: an object with one of buffer, tensor_map, hex, zeros, {', '.join(_NUMBERS)}"
        )
    ((key, value),) = entry.items()
    if key == "tensor_map":
        return _tensor_map(value, memory)
    if key == "hex":
        return bytes.fromhex(value)
    if key == "zeros":
        return bytes(_whole("zeros of a parameter", value))
    if key in _NUMBERS:
        return struct.pack(_NUMBERS[key], value)
    raise PeerError(f"a parameter has {key}; supported: buffer, tensor_map, hex, zeros, {', '.join(_NUMBERS)}")


def _address(entry: Mapping[str, Any], memory: Mapping[str, np.ndarray]) -> int:
    name, offset = entry["buffer"], _whole("offset", entry.get("offset", 0))
    if name not in memory:
        raise PeerError(f"no buffer is named {name!r}; buffers: {', '.join(memory) or 'none'}")
    if offset >= memory[name].nbytes:
        raise PeerError(f"offset {offset} lies beyond the {memory[name].nbytes} bytes of buffer {name}")
    return int(memory[name].ctypes.data) + offset


def _tensor_map(entry: Any, memory: Mapping[str, np.ndarray]) -> bytes:
    _check_keys("a tensor map", entry, _MAP_KEYS, ("buffer", "dtype", "dims", "strides", "box"))
    swizzle = entry.get("swizzle", Swizzle.NONE.value)
    if swizzle not in set(Swizzle):
        raise PeerError(f"swizzle is {swizzle!r}; supported: {', '.join(Swizzle)}")
    made = TensorMap(
        str(entry["dtype"]), _address(entry, memory), tuple(entry["dims"]), tuple(entry["strides"]), tuple(entry["box"]), Swizzle(swizzle)
    )
    return encode_native_tensor_map(made)

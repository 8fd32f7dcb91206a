"""Launch files: a kernel's launch as a JSON object, with its buffers and what they must hold afterwards (README.md has the format)."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..numerics.tensor_map import Swizzle, TensorMap
from ..numerics.tma import encode_native_tensor_map
from ..state.memory import GlobalMemory
from ..state.names import Names

_ALIGNMENT = 256  # of buffers, as allocations of a GPU
_POISON = 0xFF
UNDEFINED = "undefined"
_NUMBERS = {"int32": "<i", "int64": "<q", "float32": "<f"}
_KEYS = {
    "name",
    "kernel",
    "grid",
    "block",
    "cluster",
    "smem_bytes",
    "blocks",
    "cold",
    "sharing",
    "roles",
    "buffers",
    "parameters",
    "expected",
}
_NEEDED = ("grid", "block", "parameters")
_MAP_KEYS = {"buffer", "offset", "dtype", "dims", "strides", "box", "swizzle"}
_DTYPES = {name: np.dtype(code) for name, code in {"bf16": "<u2", "fp16": "<f2", "float32": "<f4", "int32": "<i4", "uint8": "u1"}.items()}
_CONTENTS = ("hex", "file", *_NUMBERS)
_BUFFER_KEYS = {"bytes", "fill", *_CONTENTS}
_EXPECTED_KEYS = {"dtype", "tolerance", "relative", *_CONTENTS}


class LaunchFileError(ValueError):
    """Description that cannot be used; the message names the key, what was given and what is supported."""


@dataclass(frozen=True)
class WarpRange:
    """Warps of a CTA that do the same, for the table of waits."""

    name: str
    first_warp: int
    warps: int


@dataclass(frozen=True)
class Expected:
    """Contents of a buffer, from its first byte on. An element may differ by tolerance + relative * its magnitude; NaN equals NaN."""

    contents: bytes
    dtype: str
    tolerance: float
    relative: float

    def difference(self, data: np.ndarray) -> str:
        """Say how the contents of a buffer differ, or nothing."""
        wanted, found = (_values(raw, self.dtype) for raw in (self.contents, data[: len(self.contents)].tobytes()))
        with np.errstate(invalid="ignore"):
            near = np.abs(found - wanted) <= self.tolerance + self.relative * np.abs(wanted)
        wrong = np.flatnonzero(~(near | (found == wanted) | (np.isnan(found) & np.isnan(wanted))))
        if not wrong.size:
            return ""
        first = int(wrong[0])
        return f"{wrong.size} of {wanted.size} elements differ, first [{first}]: {found[first]:g}, expected {wanted[first]:g}"


@dataclass(frozen=True)
class LaunchFile:
    """A launch.

    kernel: its entry, empty for code that has one. parameters: bytes of each. memory: bytes of each buffer by name. expected: what buffers
    must hold after the launch. undefined: buffers that nobody has written before it. For the clock: blocks of keys that the first cluster
    handles, None if not given; cold: whether loads come from HBM at first; sharing: clusters that load the same keys.
    """

    name: str
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    blocks: int | None
    cold: bool
    sharing: int
    roles: tuple[WarpRange, ...]
    parameters: tuple[bytes, ...]
    memory: Mapping[str, np.ndarray]
    expected: Mapping[str, Expected]
    undefined: frozenset[str]

    def global_memory(self) -> GlobalMemory:
        """Return the buffers as memory of a launch."""
        memory = GlobalMemory()
        for name, data in self.memory.items():
            memory.add(name, data.ctypes.data, data.nbytes, initialised=name not in self.undefined)
        return memory

    def names(self) -> Names:
        """Return the names of warps in findings."""
        return Names(roles=tuple((role.name, role.first_warp, role.warps) for role in self.roles))

    def differences(self) -> list[str]:
        """Return a line for each buffer that does not hold what is expected now."""
        compared = ((name, expected.difference(self.memory[name])) for name, expected in self.expected.items())
        return [f"{name}: {difference}" for name, difference in compared if difference]


def read_launch_file(path: Path) -> LaunchFile:
    """Read a description. LaunchFileError if it cannot be read, lacks a key or has one that is not supported."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise LaunchFileError(f"{path}: {error}") from error
    try:
        return parse_launch(document, path.parent, path.stem)
    except (KeyError, TypeError, ValueError, OverflowError, OSError, struct.error) as error:
        what = f"{error.args[0]} is missing" if isinstance(error, KeyError) and error.args else str(error)
        raise LaunchFileError(f"{path}: {what}") from error


def parse_launch(document: Any, folder: Path, name: str) -> LaunchFile:
    """Return the launch of a document. folder: of the files that it names. name: for a document without one."""
    _check_keys("the description", document, _KEYS, _NEEDED)
    memory = {str(key): _buffer(str(key), entry, folder) for key, entry in document.get("buffers", {}).items()}
    smem, blocks, sharing = (_whole(key, document.get(key, default)) for key, default in (("smem_bytes", 0), ("blocks", 0), ("sharing", 1)))
    return LaunchFile(
        name=str(document.get("name", name)),
        kernel=str(document.get("kernel", "")),
        grid=_extents("grid", document["grid"]),
        block=_extents("block", document["block"]),
        cluster=_extents("cluster", document.get("cluster", (1, 1, 1))),
        smem_bytes=smem,
        blocks=blocks or None,
        cold=bool(document.get("cold", True)),
        sharing=max(sharing, 1),
        roles=tuple(WarpRange(str(role[0]), int(role[1]), int(role[2])) for role in document.get("roles", ())),
        parameters=tuple(_parameter(entry, memory) for entry in document["parameters"]),
        memory=memory,
        undefined=frozenset(name for name, entry in document.get("buffers", {}).items() if entry.get("fill") == UNDEFINED),
        expected={str(key): _expected(str(key), entry, folder, memory) for key, entry in document.get("expected", {}).items()},
    )


def _check_keys(what: str, entry: Any, known: set[str], needed: Sequence[str] = ()) -> None:
    if not isinstance(entry, dict):
        raise LaunchFileError(f"{what} is {type(entry).__name__}; supported: an object")
    unknown = sorted(entry.keys() - known)
    if unknown:
        raise LaunchFileError(f"{what} has {', '.join(unknown)}; supported: {', '.join(sorted(known))}")
    for key in needed:
        if key not in entry:
            raise LaunchFileError(f"{what}: {key} is missing")


def _whole(key: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise LaunchFileError(f"{key} is {value!r}; supported: a whole number, 0 or more")
    return value


def _extents(key: str, value: Any) -> tuple[int, int, int]:
    if not isinstance(value, list | tuple) or len(value) != 3 or any(type(extent) is not int or extent < 1 for extent in value):
        raise LaunchFileError(f"{key} is {value!r}; supported: three whole numbers, each 1 or more")
    return value[0], value[1], value[2]


def _buffer(name: str, entry: Any, folder: Path) -> np.ndarray:
    """Return the memory of a buffer: zeros, or the contents that its description gives."""
    _check_keys(f"buffer {name}", entry, _BUFFER_KEYS)
    contents = _contents(f"buffer {name}", entry, folder)
    size = max(_whole(f"bytes of buffer {name}", entry.get("bytes", len(contents))), 1)
    if len(contents) > size:
        raise LaunchFileError(f"buffer {name} has {len(contents)} bytes of contents in {size} bytes")
    space = np.zeros(size + _ALIGNMENT, np.uint8)
    data = space[-space.ctypes.data % _ALIGNMENT :][:size]
    fill = entry.get("fill", "zeros")
    if fill not in _FILLS:
        raise LaunchFileError(f"fill of buffer {name} is {fill!r}; supported: {', '.join(_FILLS)}")
    _FILLS[fill](data)
    data[: len(contents)] = np.frombuffer(contents, np.uint8)
    return data


def _contents(what: str, entry: Mapping[str, Any], folder: Path) -> bytes:
    """Return the bytes that an entry gives, if any."""
    given = [key for key in _CONTENTS if key in entry]
    if len(given) > 1:
        raise LaunchFileError(f"{what} has {' and '.join(given)}; supported: one of them")
    if "hex" in entry:
        return bytes.fromhex(entry["hex"])
    if "file" in entry:
        return (folder / entry["file"]).read_bytes()
    return b"".join(struct.pack(_NUMBERS[key], number) for key in given for number in entry[key])


def _expected(name: str, entry: Any, folder: Path, memory: Mapping[str, np.ndarray]) -> Expected:
    """Return what a buffer must hold."""
    what = f"expected contents of {name}"
    _check_keys(what, entry, _EXPECTED_KEYS, ("dtype",))
    if name not in memory:
        raise LaunchFileError(f"{what}: no buffer is named {name!r}; buffers: {', '.join(memory) or 'none'}")
    if entry["dtype"] not in _DTYPES:
        raise LaunchFileError(f"{what} have dtype {entry['dtype']!r}; supported: {', '.join(_DTYPES)}")
    contents = _contents(what, entry, folder)
    if not contents or len(contents) > memory[name].nbytes or len(contents) % _DTYPES[entry["dtype"]].itemsize:
        raise LaunchFileError(
            f"{what} are {len(contents)} bytes; supported: whole elements, 1 to the {memory[name].nbytes} bytes of the buffer"
        )
    return Expected(contents, entry["dtype"], float(entry.get("tolerance", 0)), float(entry.get("relative", 0)))


def _values(raw: bytes, dtype: str) -> np.ndarray:
    """Return elements in fp64, which is exact for all of these types."""
    if dtype == "bf16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    return np.frombuffer(raw, _DTYPES[dtype]).astype(np.float64)


def _fill_bf16(data: np.ndarray) -> None:
    """Fill with bf16 values of N(0, 0.1)."""
    values = np.random.default_rng(0).normal(0, 0.1, data.size // 2).astype(np.float32)
    data[: values.size * 2] = (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)


_FILLS: Mapping[str, Callable[[np.ndarray], None]] = {
    "zeros": lambda data: None,
    "ones": lambda data: data.fill(_POISON),
    UNDEFINED: lambda data: data.fill(_POISON),
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
        raise LaunchFileError(
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
    raise LaunchFileError(f"a parameter has {key}; supported: buffer, tensor_map, hex, zeros, {', '.join(_NUMBERS)}")


def _address(entry: Mapping[str, Any], memory: Mapping[str, np.ndarray]) -> int:
    name, offset = entry["buffer"], _whole("offset", entry.get("offset", 0))
    if name not in memory:
        raise LaunchFileError(f"no buffer is named {name!r}; buffers: {', '.join(memory) or 'none'}")
    if offset >= memory[name].nbytes:
        raise LaunchFileError(f"offset {offset} lies beyond the {memory[name].nbytes} bytes of buffer {name}")
    return int(memory[name].ctypes.data) + offset


def _tensor_map(entry: Any, memory: Mapping[str, np.ndarray]) -> bytes:
    _check_keys("a tensor map", entry, _MAP_KEYS, ("buffer", "dtype", "dims", "strides", "box"))
    swizzle = entry.get("swizzle", Swizzle.NONE.value)
    if swizzle not in set(Swizzle):
        raise LaunchFileError(f"swizzle is {swizzle!r}; supported: {', '.join(Swizzle)}")
    made = TensorMap(
        str(entry["dtype"]), _address(entry, memory), tuple(entry["dims"]), tuple(entry["strides"]), tuple(entry["box"]), Swizzle(swizzle)
    )
    return encode_native_tensor_map(made)

"""Elements of the cover: what a test reaches in the shipped kernels.

An element belongs to a structure of kernels (tests/mutation/places.py): kernels that differ only in dtype share one, since their code is
equal but for conversions. A structure on its own has too few elements, so the kinds of elements are:

block      A basic block that ran. Every mutation site of tests/mutation/sites.py and numeric.py lies in one block, so tests that reach all
           blocks reach all sites. Blocks have no line numbers: the key is the opcodes, alike for bf16 and fp16, and a count among equals.
argument   A class of an argument of the launch: null pointers, alignments, far and unaligned strides, tile remainders. A wrong constant or
           comparison in a block often shows only for some of them. Tests without a case have these, too.
case       A class of a field of the case that ran: dtype, layouts, values, lengths. Values decide what flows through a block.
schedule   The order of the warps: missing waits show under some orders only.

All but blocks count once for every dtype of the cases, since a wrong number in the kernel of one type is right in the other.

A test adds, for every architecture, its function and the classes of those parameters that are no fields of its cases. Each function thus
keeps a test per architecture, and so does each value, such as an invalid index, that only the test knows. What moves are combinations of
values, and values that other tests have in the same structure.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from cute_mla.manifest import KernelEntry
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.simulator import Report
from cute_mla.spec.abi import Param, ParamKind
from cute_mla.testing.cases.base import BaseCase
from tests.mutation.places import structure
from tests.mutation.sites import find

TILE = 64  # rows and keys of a tile: the classes of a number tell remainders
SIZES = (TILE, 2 * TILE, 1 << 31)
ALIGNMENTS = (16, 8, 4, 2, 1)


def number_class(number: int) -> str:
    """Return the class of an integer: 0, 1 and -1 themselves, else sign, size, and remainder by a tile (0, 1, 63, odd or even)."""
    if abs(number) <= 1:
        return str(number)
    size = next((f"<{limit}" for limit in SIZES if abs(number) < limit), "far")
    rest = number % TILE
    return f"{'-' if number < 0 else ''}{size}:{rest if rest in (0, 1, TILE - 1) else 'odd' if rest % 2 else 'even'}"


def float_class(number: float) -> str:
    """Return the class of a float: 0, infinities and NaN themselves, else sign and magnitude in steps of 2^4."""
    if number == 0 or not math.isfinite(number):
        return str(number)
    return f"{'-' if number < 0 else ''}2^{math.frexp(number)[1] // 4 * 4}"


def value_classes(name: str, value: Any) -> Iterator[str]:
    """Yield the classes of a value by name: of the fields of a record, of the items of a tuple, of one value of another type."""
    names = _field_names(value)
    if names:
        for field in names:
            yield from value_classes(f"{name}.{field}" if name else field, getattr(value, field))
    elif isinstance(value, tuple | list):
        yield f"{name} items={number_class(len(value))}"
        for item in value:
            yield from value_classes(name, item)
    elif isinstance(value, bool) or not isinstance(value, int | float):
        yield f"{name}={value}"
    else:
        yield f"{name}={number_class(value) if isinstance(value, int) else float_class(value)}"


def _field_names(value: Any) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass or a named tuple; none for other values."""
    if is_dataclass(value) and not isinstance(value, type):
        return tuple(field.name for field in fields(value))
    return getattr(value, "_fields", ())


def case_elements(case: BaseCase) -> Iterator[str]:
    """Yield the classes of the fields of a case."""
    return (item for item in value_classes("", case) if not item.startswith("seed="))


def argument_elements(params: Sequence[Param], grid: tuple[int, int, int], args: Sequence[Any]) -> Iterator[str]:
    """Yield the classes of the arguments of a launch and of the extents of its grid."""
    yield from (f"grid {axis}={number_class(extent)}" for axis, extent in zip("xyz", grid, strict=True))
    for param, arg in zip(params, args, strict=True):
        if param.kind is ParamKind.TENSOR_MAP:
            yield from (item for item in value_classes(f"@{param.name}", arg) if not re.match(r"@\w+\.address", item))
        elif param.kind is ParamKind.POINTER:
            address = 0 if arg is None else arg.data_ptr()
            yield f"@{param.name}={next(size for size in ALIGNMENTS if address % size == 0) if address else 'null'}"
        else:
            yield from value_classes(f"@{param.name}", arg)


_structures: dict[str, str] = {}  # by the sha256 of the PTX


def structure_of(kernel: KernelEntry) -> str:
    """Return a short name of the structure of a kernel: op, architecture and a digest."""
    found = _structures.get(kernel.ptx_sha256)
    if found is None:
        ptx = load_artifacts().ptx(kernel)
        digest = _digest(repr(structure(kernel, ptx, find(ptx))))
        found = _structures[kernel.ptx_sha256] = f"{kernel.op} {kernel.arch} {digest}"
    return found


def block_elements(report: Report) -> Iterator[str]:
    """Yield the keys of the blocks that ran."""
    keys = _keys(report.executed.blocks)
    return (keys[index] for index in {index for index, _ in report.executed.times})


_known: dict[int, tuple[Any, list[str]]] = {}  # by the id of a kernel's list of blocks, which is held so that its id stays its own


def _keys(blocks: Sequence[Any]) -> list[str]:
    """Return the key of each block of a kernel."""
    found = _known.get(id(blocks))
    if found is None:
        if len(_known) >= 32:
            _known.clear()
        seen: Counter[str] = Counter()
        keys = []
        for block in blocks:
            digest = _digest(" ".join(item.instruction.opcode.replace("bf16", "f16") for item in block.instructions))
            keys.append(f"#{digest}.{seen[digest]}")
            seen[digest] += 1
        found = _known[id(blocks)] = (blocks, keys)
    return found[1]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]

"""Reader of cubins: ELF sections, registers, stack, parameters and the tool note."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

# Attribute numbers of the .nv.info sections, whose records are (format, attribute, size or value[, bytes]).
_INFO_WITH_BYTES = 4
_ATTRIBUTE_FRAME_SIZE = 0x11
_ATTRIBUTE_MIN_STACK = 0x12
_ATTRIBUTE_PARAMETER_BANK = 0x0A
_ATTRIBUTE_PARAMETER = 0x17
_ATTRIBUTE_REGISTERS = 0x2F

_SECTION_NO_BITS = 8
TOOL_NOTE = ".note.nv.tkinfo"


class CubinError(ValueError):
    """Bytes that are not a cubin with the sections of one kernel."""


@dataclass(frozen=True)
class CubinInfo:
    """Contents of a cubin.

    entries: the kernel that was asked for. registers, stack_bytes: per thread. params: (offset, size) in order.
    param_base: offset of the parameters in constant bank 0. shared_bytes: end of the static shared memory, 0 for none.
    tool, options: version and options of ptxas. sections: bytes by section name.
    """

    entries: tuple[str, ...]
    registers: int
    stack_bytes: int
    params: tuple[tuple[int, int], ...]
    param_base: int
    shared_bytes: int
    tool: str
    options: str
    sections: dict[str, bytes]


def read_cubin(cubin: bytes, kernel: str = "") -> CubinInfo:
    """Read an ELF file. kernel: which one, where it holds several. CubinError if it is no ELF file, or does not hold that one kernel."""
    try:
        sections = _sections(cubin)
        symbols = _symbol_names(sections)
        bodies = (name.removeprefix(".text.") for name in sections if name.startswith(".text."))
        entries = tuple(name for name in bodies if f".nv.info.{name}" in sections)  # device functions have no such section
        if len(entries) != 1 or kernel:
            if kernel not in entries:
                raise CubinError(f"holds {len(entries)} kernels {list(entries)}, expected one" + (f", {kernel}" if kernel else ""))
            entries = (kernel,)
        per_kernel: dict[int, int] = {}
        for attribute, value in _info_records(sections[".nv.info"]):
            if attribute in (_ATTRIBUTE_REGISTERS, _ATTRIBUTE_FRAME_SIZE, _ATTRIBUTE_MIN_STACK):
                symbol, figure = struct.unpack("<II", value)
                if symbols[symbol] == entries[0]:
                    per_kernel[attribute] = figure
        tool, options = _tool_note(sections.get(TOOL_NOTE, b""))
        return CubinInfo(
            entries=entries,
            registers=per_kernel[_ATTRIBUTE_REGISTERS],
            stack_bytes=max(per_kernel[_ATTRIBUTE_FRAME_SIZE], per_kernel[_ATTRIBUTE_MIN_STACK]),
            params=_parameters(sections[f".nv.info.{entries[0]}"]),
            param_base=_parameter_base(sections[f".nv.info.{entries[0]}"]),
            shared_bytes=_section_size(cubin, f".nv.shared.{entries[0]}"),
            tool=tool,
            options=options,
            sections=sections,
        )
    except (struct.error, IndexError, KeyError, UnicodeDecodeError) as error:
        raise CubinError(f"not a cubin of one kernel: {error!r}") from error


def _headers(cubin: bytes) -> Iterator[tuple[str, int, int, int]]:
    """Yield (name, kind, offset, size) of each section."""
    if cubin[:5] != b"\x7fELF\x02":
        raise CubinError(f"not a 64-bit ELF file: begins with {cubin[:5]!r}")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + index * entry_size) for index in range(count)]
    names = cubin[headers[names_index][4] :]
    for name, kind, _flags, _address, offset, size in headers:
        yield names[name : names.index(b"\0", name)].decode(), kind, offset, size


def _sections(cubin: bytes) -> dict[str, bytes]:
    return {name: b"" if kind == _SECTION_NO_BITS else cubin[offset : offset + size] for name, kind, offset, size in _headers(cubin)}


def _section_size(cubin: bytes, wanted: str) -> int:
    """Return the bytes of a section, which may have none in the file; 0 without the section."""
    return next((size for name, _, _, size in _headers(cubin) if name == wanted), 0)


def _symbol_names(sections: dict[str, bytes]) -> list[str]:
    strings = sections[".strtab"]
    table = sections[".symtab"]
    starts = [struct.unpack_from("<I", table, offset)[0] for offset in range(0, len(table), 24)]
    return [strings[start : strings.index(b"\0", start)].decode() for start in starts]


def _info_records(section: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (attribute, value) of each record with bytes. Records with an inline number are skipped."""
    position = 0
    while position < len(section):
        form, attribute, size = struct.unpack_from("<BBH", section, position)
        position += 4
        if form == _INFO_WITH_BYTES:
            yield attribute, section[position : position + size]
            position += size


def _parameters(section: bytes) -> tuple[tuple[int, int], ...]:
    found: dict[int, tuple[int, int]] = {}
    for attribute, value in _info_records(section):
        if attribute == _ATTRIBUTE_PARAMETER:
            _index, ordinal, offset, flags = struct.unpack("<IHHI", value)
            found[ordinal] = (offset, flags >> 18)
    if sorted(found) != list(range(len(found))):
        raise CubinError(f"its parameter records number {sorted(found)}")
    return tuple(found[ordinal] for ordinal in range(len(found)))


def _parameter_base(section: bytes) -> int:
    """Return where the parameters begin in constant bank 0; 0 for a kernel without parameters."""
    for attribute, value in _info_records(section):
        if attribute == _ATTRIBUTE_PARAMETER_BANK:
            return int(struct.unpack("<IHH", value)[1])
    return 0


def _tool_note(note: bytes) -> tuple[str, str]:
    """Return ptxas's version and options; empty strings without a note."""
    strings = [part.decode(errors="replace").strip() for part in note.split(b"\0")]
    version = next((found[1] for text in strings if (found := re.search(r"\bV(\d+\.\d+\.\d+)", text))), "")
    options = next((text for text in strings if re.search(r"(^|\s)-arch\s", text)), "")
    return version, options

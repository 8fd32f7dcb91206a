"""What is in a PTX text and in a cubin: parameters, registers, stack, tool notes and instruction counts."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

# Attribute numbers of the .nv.info sections, whose records are (format, attribute, size or value[, bytes]).
_INFO_WITH_BYTES = 4
_ATTRIBUTE_FRAME_SIZE = 0x11
_ATTRIBUTE_MIN_STACK = 0x12
_ATTRIBUTE_PARAMETER = 0x17
_ATTRIBUTE_REGISTERS = 0x2F

_SECTION_NO_BITS = 8
TOOL_NOTE = ".note.nv.tkinfo"
SYMBOLS = ".symtab"


class DamagedCubin(ValueError):
    """Bytes that are not a cubin with the sections of a kernel."""


@dataclass(frozen=True)
class KernelParam:
    """A parameter as the PTX declares it: type (such as ".u64"), bytes, and whether it is declared a pointer."""

    name: str
    type: str
    size: int
    align: int
    pointer: bool


@dataclass(frozen=True)
class PtxInfo:
    """block: the .reqntid of the kernel, or None. opcodes: how often each opcode, with all its modifiers, is written.

    tmem_columns: what each tcgen05.alloc asks for, None where that is not an immediate (or a register that is only ever one).
    """

    entries: tuple[str, ...]
    params: tuple[KernelParam, ...]
    block: tuple[int, int, int] | None
    opcodes: Counter[str]
    tmem_columns: tuple[int | None, ...] = ()

    def count(self, *patterns: str) -> int:
        """Instructions whose opcode begins with one of the patterns."""
        return count_matching(self.opcodes, *patterns)


@dataclass(frozen=True)
class CubinInfo:
    """entries: kernels in the file. registers, stack_bytes: of one thread. params: (offset, size) in order.

    tool: ptxas's version; options: the ones it was given. sections: what the file holds, by section name.
    """

    entries: tuple[str, ...]
    registers: int
    stack_bytes: int
    params: tuple[tuple[int, int], ...]
    tool: str
    options: str
    sections: dict[str, bytes]


def count_matching(counts: Counter[str], *patterns: str) -> int:
    """Sum of the counts whose key begins with a match of one of the regular expressions."""
    compiled = [re.compile(pattern) for pattern in patterns]
    return sum(number for key, number in counts.items() if any(pattern.match(key) for pattern in compiled))


# ---------------------------------------------------------------- PTX

_TYPE_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?(?P<type>\.[a-z]+(?P<bits>\d+))(?P<ptr>\s+\.ptr\b[^,\[]*?)?\s+(?P<name>[\w$]+)\s*(?:\[(?P<count>\d+)\])?\s*$"
)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", re.DOTALL)
_OPCODE = re.compile(r"\s*(?:\$?\w+:\s*)*(?:@!?%?\w+\s+)?([a-z]\w*(?:(?:\.|::)\w+)*)(?=\s|$)")

_TMEM_ALLOC = re.compile(r"\btcgen05\.alloc[\w.:]*\s+\[[^\]]*\]\s*,\s*([%\w$]+)\s*;")


def read_ptx(text: str) -> PtxInfo:
    """Entry points, parameters of the last of them, block size and opcode counts."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    entries: list[str] = []
    params: tuple[KernelParam, ...] = ()
    block: tuple[int, int, int] | None = None
    for name, declared, directives in _ENTRY.findall(text):
        entries.append(name)
        params = tuple(_read_param(line) for line in declared.split(",") if line.strip())
        required = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", directives)
        block = (int(required[1]), int(required[2] or 1), int(required[3] or 1)) if required else None
    opcodes: Counter[str] = Counter()
    for statement in re.split(r"[;{}\n]", text):
        found = _OPCODE.match(statement)
        if found:
            opcodes[found[1]] += 1
    return PtxInfo(tuple(entries), params, block, opcodes, tuple(_tmem_columns(text)))


def _tmem_columns(text: str) -> Iterator[int | None]:
    """The operand of each tcgen05.alloc."""
    for operand in _TMEM_ALLOC.findall(text):
        values = [operand] if operand.isdecimal() else re.findall(rf"\bmov\.[a-z]\d+\s+{re.escape(operand)}\s*,\s*(\w+)\s*;", text)
        writes = 1 if operand.isdecimal() else len(re.findall(rf"\s{re.escape(operand)}\s*,", text))
        yield int(values[0]) if len(values) == writes == 1 and values[0].isdecimal() else None


def _read_param(line: str) -> KernelParam:
    found = _PARAM.search(line.strip())
    if found is None:
        raise ValueError(f"cannot read the PTX parameter {line.strip()!r}")
    size = _TYPE_SIZES[found["bits"]]
    count = int(found["count"]) if found["count"] else 1
    return KernelParam(found["name"], found["type"], size * count, int(found["align"] or size), found["ptr"] is not None)


# ---------------------------------------------------------------- cubin


def read_cubin(cubin: bytes) -> CubinInfo:
    """Reads the ELF file. DamagedCubin if it is not one, or holds other than one kernel."""
    try:
        sections = _sections(cubin)
        symbols = _symbol_names(sections)
        bodies = (name.removeprefix(".text.") for name in sections if name.startswith(".text."))
        entries = tuple(name for name in bodies if f".nv.info.{name}" in sections)  # device functions have no such section
        if len(entries) != 1:
            raise DamagedCubin(f"holds {len(entries)} kernels {list(entries)}, expected one")
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
            tool=tool,
            options=options,
            sections=sections,
        )
    except (struct.error, IndexError, KeyError, UnicodeDecodeError) as error:
        raise DamagedCubin(f"not a cubin of one kernel: {error!r}") from error


def _sections(cubin: bytes) -> dict[str, bytes]:
    if cubin[:5] != b"\x7fELF\x02":
        raise DamagedCubin(f"not a 64-bit ELF file: begins with {cubin[:5]!r}")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + index * entry_size) for index in range(count)]
    names = cubin[headers[names_index][4] :]
    content: dict[str, bytes] = {}
    for name, kind, _flags, _address, offset, size in headers:
        label = names[name : names.index(b"\0", name)].decode()
        content[label] = b"" if kind == _SECTION_NO_BITS else cubin[offset : offset + size]
    return content


def _symbol_names(sections: dict[str, bytes]) -> list[str]:
    strings = sections[".strtab"]
    table = sections[SYMBOLS]
    starts = [struct.unpack_from("<I", table, offset)[0] for offset in range(0, len(table), 24)]
    return [strings[start : strings.index(b"\0", start)].decode() for start in starts]


def _info_records(section: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, value) of each record that carries bytes; those that carry a number in place are skipped."""
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
        raise DamagedCubin(f"its parameter records number {sorted(found)}")
    return tuple(found[ordinal] for ordinal in range(len(found)))


def _tool_note(note: bytes) -> tuple[str, str]:
    """ptxas's version and its options; empty where the file has no such note."""
    strings = [part.decode(errors="replace").strip() for part in note.split(b"\0")]
    version = next((found[1] for text in strings if (found := re.search(r"\bV(\d+\.\d+\.\d+)", text))), "")
    options = next((text for text in strings if re.search(r"(^|\s)-arch\s", text)), "")
    return version, options


# ---------------------------------------------------------------- SASS

_SASS_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)")
_SASS_FUNCTION = re.compile(r"^([\w$.]+):$")
_HELPER = "$__internal_"  # begins the name of what ptxas adds of its own, such as traps for wrong uses of tensor memory


def read_sass(text: str) -> Counter[str]:
    """How often each instruction, with its modifiers, occurs in nvdisasm's output, helpers of ptxas's own left out."""
    counts: Counter[str] = Counter()
    in_helper = False
    for line in text.splitlines():
        label = _SASS_FUNCTION.match(line)
        if label is not None and not label[1].startswith(".L_"):
            in_helper = label[1].startswith(_HELPER)
        elif not in_helper:
            counts.update(_SASS_LINE.findall(line))
    return counts


_PRODUCT = re.compile(r"[A-Z]GMMA\b")
_WAIT_FOR_ALL = re.compile(r"WARPGROUP\.DEPBAR\S* gsb0, 0x0\b")


def read_overlap(text: str) -> Counter[str]:
    """How often each instruction stands behind a WGMMA of nvdisasm's output and before the next wait for all of them: what a
    warp that runs straight on does while its products are under way."""
    counts: Counter[str] = Counter()
    under_way = False
    for line in text.splitlines():
        opcodes = _SASS_LINE.findall(line)
        if any(_PRODUCT.match(opcode) for opcode in opcodes):
            under_way = True
        elif _WAIT_FOR_ALL.search(line):
            under_way = False
        elif under_way:
            counts.update(opcodes)
    return counts


def by_mnemonic(sass: Counter[str]) -> dict[str, int]:
    """The counts without modifiers, in alphabetical order."""
    totals: Counter[str] = Counter()
    for opcode, number in sass.items():
        totals[opcode.split(".")[0]] += number
    return dict(sorted(totals.items()))

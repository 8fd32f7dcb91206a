"""Reader of PTX: entry points, parameters, block size, opcode counts and tensor-memory allocations."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .contraction import contractible
from .opcode_counts import count_matching


@dataclass(frozen=True)
class KernelParam:
    """A parameter as the PTX declares it. type: such as ".u64". size, align: bytes. pointer: declared with .ptr."""

    name: str
    type: str
    size: int
    align: int
    pointer: bool


@dataclass(frozen=True)
class PtxInfo:
    """Contents of a PTX text.

    block: .reqntid of the kernel, or None. opcodes: occurrences of each opcode with all its modifiers.
    tmem_columns: columns of each tcgen05.alloc; None unless the operand is an immediate or a register that only ever holds one.
    contractible: sums that ptxas may contract with a product (see contraction).
    """

    entries: tuple[str, ...]
    params: tuple[KernelParam, ...]
    block: tuple[int, int, int] | None
    opcodes: Counter[str]
    tmem_columns: tuple[int | None, ...] = ()
    contractible: tuple[str, ...] = ()

    def count(self, *patterns: str) -> int:
        """Return the number of instructions whose opcode begins with one of the patterns."""
        return count_matching(self.opcodes, *patterns)


_TYPE_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?(?P<type>\.[a-z]+(?P<bits>\d+))(?P<ptr>\s+\.ptr\b[^,\[]*?)?\s+(?P<name>[\w$]+)\s*(?:\[(?P<count>\d+)\])?\s*$"
)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", re.DOTALL)
_OPCODE = re.compile(r"\s*(?:\$?\w+:\s*)*(?:@!?%?\w+\s+)?([a-z]\w*(?:(?:\.|::)\w+)*)(?=\s|$)")

_TMEM_ALLOC = re.compile(r"\btcgen05\.alloc[\w.:]*\s+\[[^\]]*\]\s*,\s*([%\w$]+)\s*;")


def read_ptx(text: str) -> PtxInfo:
    """Read entry points, opcode counts, and the parameters and block size of the last entry point."""
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
    return PtxInfo(tuple(entries), params, block, opcodes, tuple(_tmem_columns(text)), contractible(text))


def _tmem_columns(text: str) -> Iterator[int | None]:
    """Yield the columns of each tcgen05.alloc, None where they are computed."""
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

"""Source lines of machine code: the line of the PTX and of the Python source behind each instruction of a built kernel.

Shipped files have no line tables. The PTX is assembled again with one, and the kernel is compiled again with one. Either table is used only
if the machine code beside it equals the built kernel's, byte for byte.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from cute_mla.manifest import KernelEntry
from cute_mla.simulator.sass.cubin import read_cubin
from cute_mla.simulator.sass.disassembler import find_program, output_of
from cute_mla.spec.arch import ARCHS

from .compile import compile_source
from .tools import ToolError, assemble
from .variants import closed_variants

_PACKAGE = Path(__file__).absolute().parent.parent
_LINE = re.compile(r'\s*//## File "([^"]*)", line (\d+)')
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(\w+)")
_UNMARKED = ("HGMMA", "QGMMA")  # ptxas enters no lines for them: they would have those of whatever stands before
_CODE = ".text."


@dataclass(frozen=True)
class SourceLines:
    """Lines by address of the machine code. ptx: of the shipped PTX. python: a path in the package and a line.

    missing: for each table that could not be made, a sentence that says why.
    """

    ptx: Mapping[int, int] = field(default_factory=dict)
    python: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    def where(self, address: int) -> str:
        """Return the Python line of an instruction, such as "kernels/sm90/score.py:93", or ""."""
        found = self.python.get(address)
        return "" if found is None else f"{found[0]}:{found[1]}"


def source_lines(entry: KernelEntry, cubin: bytes, ptx: str) -> SourceLines:
    """Return the source lines of a built kernel. Takes seconds, because the kernel is compiled again."""
    missing: list[str] = []
    found: dict[str, dict[int, tuple[str, int]]] = {}
    for what, make in (("PTX", lambda: _assembled(entry, ptx)), ("Python", lambda: _compiled(entry))):
        try:
            again = make()
            if _code(again) != _code(cubin):
                raise ToolError("the machine code made with a line table is not the built kernel's")
            found[what] = read_lines(_annotated(again, "-gp" if what == "PTX" else "-g"))
        except ToolError as error:
            missing.append(f"no {what} lines of {entry.name}: {error}")
    return SourceLines(
        {address: line for address, (_, line) in found.get("PTX", {}).items()},
        {address: (_in_package(path), line) for address, (path, line) in found.get("Python", {}).items()},
        tuple(missing),
    )


def read_lines(text: str) -> dict[int, tuple[str, int]]:
    """Read the file and line of each address from nvdisasm's output with line information; none for matrix products of warpgroups."""
    lines: dict[int, tuple[str, int]] = {}
    current: tuple[str, int] | None = None
    for line in text.splitlines():
        place = _LINE.match(line)
        if place is not None:
            current = place[1], int(place[2])
            continue
        instruction = _INSTRUCTION.match(line)
        if instruction is not None and current is not None and instruction[2] not in _UNMARKED:
            lines[int(instruction[1], 16)] = current
    return lines


def _assembled(entry: KernelEntry, ptx: str) -> bytes:
    cubin = assemble(ptx, ARCHS[entry.arch].gpu_arch, "-lineinfo")
    if cubin is None:
        raise ToolError("ptxas is not installed")
    return cubin


def _compiled(entry: KernelEntry) -> bytes:
    if find_spec("cutlass") is None:
        raise ToolError("the CuTe DSL is not installed")
    arch = ARCHS[entry.arch]
    variant = next((variant for variant in closed_variants(arch) if variant.name == entry.name), None)
    if variant is None:
        raise ToolError("it is not in the closed list of kernels")
    return compile_source(variant.source(), arch, line_tables=True).cubin


def _code(cubin: bytes) -> dict[str, bytes]:
    return {name: content for name, content in read_cubin(cubin).sections.items() if name.startswith(_CODE)}


def _annotated(cubin: bytes, option: str) -> str:
    program = find_program("nvdisasm")
    if program is None:
        raise ToolError("nvdisasm is not installed")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return output_of(program, "-c", option, str(path), error=ToolError)


def _in_package(path: str) -> str:
    """Return a path below the package's folder, or as it is."""
    for folder in (_PACKAGE, _PACKAGE / "cute_mla"):
        if Path(path).is_relative_to(folder):
            return Path(path).relative_to(folder).as_posix()
    return path

"""NVIDIA's programs that the build calls, all from pip packages, and the versions that decide the generated code."""

from __future__ import annotations

import re
import tempfile
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cute_mla.simulator.sass.disassembler import PACKAGE as DISASSEMBLER
from cute_mla.simulator.sass.disassembler import find_program, output_of

GENERATORS = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-core", "nvidia-cutlass-dsl-libs-cu13")
ASSEMBLER = "nvidia-cuda-nvcc"


class ToolError(RuntimeError):
    """A build tool is missing or failed."""


def package_version(package: str) -> str:
    """Return the installed version of a package, or "absent"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


@cache
def tool_versions() -> dict[str, str]:
    """Return the versions, by package, of all tools that decide the bytes of a cubin or the input of the gates."""
    return {package: package_version(package) for package in (*GENERATORS, DISASSEMBLER, ASSEMBLER)}


def assemble(ptx: str, gpu_arch: str, *options: str) -> bytes | None:
    """Return the cubin that the ptxas program makes of a PTX text, or None if ptxas is not installed. ToolError if it fails."""
    program = find_program("ptxas")
    if program is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        output_of(program, "-O3", "-arch", gpu_arch, *options, str(source), "-o", str(target), error=ToolError)
        return target.read_bytes()


@cache
def assembler_version() -> str | None:
    """Return the version of ptxas, such as "13.4.59", or None if ptxas is not installed."""
    program = find_program("ptxas")
    if program is None:
        return None
    found = re.search(r"V(\d+\.\d+\.\d+)", output_of(program, "--version", error=ToolError))
    return found[1] if found else None

"""Compilation of one kernel source to PTX and cubin by cute.compile. No other module of the build imports the DSL."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

from cute_mla.kernels.definition import KernelDefinition
from cute_mla.spec.arch import Arch

from .tools import ToolError

OPT_LEVEL = 3


@dataclass(frozen=True)
class Compiled:
    """Output of one compilation. entry: name of the kernel in PTX and cubin."""

    entry: str
    ptx: str
    cubin: bytes


def compile_options(arch: Arch) -> str:
    """Return the options of cute.compile without the dump folder. They are part of a kernel's fingerprint."""
    return f"--gpu-arch {arch.gpu_arch} --opt-level {OPT_LEVEL} --keep-ptx --keep-cubin"


def compile_source(source: KernelDefinition, arch: Arch, *, line_tables: bool = False) -> Compiled:
    """Compile one kernel. ToolError unless the DSL returns exactly one kernel, both as PTX and as cubin.

    line_tables: the files name the source line of each instruction, in the machine code that is also made without.
    """
    from cutlass import cute

    # Each compilation has its own folder: the DSL names files by the types of the host function alone, and reads them back, so that
    # variants would overwrite each other.
    options = compile_options(arch) + (" --generate-line-info" if line_tables else "")
    with tempfile.TemporaryDirectory() as folder:
        compiled = cute.compile(source.host, *source.args, options=f"{options} --dump-dir {folder}")
        ptx, cubin, entries = compiled.__ptx__, compiled.__cubin__, list(compiled.kernel_info)
    # If the DSL finds no file, it returns the file's path.
    if not isinstance(cubin, bytes) or not cubin.startswith(b"\x7fELF"):
        raise ToolError(f"the DSL gave no cubin for {source.op} {source.config.name}, but {cubin!r:.200}")
    if not isinstance(ptx, str) or ".entry" not in ptx:
        raise ToolError(f"the DSL gave no PTX for {source.op} {source.config.name}, but {ptx!r:.200}")
    if len(entries) != 1:
        raise ToolError(f"{source.op} {source.config.name}: the host function launches {len(entries)} kernels {entries}, expected one")
    return Compiled(entries[0], ptx, cubin)

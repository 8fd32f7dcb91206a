"""One cute.compile: a kernel source becomes a PTX text and the cubin made from it. The only module of the build that imports the DSL."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

from cute_mla.kernels.definition import KernelDefinition
from cute_mla.spec.arch import Arch

from .tools import ToolError

OPT_LEVEL = 3


@dataclass(frozen=True)
class Compiled:
    """entry: the kernel's name in both texts."""

    entry: str
    ptx: str
    cubin: bytes


def compile_options(arch: Arch) -> str:
    """What cute.compile is asked for, without the folder: part of a kernel's fingerprint."""
    return f"--gpu-arch {arch.gpu_arch} --opt-level {OPT_LEVEL} --keep-ptx --keep-cubin"


def compile_source(source: KernelDefinition, arch: Arch) -> Compiled:
    """Compiles one kernel. ToolError if the DSL did not give exactly one kernel, as PTX and as cubin."""
    from cutlass import cute

    # A folder of its own: the DSL names the files after the host function's types alone, so that variants would overwrite
    # each other, and reads them back from there.
    with tempfile.TemporaryDirectory() as folder:
        compiled = cute.compile(source.host, *source.args, options=f"{compile_options(arch)} --dump-dir {folder}")
        ptx, cubin, entries = compiled.__ptx__, compiled.__cubin__, list(compiled.kernel_info)
    # Where it finds no file, the DSL returns the file's path instead.
    if not isinstance(cubin, bytes) or not cubin.startswith(b"\x7fELF"):
        raise ToolError(f"the DSL gave no cubin for {source.op} {source.config.name}, but {cubin!r:.200}")
    if not isinstance(ptx, str) or ".entry" not in ptx:
        raise ToolError(f"the DSL gave no PTX for {source.op} {source.config.name}, but {ptx!r:.200}")
    if len(entries) != 1:
        raise ToolError(f"{source.op} {source.config.name}: the host function launches {len(entries)} kernels {entries}, expected one")
    return Compiled(entries[0], ptx, cubin)

"""Disassembly of cubins by nvdisasm of NVIDIA's CUDA 13 wheels, which the build extra installs."""

from __future__ import annotations

import subprocess
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ..findings import SassError

PACKAGE = "nvidia-cuda-nvdisasm"


@cache
def find_program(name: str) -> Path | None:
    """Return a program of NVIDIA's CUDA 13 wheels, or None. Programs elsewhere on the machine have unknown versions and are not used."""
    spec = find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        program = Path(folder) / "cu13" / "bin" / name
        if program.is_file():
            return program
    return None


def output_of(program: Path, *arguments: str, error: type[Exception]) -> str:
    """Run a program and return its output. `error`, with the end of what the program says, if it fails."""
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise error(f"{program.name} {' '.join(arguments)} failed with exit code {done.returncode}: {done.stderr.strip()[:2000]}")
    return done.stdout


def disassemble(cubin: bytes) -> str:
    """Return the machine code of a cubin as text with its encodings. SassError if nvdisasm is not installed, or fails on the file."""
    program = find_program("nvdisasm")
    if program is None:
        raise SassError(f"machine code is read with nvdisasm, which was not found; install {PACKAGE} (the build extra)")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = output_of(program, "-c", "-hex", "-ndf", str(path), error=SassError)  # -ndf: the same text in 3/4 of the time
        return output_of(program, "-c", "-hex", str(path), error=SassError) if "BRX" in text else text  # with the targets of each

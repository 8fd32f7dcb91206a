"""Runs hand-written PTX on the simulator: a body, some arrays, a launch shape."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cute_mla.simulator import GlobalMemory, Launch, Names, Policy, Report, TensorMap, load_module, run

HEADER = ".version 9.0\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
REGISTERS = (
    ".reg .pred %p<32>;\n.reg .b16 %h<64>;\n.reg .b32 %r<512>;\n.reg .f32 %f<64>;\n.reg .b64 %rd<64>;\n"
    "ld.param.u64 %rd0, [p0];\nmov.u32 %r0, %tid.x;\nmul.wide.u32 %rd1, %r0, 4;\nadd.s64 %rd2, %rd0, %rd1;\n"
)
LAZY = Policy.named("lazy")


@dataclass
class Kernel:
    """A kernel body. On entry %rd0 is the first array, %r0 = %tid.x and %rd2 = &array0[tid] (4-byte elements).

    Further parameters are p1, p2, ...: arrays and ints as .u64, tensor maps as 128 bytes.
    """

    body: str
    threads: int = 32
    smem: int = 0
    grid: int = 1
    cluster: int = 1
    names: Names = field(default_factory=Names)
    dependent: bool = False

    def text(self, args: list[Any]) -> str:
        """Return the PTX module."""
        kinds = [".param .align 64 .b8 {}[128]" if isinstance(arg, TensorMap) else ".param .u64 {}" for arg in args]
        params = ",\n".join(kind.format(f"p{index}") for index, kind in enumerate(kinds))
        return f"{HEADER}.visible .entry k(\n{params}\n)\n.reqntid {self.threads}, 1, 1\n{{\n{REGISTERS}{self.body}\nret;\n}}\n"

    def run(self, *args: Any, policy: Policy | None = None, undefined: tuple[int, ...] = (), readonly: tuple[int, ...] = ()) -> Report:
        """Run on NumPy arrays, ints and tensor maps. undefined, readonly: positions of such arrays."""
        memory = GlobalMemory()
        values: list[bytes | TensorMap] = []
        for index, arg in enumerate(args):
            if isinstance(arg, np.ndarray):
                writable = index not in readonly
                memory.add(f"array{index}", arg.ctypes.data, arg.nbytes, writable=writable, initialised=index not in undefined)
                values.append(struct.pack("<Q", arg.ctypes.data))
            elif isinstance(arg, TensorMap):
                values.append(arg)
            else:
                values.append(struct.pack("<Q", arg))
        module = load_module(self.text(list(args)))
        shape = (self.threads, 1, 1)
        launch = Launch(module, "k", (self.grid, 1, 1), shape, (self.cluster, 1, 1), self.smem, values, self.names, self.dependent)
        return run(launch, memory, policy)


def aligned(count: int, dtype: Any, alignment: int = 128) -> np.ndarray:
    """Return zeros whose address is a multiple of alignment."""
    item = np.dtype(dtype).itemsize
    raw = np.zeros(count * item + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + count * item].view(dtype)


def kinds(report: Report) -> set[str]:
    """Return the kinds of all findings."""
    return {finding.kind for finding in report.findings}


def lines_of(body: str, needle: str, params: int = 1) -> list[int]:
    """Return the PTX lines (of a kernel with so many parameters) that contain a text."""
    text = Kernel(body).text([0] * params)
    return [number for number, line in enumerate(text.splitlines(), 1) if needle in line]

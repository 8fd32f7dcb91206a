"""PTX simulator: runs the text of a kernel on host memory and reports what is wrong with it.

module = load_module(ptx)
memory = GlobalMemory(); memory.add("x", address, nbytes)
report = run(Launch(module, "kernel", grid, block, cluster, smem_bytes, args, names), memory, Policy())
"""

from __future__ import annotations

from .codegen.module import Entry, Module, load_module
from .engine.launch import Launch
from .engine.machine import run
from .engine.policy import Policy
from .engine.report import Report
from .findings import Finding, PtxError, SimulationError, UnsupportedInstruction
from .frontend.ptx import ParamDecl
from .numerics.tensor_map import Swizzle, TensorMap
from .state.memory import GlobalMemory, merged_regions
from .state.names import Names
from .state.window import Observer

__all__ = [
    "Entry",
    "Finding",
    "GlobalMemory",
    "Launch",
    "Module",
    "Names",
    "Observer",
    "ParamDecl",
    "Policy",
    "PtxError",
    "Report",
    "SimulationError",
    "Swizzle",
    "TensorMap",
    "UnsupportedInstruction",
    "load_module",
    "merged_regions",
    "run",
]

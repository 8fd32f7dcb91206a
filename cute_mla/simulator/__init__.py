"""A PTX simulator: runs the text of a kernel on host memory and reports what is wrong with it.

module = load_module(ptx)
memory = GlobalMemory(); memory.add("x", address, nbytes)
report = run(Launch(module, "kernel", grid, block, cluster, smem_bytes, args, names), memory, Policy())
"""

from __future__ import annotations

from .findings import Finding, PtxError, Report, SimulationError, UnsupportedInstruction
from .launch import Launch, Names
from .machine import run
from .memory import GlobalMemory
from .module import Entry, Module, load_module
from .observers import Observer
from .policy import Policy
from .ptx import ParamDecl

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
    "UnsupportedInstruction",
    "load_module",
    "run",
]

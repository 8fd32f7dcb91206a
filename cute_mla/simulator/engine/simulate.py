"""Any kernel on the simulated device: PTX text or a cubin, and a launch file."""

from __future__ import annotations

from dataclasses import dataclass

from ..codegen.module import Module, load_module
from ..findings import PtxError
from ..sass.module import load_machine_code
from ..sass.text_cache import disassembly
from .launch import Launch
from .launch_file import LaunchFile, LaunchFileError
from .machine import run
from .policy import Policy
from .report import Report

ELF = b"\x7fELF"


@dataclass(frozen=True)
class Outcome:
    """Result of a launch. differences: a line for each buffer that does not hold what its launch file expects."""

    report: Report
    differences: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Return whether nothing is wrong."""
        return self.report.ok and not self.differences


def load_code(code: bytes, kernel: str = "") -> Module:
    """Load a cubin, or PTX text. kernel: which one of a cubin with several.

    CubinError, SassError, PtxError, or UnsupportedInstruction, which names everything that is unknown.
    """
    if code.startswith(ELF):
        return load_machine_code(code, disassembly(code), kernel=kernel)
    try:
        return load_module(code.decode())
    except UnicodeDecodeError as error:
        raise PtxError("neither a cubin (an ELF file) nor PTX text") from error


def simulate_file(module: Module, described: LaunchFile, policy: Policy) -> Outcome:
    """Run a launch. Its buffers hold the results afterwards. LaunchFileError for a launch that does not fit the kernel."""
    entry = described.kernel or (next(iter(module.entries)) if len(module.entries) == 1 else "")
    try:
        shape = (described.grid, described.block, described.cluster)
        launch = Launch(module, entry, *shape, described.smem_bytes, list(described.parameters), described.names())
    except ValueError as error:
        raise LaunchFileError(f"{described.name}: {error}") from error
    report = run(launch, described.global_memory(), policy)
    return Outcome(report, tuple(described.differences()))

"""Findings, and the errors that the simulator raises."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a kernel or with the operands of its launch.

    kind: a short stable word ("deadlock", "out_of_bounds", "misaligned", "poison", "barrier", ...).
    ptx_line: 1-based line of the PTX text; source: "file:line" of the kernel source where the PTX has line information, in machine code
    the address and the text of the instruction.
    role, barrier: names from the launch's Names. cta: block index. warp: index of the (first) warp within its CTA.
    """

    kind: str
    message: str
    ptx_line: int | None = None
    source: str | None = None
    role: str | None = None
    barrier: str | None = None
    cta: tuple[int, int, int] | None = None
    warp: int | None = None

    def __str__(self) -> str:
        places = []
        if self.ptx_line is not None:
            places.append(f"PTX line {self.ptx_line}")
        if self.source is not None:
            places.append(self.source)
        if self.cta is not None:
            places.append(f"block {self.cta}")
        if self.role is not None:
            places.append(f"role {self.role}")
        if self.warp is not None:
            places.append(f"warp {self.warp}")
        if self.barrier is not None:
            places.append(f"barrier {self.barrier}")
        where = f" ({', '.join(places)})" if places else ""
        return f"{self.kind}: {self.message}{where}"


class SimulationError(RuntimeError):
    """The simulated device refused a kernel or found something wrong; `findings` says what."""

    def __init__(self, message: str, findings: tuple[Finding, ...] = ()) -> None:
        super().__init__(message)
        self.findings = findings


class UnsupportedInstruction(SimulationError):
    """The module uses instructions or modifiers that the instruction table does not have; all of them are listed."""


class PtxError(SimulationError):
    """The PTX text could not be read."""


class SassError(SimulationError):
    """The machine code of a cubin could not be read."""


class Fault(Exception):
    """Raised inside the simulator where a kernel cannot go on (bad address, barrier misuse); becomes a Finding."""

    def __init__(self, kind: str, message: str, barrier: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.barrier = barrier

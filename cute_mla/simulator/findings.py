"""What a run can complain about, and how it is reported."""

from __future__ import annotations

from dataclasses import dataclass, field

from .engine.counts import Executed


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a kernel.

    kind: a short stable word ("deadlock", "out_of_bounds", "misaligned", "poison", "barrier", ...).
    ptx_line: 1-based line of the PTX text; source: "file:line" of the kernel source where the PTX has line information.
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


class Fault(Exception):
    """Raised inside the simulator where a kernel cannot go on (bad address, barrier misuse); becomes a Finding."""

    def __init__(self, kind: str, message: str, barrier: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.barrier = barrier


@dataclass
class Report:
    """The outcome of one launch.

    executed: warp instructions. seconds: wall-clock time of the run.
    """

    findings: list[Finding] = field(default_factory=list)
    executed: Executed = field(default_factory=Executed)
    seconds: float = 0.0

    @property
    def instructions(self) -> int:
        """Warp instructions executed."""
        return self.executed.instructions

    @property
    def ok(self) -> bool:
        """True when nothing was found."""
        return not self.findings

    def raise_for_findings(self) -> None:
        """Raise SimulationError with all findings, if there are any."""
        if self.findings:
            text = "\n".join(str(finding) for finding in self.findings)
            raise SimulationError(text, tuple(self.findings))

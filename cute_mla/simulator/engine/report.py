"""Report of a launch: its findings and what it has executed."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..findings import Finding, SimulationError
from .counts import Executed


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
        """Return the number of warp instructions executed."""
        return self.executed.instructions

    @property
    def ok(self) -> bool:
        """Return True when nothing was found."""
        return not self.findings

    def raise_for_findings(self) -> None:
        """Raise SimulationError with all findings, if there are any."""
        if self.findings:
            text = "\n".join(str(finding) for finding in self.findings)
            raise SimulationError(text, tuple(self.findings))

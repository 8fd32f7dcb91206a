"""Recorder of findings: one for each kind and place, up to a limit."""

from __future__ import annotations

from ..findings import Finding
from ..state.names import Names
from ..state.origin import Origin

MAX_FINDINGS = 50


class Stop(Exception):
    """End of a run after a fatal finding, or after too many."""


class Recorder:
    """The findings of a run. names: of the launch. most: findings that end the run, MAX_FINDINGS by default. ignored: kinds not kept."""

    def __init__(self, names: Names, most: int | None = None, ignored: frozenset[str] = frozenset()) -> None:
        self.names = names
        self._ignored = ignored
        self._most = most
        self.findings: list[Finding] = []
        self._seen: set[tuple[object, ...]] = set()

    def report(self, origin: Origin, kind: str, message: str, barrier: str | None = None) -> None:
        """Add a finding at an origin."""
        instruction = origin.instruction
        line = instruction.line or None if instruction is not None else None  # machine code has no lines
        source = instruction.source if instruction is not None else None
        self.add(Finding(kind, message, line, source, self.names.role(origin.warp), barrier, origin.cta, origin.warp))

    def add(self, finding: Finding) -> None:
        """Keep a finding, one for each kind and place. Raises Stop when there are too many."""
        key = (finding.kind, finding.ptx_line or finding.source, finding.barrier, finding.role)
        if key in self._seen or finding.kind in self._ignored:
            return
        self._seen.add(key)
        self.findings.append(finding)
        if len(self.findings) >= (MAX_FINDINGS if self._most is None else self._most):
            raise Stop

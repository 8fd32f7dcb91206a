"""Policies: which legal order a run takes, of warps and of the completion of asynchronous work."""

from __future__ import annotations

from dataclasses import dataclass

SCHEDULES = ("round_robin", "random", "adversarial")
ASYNC_MODES = ("eager", "lazy", "random")
DEFAULT_QUANTUM = 4000  # warp instructions; a small quantum hides races, since all warps then stay close together


@dataclass(frozen=True)
class Policy:
    """One replayable way through a kernel.

    schedule: "round_robin" runs convoys of warps in turn; "random" splits convoys and picks warps by seed;
        "adversarial" splits convoys and runs one warp as far as possible before any other moves.
    async_mode: asynchronous work completes at issue ("eager"), as late as is legal ("lazy") or at a seeded time between.
    quantum: warp instructions that a convoy runs before another gets its turn (ignored by "adversarial").
    waits_block: a wait for a phase of an mbarrier does not answer false while something can still go on.
    most_findings: a run ends with this many findings; None: the recorder's MAX_FINDINGS.
    ignored: kinds of findings that are not kept.
    most_instructions: a run ends with a finding after so many warp instructions, give or take a turn; None: without a limit.
    """

    schedule: str = "round_robin"
    seed: int = 0
    async_mode: str = "eager"
    quantum: int = DEFAULT_QUANTUM
    waits_block: bool = False
    most_findings: int | None = None
    ignored: frozenset[str] = frozenset()
    most_instructions: int | None = None

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule {self.schedule!r}: supported are {', '.join(SCHEDULES)}")
        if self.async_mode not in ASYNC_MODES:
            raise ValueError(f"async_mode {self.async_mode!r}: supported are {', '.join(ASYNC_MODES)}")
        if self.most_instructions is not None and self.most_instructions < 1:
            raise ValueError(f"most_instructions {self.most_instructions}: must be at least 1")
        if self.quantum < 1:
            raise ValueError(f"quantum {self.quantum}: must be at least 1")

    @property
    def splits_convoys(self) -> bool:
        """Return True when warps are scheduled one by one."""
        return self.schedule != "round_robin"

    @classmethod
    def named(cls, name: str, seed: int = 0) -> Policy:
        """Return the policy behind a schedule name of `simulate`: round_robin, lazy, random or adversarial.

        adversarial: lazy for even seeds, eager for odd ones. Lazy copies hold back a warp that waits for them, so that it cannot overrun
        a slower one; eager copies let it. Raises ValueError for any other name.
        """
        pairs = {
            "round_robin": ("round_robin", "eager"),
            "lazy": ("round_robin", "lazy"),
            "random": ("random", "random"),
            "adversarial": ("adversarial", "eager" if seed % 2 else "lazy"),
        }
        if not isinstance(name, str) or name not in pairs:
            raise ValueError(f"schedule {name!r}: supported are {', '.join(pairs)}")
        schedule, async_mode = pairs[name]
        return cls(schedule, seed, async_mode)

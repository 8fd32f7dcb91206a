"""Launch plans: what the shapes of a call decide about its launch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchPlan:
    """One launch of a kernel.

    kernel: the variant's name. grid: CTAs along x, y and z. int64s, int32s: scalar arguments, in the order of the kernel's parameters.
    """

    kernel: str
    grid: tuple[int, int, int]
    int64s: tuple[int, ...]
    int32s: tuple[int, ...]

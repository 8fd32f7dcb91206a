"""Launch plans: what the shapes of a call decide about its launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchPlan:
    """One launch of a kernel.

    kernel: the variant's name. grid: CTAs along x, y and z. scalars: integer arguments, by their names in the spec's list of arguments.
    """

    kernel: str
    grid: tuple[int, int, int]
    scalars: Mapping[str, int]


def named_strides(tensor: str, axes: str, strides: Sequence[int]) -> dict[str, int]:
    """Name the strides of a tensor as the spec's lists of arguments do.

    axes: names separated by spaces, outermost first. Axes that the tensor lacks in front, such as a batch, have stride 0.
    """
    names = axes.split()
    padded = (*(0,) * (len(names) - len(strides)), *strides)
    return {f"{tensor}_stride_{axis}": stride for axis, stride in zip(names, padded, strict=True)}

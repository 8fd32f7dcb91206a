"""Predicted cost of batch_invariant=True: the time of each decode row with the flag over its time without.

python -m cute_mla.profiles.model.invariance_cost [GPU ...]      prints the table of NOTES.md (default: H200 and B200)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ..rows import Case, load
from .launches import BATCH_INVARIANT_OPS, NoModelError
from .report import between, launch_on, predictions

GPUS = ("H200", "B200")
SAME = 0.1  # rows whose time changes by at most this share are named without figures


@dataclass(frozen=True)
class InvarianceCost:
    """Times of a row without and with the flag in microseconds: with every constant at its best, and at its worst."""

    row: str
    text: str
    plain_us: tuple[float, float]
    invariant_us: tuple[float, float]

    @property
    def ratios(self) -> tuple[float, float]:
        """Time with the flag over time without: the lesser ratio, then the greater."""
        best, worst = (with_flag / without for with_flag, without in zip(self.invariant_us, self.plain_us, strict=True))
        return min(best, worst), max(best, worst)

    @property
    def is_small(self) -> bool:
        """True if the flag changes the time by at most SAME."""
        return max(abs(ratio - 1) for ratio in self.ratios) <= SAME


def costs(gpu: str) -> list[InvarianceCost]:
    """Return the costs of all decode rows that the model covers, in the order of their definitions."""
    found = []
    for op in BATCH_INVARIANT_OPS:
        for case in load(op):
            try:
                found.append(_cost(case, gpu))
            except NoModelError:
                continue
    return found


def _cost(case: Case, gpu: str) -> InvarianceCost:
    plain, invariant = (
        tuple(prediction.us for prediction in predictions(launch_on(case, gpu, batch_invariant), gpu)) for batch_invariant in (False, True)
    )
    return InvarianceCost(case.name, case.text, (plain[0], plain[1]), (invariant[0], invariant[1]))


def markdown(gpus: Sequence[str]) -> str:
    """Return the table of NOTES.md: the rows whose time changes on any of these GPUs, then the names of the others."""
    of_gpu = {gpu: {cost.row: cost for cost in costs(gpu)} for gpu in gpus}
    rows = {cost.row: cost.text for found in of_gpu.values() for cost in found.values()}
    changed = [row for row in rows if not all(found[row].is_small for found in of_gpu.values() if row in found)]
    lines = [f"| row | problem | {' | '.join(f'{gpu}: times as long' for gpu in gpus)} |", "|---" * (2 + len(gpus)) + "|"]
    for row in changed:
        cells = (between(*found[row].ratios) if row in found else "no model" for found in of_gpu.values())
        lines.append(f"| {row} | {rows[row]} | {' | '.join(cells)} |")
    same = [row for row in rows if row not in changed]
    return "\n".join([*lines, "", f"As long as without it, within {SAME:.0%}: {', '.join(same)}."])


def main(arguments: Sequence[str]) -> None:
    """Print the table of these GPUs."""
    print(markdown(arguments or GPUS))


if __name__ == "__main__":
    main(sys.argv[1:])

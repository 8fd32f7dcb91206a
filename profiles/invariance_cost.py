"""What batch_invariant=True costs, by the model: a row of decode with the flag over the same row without it.

python -m cute_mla.profiles.invariance_cost [GPU ...]      on an H200 and a B200 unless named, as a table for NOTES.md
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from .model_launch import FLAGGED, NoModel
from .model_report import between, launch_on, predictions
from .rows import Case, load

GPUS = ("H200", "B200")
SAME = 0.1  # rows that take as long with the flag, within this share, are named alone


@dataclass(frozen=True)
class Cost:
    """A row's times without and with the flag, with the machine at its best and at its worst. us."""

    row: str
    text: str
    plain_us: tuple[float, float]
    invariant_us: tuple[float, float]

    @property
    def ratios(self) -> tuple[float, float]:
        """With the flag over without it: the lesser, and the greater."""
        best, worst = (with_flag / without for with_flag, without in zip(self.invariant_us, self.plain_us, strict=True))
        return min(best, worst), max(best, worst)

    @property
    def is_small(self) -> bool:
        """Whether the row takes as long with the flag."""
        return max(abs(ratio - 1) for ratio in self.ratios) <= SAME


def costs(gpu: str) -> list[Cost]:
    """Of all rows of decode that the model knows, in the order of their definitions."""
    found = []
    for op in FLAGGED:
        for case in load(op):
            try:
                found.append(_cost(case, gpu))
            except NoModel:
                continue
    return found


def _cost(case: Case, gpu: str) -> Cost:
    plain, invariant = (
        tuple(prediction.us for prediction in predictions(launch_on(case, gpu, batch_invariant), gpu)) for batch_invariant in (False, True)
    )
    return Cost(case.name, case.text, (plain[0], plain[1]), (invariant[0], invariant[1]))


def markdown(gpus: Sequence[str]) -> str:
    """The table of NOTES.md: the rows that take longer or less long on any of these GPUs, then the names of the others."""
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
    """Prints the table of these GPUs."""
    print(markdown(arguments or GPUS))


if __name__ == "__main__":
    main(sys.argv[1:])

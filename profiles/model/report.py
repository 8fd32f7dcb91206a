"""Report of the model on a row and a GPU: the prediction with its terms, beside the latest measured time if there is one.

python -m cute_mla.profiles.model.report [GPU]      prints the tables of NOTES.md: all kernels and rows on one GPU (default: H200)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from ...spec.arch import ARCHS
from ..kernel_stats.golden_counts import read
from ..roofline import GPUS, roof
from ..rows import OPS, RESULTS, Case, load
from .launches import NoModelError, Target, launch_of
from .machines import ENDS, machines
from .prediction import Combine, Launch, Prediction, predict, predict_combine

MEASURED_KEY = "cold_us"  # operands not in L2, as the rooflines assume


def predictions(launch: Launch | Combine, gpu: str) -> tuple[Prediction, Prediction]:
    """Predict with every constant of the GPU at its best, and at its worst."""
    best, worst = (
        predict(launch, machine, end) if isinstance(launch, Launch) else predict_combine(launch, machine)
        for machine, end in zip(machines()[gpu].ends, ENDS, strict=True)
    )
    return best, worst


@cache
def launch_on(case: Case, gpu: str, batch_invariant: bool = False) -> Launch | Combine:
    """Return the launch of a row on a GPU. NoModelError, with the reason, if the model does not cover the row."""
    machine = machines()[gpu].best
    return launch_of(case, Target(ARCHS[machine.arch], machine.sm_count, golden_counts()), batch_invariant=batch_invariant)


golden_counts = cache(read)


def model_of(case: Case, gpu: str, results: Path = RESULTS) -> dict[str, Any]:
    """Return the prediction of a row on a GPU with all terms, or {"reason": why there is no model}."""
    try:
        launch = launch_on(case, gpu)
    except NoModelError as reason:
        return {"reason": str(reason)}
    best, worst = predictions(launch, gpu)
    limit_us = roof(case.work, GPUS[gpu]).us
    return {
        "kernel": launch.kernel if isinstance(launch, Launch) else case.op,
        "low_us": best.us,
        "high_us": worst.us,
        "binds": [best.binds, worst.binds],
        "fraction_of_roof": [limit_us / worst.us, limit_us / best.us],
        "best": asdict(best),
        "worst": asdict(worst),
        **_launch_fields(launch),
        **against(measured_us(case, gpu, results), best.us, worst.us),
    }


def _launch_fields(launch: Launch | Combine) -> dict[str, Any]:
    if isinstance(launch, Combine):
        return {"combine": asdict(launch)}
    return {
        "block": {
            "flops": dict(launch.block.flops),
            "smem": dict(launch.block.smem),
            "path": [asdict(stage) for stage in launch.block.path],
        },
        "ctas": launch.ctas,
        "parts": len(launch.cta_work),
        "blocks_of_the_longest": max((work.blocks for work in launch.cta_work), default=0),
        "pieces_of_it": max((work.pieces for work in launch.cta_work), default=0),
        "combine": asdict(launch.combine) if launch.combine is not None else None,
    }


def measured_us(case: Case, gpu: str, results: Path = RESULTS) -> float | None:
    """Return the latest time of a row on a GPU, in microseconds, from the folder of results; None if there is none."""
    latest = None
    for file in sorted(results.glob(f"*/{case.op}.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["name"] == case.name and row["status"] == "timed" and gpu in row["environment"]["gpu"]:
                latest = float(row[MEASURED_KEY]["median"])
    return latest


def against(measured: float | None, low_us: float, high_us: float) -> dict[str, float | None]:
    """Compare a measured time with a predicted range.

    error: distance to the range relative to its nearer end; 0 inside, None without a measurement.
    """
    if measured is None:
        return {"measured_us": None, "error": None}
    nearest = min(max(measured, low_us), high_us)
    return {"measured_us": measured, "error": measured / nearest - 1}


def between(low: float, high: float) -> str:
    """Format a range as one cell, with three digits for each end."""
    first, last = (f"{number:,.0f}" if number >= 100 else f"{number:.3g}" for number in (low, high))
    return first if first == last else f"{first} to {last}"


def markdown(cases: Sequence[Case], gpu: str) -> str:
    """Return the table of predictions in NOTES.md."""
    lines = [f"| row | problem | roofline us | {gpu}: us | binds | of the roofline, % | goal us |", "|---|---|---|---|---|---|---|"]
    for case in cases:
        row, limit = model_of(case, gpu), roof(case.work, GPUS[gpu]).us
        goal = "-" if case.goal_us is None else between(case.goal_us, case.goal_us)
        if "reason" in row:
            cells = [row["reason"], "-", "-"]
        else:
            binds = ", ".join(dict.fromkeys(row["binds"]))
            cells = [between(row["low_us"], row["high_us"]), binds, between(*(100 * share for share in row["fraction_of_roof"]))]
        lines.append("| " + " | ".join((case.name, case.text, between(limit, limit), *cells, goal)) + " |")
    return "\n".join(lines)


def blocks_markdown(cases: Sequence[Case], gpu: str) -> str:
    """Return the table of clocks of a block by kernel and resource; a kernel's first row counts."""
    kernels: dict[str, dict[str, Any]] = {}
    for case in cases:
        row = model_of(case, gpu)
        if row.get("best", {}).get("clocks"):
            kernels.setdefault(row["kernel"], row)
    resources = list(next(iter(kernels.values()))["best"]["clocks"])
    lines = [f"| kernel | {' | '.join(resources)} |", "|---" * (len(resources) + 1) + "|"]
    for name, row in kernels.items():
        cells = (between(*sorted((row["best"]["clocks"][what], row["worst"]["clocks"][what]))) for what in resources)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Print the tables of one GPU."""
    cases, gpu = [case for op in OPS for case in load(op)], arguments[0] if arguments else "H200"
    print(blocks_markdown(cases, gpu), markdown(cases, gpu), sep="\n\n")


if __name__ == "__main__":
    main(sys.argv[1:])

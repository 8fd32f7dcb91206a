"""Predictions of benchmark rows by the clock: nominal, and with every constant at its fast and at its slow end.

python -m cute_mla.profiles.clock.rows [GPU [ROW...]]      prints the tables of NOTES.md (default: H200, all rows)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from ...manifest import KernelEntry
from ...runtime.artifacts import load_artifacts
from ...runtime.errors import ArtifactError
from ...simulator import SimulationError
from ..kernel_stats.dynamic_counts import keys_of_block
from ..model.launches import NoModelError
from ..model.prediction import Combine, Launch
from ..model.report import between, launch_on, model_of
from ..roofline import GPUS, roof
from ..rows import OPS, Case, load
from ..shapes import SparsePrefillShape
from .constants import FAST, NOMINAL, SLOW, Constants, constants, gpus
from .engine import Setting, StandstillError
from .grid import RowTime, binding_unit, hbm_share, in_sequence, row_time, stream_setting_share, stream_time
from .instructions import UnknownTimeError
from .kernel_times import KernelTimes, is_cold, kernel_times, seam_clocks
from .streams import clocks_after, combine_clocks, stream_clocks

ENDS = (NOMINAL, FAST, SLOW)
CLOCK = "clock"
FORMAT = 1
REFUSALS = (UnknownTimeError, StandstillError, NoModelError, SimulationError, ArtifactError)


@dataclass(frozen=True)
class Timed:
    """A row at one end of the constants.

    entry, kernel: of the longer of two launches over keys, None for a stream. seam: clocks, 0 if no CTA has two pieces.
    """

    time: RowTime
    entry: KernelEntry | None = None
    kernel: KernelTimes | None = None
    seam: float = 0.0


def setting_of(case: Case, launch: Launch, entry: KernelEntry, constants: Constants) -> Setting:
    """Return the circumstances of a cluster in a row: its share of HBM, and whether keys come from there.

    Keys of dense prefill and of logits in a row are read by many CTAs, and rows of sparse prefill by many tokens: they come from L2 as far
    as it holds them.
    """
    share = hbm_share(constants, launch, prod(entry.cluster))
    if is_cold(entry):
        return Setting(share)
    missing = 0.0
    if isinstance(case.shape, SparsePrefillShape):
        latent = 2.0 * case.shape.d_qk * case.shape.s_kv
        missing = max(1 - constants.l2_mbytes * 1e6 / latent, 0.0)
    share = constants.hbm_bytes / max(launch.ctas, 1)
    return Setting(min(share / missing, float(constants.l2_bytes)) if missing else share, cold=missing > 0)


def timed(case: Case, gpu: str, end: str) -> Timed:
    """Time a row with the constants of a GPU at one end. One of REFUSALS, with the reason, for a row that cannot be timed."""
    values = constants(gpu, end)
    launch = launch_on(case, gpu)
    if isinstance(launch, Combine):
        setting = Setting(stream_setting_share(launch, values), cold=launch.cold)
        one = combine_clocks(launch, case.dtype, values, setting) if case.op == "combine" else stream_clocks(case, values, setting)
        return Timed(stream_time(launch, one, values))
    first = _timed(case, launch, values, end)
    if launch.after is None:
        return first
    second = _timed(case, launch.after, values, end)
    longer = max(first, second, key=lambda part: part.time.us)
    return replace(longer, time=in_sequence(first.time, second.time, values))


def _timed(case: Case, launch: Launch, values: Constants, end: str) -> Timed:
    """Time one launch over keys of a row, and the combine after it."""
    entry = load_artifacts().manifest.kernels.get(launch.kernel)
    if entry is None:
        raise ArtifactError(f"{launch.kernel} is not built")
    setting = setting_of(case, launch, entry, values)
    times = kernel_times(entry, values, setting)
    has_seams = any(work.pieces > 1 for work in launch.cta_work)
    seam = seam_clocks(entry, values, setting, times) if has_seams else 0.0
    combine = None
    if launch.combine is not None:
        # whether L2 still holds the partial results
        after = replace(launch.combine, cold=end == SLOW or launch.combine.bytes > values.l2_mbytes * 1e6)
        launch = replace(launch, combine=after)
        combine = clocks_after(case, after, values, Setting(stream_setting_share(after, values), cold=after.cold))
    return Timed(row_time(launch, times, seam, values, combine), entry, times, seam)


def clock_of(case: Case, gpu: str) -> dict[str, Any]:
    """Return the prediction of a row on a GPU, or {"reason": why there is none}."""
    try:
        nominal, fast, slow = (timed(case, gpu, end) for end in ENDS)
    except REFUSALS as reason:
        return {"reason": str(reason)}
    us = [end.time.us for end in (nominal, fast, slow)]
    limit = roof(case.work, GPUS[gpu]).us
    found: dict[str, Any] = {
        "us": us[0],
        "low_us": min(us),
        "high_us": max(us),
        "ghz": nominal.time.ghz,
        "binds": nominal.time.binds,
        "fraction_of_roof": limit / us[0],
        "terms": dict(nominal.time.terms),
        "kernel": None,
    }
    if nominal.entry is not None and nominal.kernel is not None and fast.kernel is not None and slow.kernel is not None:
        blocks = [end.block for end in (nominal.kernel, fast.kernel, slow.kernel)]
        found |= {
            "kernel": nominal.entry.name,
            "keys_of_block": keys_of_block(nominal.entry),
            "block_clocks": {"nominal": blocks[0], "low": min(blocks), "high": max(blocks)},
            "fixed_clocks": nominal.kernel.fixed,
            "seam_clocks": nominal.seam,
            "use": dict(nominal.kernel.use),
            "binding_unit": binding_unit(nominal.kernel),
            "waits": {role: dict(shares) for role, shares in nominal.kernel.waits.items()},
        }
    return found


def clock_rows(cases: Sequence[Case], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield a row for every case: roofline, prediction of the model and prediction of the clock on each of these GPUs."""
    for case in cases:
        yield {
            "row": case.row,
            "name": case.name,
            "op": case.op,
            "text": case.text,
            "roofs": {name: roof(case.work, GPUS[name]).us for name in names},
            "model": {name: {key: model_of(case, name).get(key) for key in ("low_us", "high_us")} for name in names},
            "clock": {name: clock_of(case, name) for name in names},
            "status": CLOCK,
        }


def document(archs: Sequence[str], names: Sequence[str], rows: Sequence[dict[str, Any]], peer: dict[str, Any] | None) -> dict[str, Any]:
    """Return the document of `profile --device clock`: rows, the constants behind them, and a peer if one was given."""
    return {
        "format": FORMAT,
        "device": CLOCK,
        "archs": list(archs),
        "constants": {name: {end: asdict(constants(name, end)) for end in ENDS} for name in names},
        "rows": list(rows),
        "peer": peer,
    }


def markdown(rows: Sequence[dict[str, Any]], gpu: str) -> str:
    """Return the tables of NOTES.md: kernels, then rows."""
    kernels: dict[str, dict[str, Any]] = {}
    for row in rows:
        found = row["clock"][gpu]
        if found.get("kernel"):
            kernels.setdefault(found["kernel"], found)
    units = list(next(iter(kernels.values()))["use"]) if kernels else []
    lines = [
        f"| kernel | clocks a block | {' | '.join(f'{unit}, %' for unit in units)} | fixed part | seam |",
        "|---" * (len(units) + 4) + "|",
    ]
    for name, found in kernels.items():
        block = found["block_clocks"]
        use = " | ".join(f"{100 * found['use'][unit]:.0f}" for unit in units)
        seam = f"{found['seam_clocks']:,.0f}" if found["seam_clocks"] else "-"
        lines.append(
            f"| {name} | {block['nominal']:,.0f} ({between(block['low'], block['high'])}) | {use} | {found['fixed_clocks']:,.0f} | {seam} |"
        )
    lines += ["", "| row | problem | roofline us | model us | clock us | range | GHz | binds |", "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        found, model = row["clock"][gpu], row["model"][gpu]
        limit = between(row["roofs"][gpu], row["roofs"][gpu])
        cells = [row["name"], row["text"], limit, "-" if model["low_us"] is None else between(model["low_us"], model["high_us"])]
        if "reason" in found:
            cells += [found["reason"].splitlines()[0], "-", "-", "-"]
        else:
            time = between(found["us"], found["us"])
            cells += [time, between(found["low_us"], found["high_us"]), f"{found['ghz']:.2f}", found["binds"]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Print the tables of one GPU, for all rows or the named ones."""
    gpu, names = (arguments[0] if arguments else gpus()[0]), set(arguments[1:])
    cases = [case for op in OPS for case in load(op) if not names or {case.row, case.name} & names]
    print(markdown(list(clock_rows(cases, [gpu])), gpu))


if __name__ == "__main__":
    main(sys.argv[1:] or ["H200"])

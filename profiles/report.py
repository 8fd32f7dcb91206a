"""JSON documents of `cute-mla profile`: static figures, with rooflines and predictions (model, clock) or timed rows (cuda)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.runtime.errors import ArtifactError
from cute_mla.spec.arch import ARCHS, Arch

from .clock.constants import FAST, NOMINAL, SLOW, constants, sources
from .clock.rows import ENDS, clock_of
from .kernel_stats.static_report import static_report
from .plots.roofline_plot import Point, roofline_svg
from .plots.svg import with_article
from .predictions import model_of
from .roofline import GPUS, gpus_of, roof
from .rows import OPS, Case, load, select

FORMAT = 3
CLOCK_FORMAT = 1
MODEL, CUDA, CLOCK = "model", "cuda", "clock"


@dataclass(frozen=True)
class Limits:
    """Seconds of a timed run. budget_s: everything. row_s: each step of a row, such as a set-up, a peer's first run or a replay."""

    budget_s: float
    row_s: float


def cases_for(ops: Sequence[str], names: Sequence[str]) -> list[Case]:
    """Return the cases of some ops, or only the named rows and cases of these ops. ValueError for an unknown name."""
    cases = [case for op in OPS if op in ops for case in load(op)]
    if names and not cases:
        raise ValueError(f"no row named {', '.join(names)}: {', '.join(ops)} has no benchmark rows; {', '.join(OPS)} have some")
    return select(cases, names) if names else cases


def static_section(archs: Sequence[Arch], ops: Sequence[str]) -> dict[str, Any]:
    """Return the static figures of the built kernels, or the reason why there are none."""
    try:
        manifest = load_artifacts().manifest
    except ArtifactError as error:
        return {"kernels": [], "kernels_missing": str(error)}
    reports = [report for arch in archs for report in static_report(manifest, arch.name, ops)]
    missing = "" if reports else f"no {', '.join(ops)} was built for {', '.join(arch.name for arch in archs)}"
    return {"kernels": [asdict(report) for report in reports], "kernels_missing": missing}


def model_rows(archs: Sequence[Arch], cases: Sequence[Case], live: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return a row for every case: its roofline, prediction and latest measurement on every GPU of these architectures.

    live: GPUs on which rows that are not recorded are predicted now.
    """
    rows = []
    for case in cases:
        padding = {arch.name: case.shape.tile_padding(arch) for arch in archs}
        bounds = {gpu.name: roof(case.work, gpu) for gpu in gpus_of(archs)}
        rows.append(
            {
                "row": case.row,
                "name": case.name,
                "op": case.op,
                "text": case.text,
                "flops": case.work.flops,
                "bytes": case.work.bytes,
                "intensity": case.work.intensity,
                "rate": case.work.rate,
                "tile_padding": padding,
                "roofs": {name: {"us": bound.us, "bound": bound.bound} for name, bound in bounds.items()},
                "model": {name: model_of(case, name, live=name in live) for name in bounds},
                "goal_us": case.goal_us,
                "status": MODEL,
            }
        )
    return rows


def model_document(archs: Sequence[Arch], ops: Sequence[str], cases: Sequence[Case], live: Collection[str] = ()) -> dict[str, Any]:
    """Return the document that needs no GPU: static figures, rooflines and predictions, with the constants behind them (see model_rows)."""
    return {
        "format": FORMAT,
        "device": MODEL,
        "archs": [arch.name for arch in archs],
        "gpus": [asdict(gpu) for gpu in gpus_of(archs)],
        "machines": {gpu.name: _machine(gpu.name) for gpu in gpus_of(archs)},
        **static_section(archs, ops),
        "rows": model_rows(archs, cases, live),
    }


def _machine(gpu: str) -> dict[str, Any]:
    """Return the constants of a GPU: at both ends, nominal, and the origin of each."""
    ends = {"best": FAST, "worst": SLOW, "nominal": NOMINAL}
    return {**{name: asdict(constants(gpu, end)) for name, end in ends.items()}, "sources": sources(gpu)}


def clock_row(case: Case, gpus: Sequence[str]) -> dict[str, Any]:
    """Return a row of `--device clock`: its roofline, what is recorded of it, and its prediction on each of these GPUs."""
    models = {name: model_of(case, name) for name in gpus}
    return {
        "row": case.row,
        "name": case.name,
        "op": case.op,
        "text": case.text,
        "roofs": {name: roof(case.work, GPUS[name]).us for name in gpus},
        "model": {name: {key: model.get(key) for key in ("low_us", "high_us")} for name, model in models.items()},
        "clock": {name: clock_of(case, name) for name in gpus},
        "status": CLOCK,
    }


def clock_document(
    archs: Sequence[str], gpus: Sequence[str], rows: Sequence[dict[str, Any]], peer: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the document of `--device clock`: rows, the constants behind them, and a peer if one was given."""
    return {
        "format": CLOCK_FORMAT,
        "device": CLOCK,
        "archs": list(archs),
        "constants": {name: {end: asdict(constants(name, end)) for end in ENDS} for name in gpus},
        "rows": list(rows),
        "peer": peer,
    }


def cuda_document(
    archs: Sequence[Arch],
    ops: Sequence[str],
    cases: Sequence[Case],
    limits: Limits,
    progress: Callable[[str, dict[str, Any]], None],
) -> dict[str, Any]:
    """Time the cases on the current GPU in child processes; return the document with static figures and timed rows.

    GpuMismatchError without a matching GPU, ArtifactError without kernels.
    progress: called before each row with its name and the document so far, which names that row as `running`.
    """
    from cute_mla.testing.processes import GPU_START_SECONDS, Work, Worker

    from .measure.cuda_bench import cuda_bench, matching_arch
    from .measure.environment import environment
    from .measure.run_rows import run_rows
    from .measure.runner import row_worker

    begin = time.monotonic()
    arch = matching_arch(archs)
    load_artifacts()
    fixed = {"format": FORMAT, "device": CUDA, "archs": [arch.name], **asdict(limits), **static_section([arch], ops)}
    machine = environment()

    def document(rows: list[dict[str, Any]], running: str | None) -> dict[str, Any]:
        left = [row["name"] for row in rows if row["status"] == "not_run"]
        found = {**machine, "peers": peer_versions(rows)}
        return {**fixed, "environment": found, "running": running, "rows": rows, "not_run": left, "seconds": time.monotonic() - begin}

    worker = Worker(Work(partial(row_worker, partial(cuda_bench, arch)), limits.row_s, GPU_START_SECONDS))
    try:
        left = limits.budget_s - (time.monotonic() - begin)
        return document(run_rows(cases, worker.ask, left, lambda name, so_far: progress(name, document(so_far, name))), None)
    finally:
        worker.kill()


def peer_versions(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the version of each peer of the rows, or why it cannot be imported."""
    peers = [peer for row in rows for peer in row.get("peers", {}).items()]
    return {name: peer.get("version") or peer["reason"] for name, peer in peers if "version" in peer or peer["status"] == "absent"}


def plot(document: dict[str, Any], predicted: str | None = None) -> str:
    """Draw the roofline of a document as SVG: the predicted rates of each row, or the measured ones.

    predicted: GPU of the predictions (default: the first).
    Rows whose products do not run at the bf16 rate have another roof and are left out.
    """
    if document["device"] == MODEL:
        gpu = GPUS[predicted or document["gpus"][0]["name"]]
        values = constants(gpu.name, FAST)
        points = []
        for row in document["rows"]:
            found = row["model"][gpu.name]
            if row["rate"] == 1 and "reason" not in found:
                worst, best = (row["flops"] / found[end] / 1e6 for end in ("high_us", "low_us"))
                points.append(Point(row["op"], row["row"], row["intensity"], worst, False, best))
        rate = values.product_flops * values.boost_ghz * values.sm_count / 1e3
        return roofline_svg(gpu, points, f"Predictions under the roofline of {with_article(gpu.name)}", rate)
    gpu = GPUS.get(gpu_key(document["environment"]["gpu"] or "")) or gpus_of([ARCHS[name] for name in document["archs"]])[0]
    timed = [row for row in document["rows"] if row["status"] == "timed" and row["rate"] == 1]
    points = [Point(row["op"], row["row"], row["intensity"], row["tflops"], True) for row in timed]
    return roofline_svg(gpu, points, f"Useful work on {document['environment']['gpu']}")


def gpu_key(name: str) -> str:
    """Return the key in GPUS of a device name such as "NVIDIA H200"; "" if it has none."""
    return next((key for key in GPUS if key in name), "")


def plain(value: Any) -> Any:
    """Return the value with NaN and infinities, which JSON lacks, as strings."""
    if isinstance(value, dict):
        return {key: plain(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [plain(member) for member in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value

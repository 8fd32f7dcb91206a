"""The document that `profile` leaves behind: static report, rooflines, and timings where there is a GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from ..runtime.errors import ArtifactError
from ..runtime.library import load_artifacts
from ..spec.arch import Arch
from .plot import Point, roofline_svg
from .roofline import DEFAULT_GPU, GPUS, DecodeShape, roof, tile_padding
from .rows import OPS, Case, load, select
from .static_report import static_report

FORMAT = 1
STATIC_OPS = ("dense_decode", "combine", "split_plan")
MODEL, CUDA = "model", "cuda"
_UNTIMED = "combine has no public call of its own; its time is in the kernel times of the dense-decode rows"


def cases_for(op: str | None, names: Sequence[str]) -> list[Case]:
    """The cases of an op (None: of all) or those named. ValueError for an unknown name, or an op without rows."""
    if op is not None and op not in OPS:
        if names:
            raise ValueError(f"{op} has no benchmark rows, so none named {', '.join(names)}; rows exist for {', '.join(OPS)}")
        return []
    cases = [case for name in ([op] if op else OPS) for case in load(name)]
    return select(cases, names) if names else cases


def static_section(arch: Arch, op: str | None) -> dict[str, Any]:
    """The static report of the built kernels, or why there is none."""
    try:
        manifest = load_artifacts().manifest
    except ArtifactError as error:
        return {"kernels": [], "kernels_missing": str(error)}
    reports = static_report(manifest, arch.name, [op] if op else STATIC_OPS)
    missing = "" if reports else f"no {op or 'kernel'} built for {arch.name}"
    return {"kernels": [asdict(report) for report in reports], "kernels_missing": missing}


def model_rows(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """The roofline of every case on every GPU of the table, nothing of it measured."""
    rows = []
    for case in cases:
        bounds = {name: roof(case.work, gpu) for name, gpu in GPUS.items()}
        rows.append(
            {
                "row": case.row,
                "name": case.name,
                "op": case.op,
                "text": case.text,
                "flops": case.work.flops,
                "bytes": case.work.bytes,
                "intensity": case.work.intensity,
                "tile_padding": tile_padding(case.shape) if isinstance(case.shape, DecodeShape) else None,
                "roofs": {name: {"us": bound.us, "bound": bound.bound} for name, bound in bounds.items()},
                "goal_us": case.goal_us,
                "status": MODEL,
            }
        )
    return rows


def model_document(arch: Arch, op: str | None, names: Sequence[str]) -> dict[str, Any]:
    """Without a GPU: static report and rooflines."""
    return {
        "format": FORMAT,
        "device": MODEL,
        "arch": arch.name,
        "gpus": [asdict(gpu) for gpu in GPUS.values()],
        **static_section(arch, op),
        "rows": model_rows(cases_for(op, names)),
    }


def cuda_document(arch: Arch, op: str | None, names: Sequence[str], budget_s: float, progress: Callable[[str], None]) -> dict[str, Any]:
    """With a GPU: the static report and the timed rows. Needs torch with a matching GPU (ValueError) and artefacts
    (ArtifactError)."""
    from .cuda_bench import cuda_bench, environment
    from .measure import not_run, run_rows

    begin = time.monotonic()
    cases = cases_for(op, names)
    bench = cuda_bench(arch)
    record = environment(arch)
    timeable = [case for case in cases if case.op == "dense_decode"]
    rows = run_rows(timeable, bench, budget_s - (time.monotonic() - begin), progress)
    rows += [not_run(case, _UNTIMED) for case in cases if case.op != "dense_decode"]
    return {
        "format": FORMAT,
        "device": CUDA,
        "environment": record,
        **static_section(arch, op),
        "rows": rows,
        "not_run": [row["name"] for row in rows if row["status"] == "not_run"],
        "budget_s": budget_s,
        "seconds": time.monotonic() - begin,
    }


def plot(document: dict[str, Any]) -> str:
    """The roofline of a document as SVG: bounds of the model, or what was measured beside the ceilings of the run."""
    if document["device"] == MODEL:
        gpu = DEFAULT_GPU
        points = [
            Point(row["row"], row["intensity"], row["flops"] / row["roofs"][gpu.name]["us"] / 1e6, False)
            for row in document["rows"]
            if row["op"] == "dense_decode"
        ]
        return roofline_svg(gpu, points, f"Dense decode: the roofline of an {gpu.name}")
    gpu = GPUS.get(gpu_key(document["environment"]["gpu"] or ""), DEFAULT_GPU)
    points = [Point(row["row"], row["intensity"], row["tflops"], True) for row in document["rows"] if row["status"] == "timed"]
    return roofline_svg(gpu, points, f"Dense decode on {document['environment']['gpu']}")


def gpu_key(name: str) -> str:
    """The table's name of a GPU that calls itself like "NVIDIA H200"; "" if it is none of the table."""
    return next((key for key in GPUS if key in name), "")


def plain(value: Any) -> Any:
    """The value with NaN and infinities, which JSON does not have, as strings."""
    if isinstance(value, dict):
        return {key: plain(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [plain(member) for member in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value

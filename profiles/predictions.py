"""Predictions of benchmark rows by the clock, as `profile --device model` reports them.

    python -m cute_mla.profiles.predictions [GPU...]        records rows whose kernels or constants have changed; writes tables

predictions.json has the clocks of each row's launches, one line a row: runs of the clock take seconds to a minute a row. Times follow from
them, from the plan and from the constants of the GPU whenever they are asked for. A line names the state of kernels and constants that it
was made with. GPUs with equal constants share their lines.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.runtime.errors import ArtifactError

from .clock.cluster_run import HBM, ISSUE, L2, SHARED, TENSOR
from .clock.constants import constants, gpus
from .clock.kernel_times import KernelTimes
from .clock.rows import ENDS, REFUSALS, LaunchClocks, launches_over_keys, row_clocks, time_of
from .clock.streams import stream_kernel
from .launches.launch import Combine, Launch, NoLaunchError
from .launches.of_rows import launch_on
from .roofline import GPUS, roof
from .rows import RESULTS, Case, Published, by_priority, every_case

FILE = Path(__file__).resolve().parent / "predictions.json"
NOTES, README = FILE.parent / "NOTES.md", FILE.parents[1] / "README.md"
PERFORMANCE = README.parent / "docs" / "performance.md"
BEGIN, END = "<!-- begin: python -m cute_mla.profiles.predictions -->\n", "<!-- end: predictions -->"
BEGIN_BOARDS = BEGIN.replace(" -->", ", RTX boards -->")
SHOWN = ("H200", "B200")  # GPUs of the tables
BOARDS = ("RTX PRO 6000", "RTX 5090", "GB10")  # of a table of their own, with decodes of up to 16 and of 128 heads
BOARD_ROWS = (
    *("S8.h8", "S8.h16", "S8.h128", "S3.h8", "S3.h16", "S2.b128", "S8.latent_h16", "S8.b128_latent_h16"),
    *("D12.h16", "D8.s1", "F2.h16b1", "F2.h16"),
)
BOARD_NUMBERS = ("D1.fixed", "F1.s1", "S1.topk2048", "P1.32k", "M1.8k")  # the rest of what the README shows of the first board
FIRST_PRIORITIES = 2  # of the rows in NOTES.md; they cover every op
NUMBERS = {  # rows of the README
    "D1.fixed": "dense decode, 4,096 keys, 128 heads, bf16",
    "D8.s1": "the same with 16 heads",
    "F1.s1": "as D1, e4m3 cache and queries",
    "S1.topk2048": "sparse decode, 2,048 of 32,768 keys, 128 heads, 2 query tokens, FP8 cache of 656 bytes",
    "S3.h16": "the same with 16 heads and one query token",
    "P1.32k": "sparse prefill, 4,096 tokens, 2,048 of 32,768 keys, 128 heads",
    "M1.8k": "dense prefill, one causal sequence of 8,192 tokens, 128 heads",
}
MEASURED_KEY = "cold_us"  # operands not in L2, as the rooflines assume
UNITS = (TENSOR, SHARED, L2, HBM, ISSUE)

Line = dict[str, Any]  # "state", and for each end of the constants a list of launches: [block, fixed part, seam, stream, use of UNITS...]


@cache
def recorded() -> dict[str, Line]:
    """Return the lines of the file by "<row> <GPU>"."""
    found: dict[str, Line] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return found


def first_cases() -> list[Case]:
    """Return the cases that are recorded and shown in NOTES.md, in the order of ops."""
    return [case for case in every_case() if case.priority <= FIRST_PRIORITIES]


def board_cases(gpu: str) -> list[Case]:
    """Return the cases that are recorded on an RTX board, those of the table of all boards first."""
    cases = {case.name: case for case in every_case()}
    return [cases[name] for name in (*BOARD_ROWS, *(BOARD_NUMBERS if gpu == BOARDS[0] else ()))]


def published_cases() -> list[tuple[Case, Published]]:
    """Return the cases that others have timed, in the order of ops."""
    return [(case, case.published) for case in every_case() if case.published is not None]


@cache
def line_gpu(gpu: str) -> str:
    """Return the GPU whose lines serve this one: the first with equal constants."""
    own = [replace(constants(gpu, end), gpu="") for end in ENDS]
    return next(name for name in gpus() if [replace(constants(name, end), gpu="") for end in ENDS] == own)


def kernels_of(case: Case, gpu: str) -> list[str]:
    """Return the names of the kernels of a row."""
    launch, values = launch_on(case, gpu), constants(gpu)
    if isinstance(launch, Combine):
        return [stream_kernel(case, launch, values)]
    launches = launches_over_keys(launch)
    streams = [stream_kernel(case, each.combine, values) for each in launches if each.combine is not None]
    return [each.kernel for each in launches] + streams


def line_of(case: Case, gpu: str) -> Line | None:
    """Return what is recorded of a row on a GPU, or None."""
    return recorded().get(f"{case.name} {line_gpu(gpu)}")


def state_of(case: Case, gpu: str) -> str | None:
    """Return a hash of the machine code of a row's kernels and of the constants; None where a kernel is not built."""
    try:
        built = load_artifacts().manifest.kernels
    except ArtifactError:
        return None
    try:
        names = kernels_of(case, gpu)
    except NoLaunchError:  # its architecture has no such kernel
        return None
    if any(name not in built for name in names):
        return None
    values = [asdict(replace(constants(gpu, end), gpu="")) for end in ENDS]
    return hashlib.sha256(json.dumps([[built[name].cubin_sha256 for name in names], values]).encode()).hexdigest()[:12]


def is_current(case: Case, gpu: str) -> bool | None:
    """Return whether a row is recorded with the kernels that are built; None where they are not built."""
    line, state = line_of(case, gpu), state_of(case, gpu)
    return line is not None and line["state"] == state if state is not None else None


def record_of(case: Case, gpu: str) -> Line:
    """Run the clock on a row. One of REFUSALS, with the reason, for a row that cannot be timed."""
    return {"state": state_of(case, gpu), **{end: [_numbers(each) for each in row_clocks(case, gpu, end)] for end in ENDS}}


def _numbers(clocks: LaunchClocks) -> list[float | None]:
    stream = None if clocks.stream is None else round(clocks.stream, 1)
    if clocks.kernel is None:
        return [None, None, 0.0, stream]
    use = [round(clocks.kernel.use[unit], 4) for unit in UNITS]
    return [round(clocks.kernel.block, 2), round(clocks.kernel.fixed, 1), round(clocks.seam, 1), stream, *use]


def _clocks(numbers: Sequence[Any]) -> LaunchClocks:
    block, fixed, seam, stream, *use = numbers
    kernel = None if block is None else KernelTimes(block, fixed, dict(zip(UNITS, use, strict=True)), {})
    return LaunchClocks(kernel, seam, stream)


def predicted(case: Case, gpu: str, line: Line) -> dict[str, Any]:
    """Return the times of a row, nominal and at both ends, and what binds; best and worst are the ends with the least and the most time."""
    ends = [_end(case, gpu, end, [_clocks(numbers) for numbers in line[end]]) for end in ENDS]
    best, worst = (pick(ends, key=lambda end: end["us"]) for pick in (min, max))
    limit_us = roof(case.work, GPUS[gpu]).us
    return {
        "us": ends[0]["us"],
        "low_us": best["us"],
        "high_us": worst["us"],
        "binds": [best["binds"], worst["binds"]],
        "fraction_of_roof": [limit_us / worst["us"], limit_us / best["us"]],
        "nominal": ends[0],
        "best": best,
        "worst": worst,
    }


def _end(case: Case, gpu: str, end: str, clocks: Sequence[LaunchClocks]) -> dict[str, Any]:
    time, longest = time_of(case, gpu, end, clocks)
    kernel = clocks[longest].kernel
    busy = {} if kernel is None else {"block": kernel.block, **{unit: share * kernel.block for unit, share in kernel.use.items()}}
    return {"us": time.us, "ghz": time.ghz, "terms": dict(time.terms), "binds": time.binds, "clocks": busy}


def model_of(case: Case, gpu: str, *, live: bool = False, results: Path = RESULTS) -> dict[str, Any]:
    """Return the prediction of a row on a GPU with all terms, or {"reason": why there is none}.

    live: run the clock on a row that is not recorded.
    """
    line = line_of(case, gpu)
    try:
        if line is None and not live:
            return {"reason": f"not recorded; `profile --device model --gpu {gpu} --rows {case.name}` predicts it"}
        line = line or record_of(case, gpu)
    except REFUSALS as reason:
        return {"reason": str(reason)}
    found, launch = predicted(case, gpu, line), launch_on(case, gpu)
    return {
        "kernel": launch.kernel if isinstance(launch, Launch) else case.op,
        **found,
        **_launch_fields(launch),
        **against(measured_us(case, gpu, results), found["low_us"], found["high_us"]),
        "current": is_current(case, gpu),
    }


def _launch_fields(launch: Launch | Combine) -> dict[str, Any]:
    """Return the work of a launch. null: what the clock does not derive by a formula."""
    if isinstance(launch, Combine):
        return {"combine": _combine_fields(launch)}
    longest = max(launch.cta_work, key=lambda work: work.blocks, default=None)
    return {
        "block": {"flops": dict(launch.flops), "smem": None, "path": None},
        "ctas": launch.ctas,
        "parts": len(launch.cta_work),
        "blocks_of_the_longest": 0 if longest is None else longest.blocks,
        "pieces_of_it": max((work.pieces for work in launch.cta_work), default=0),
        "combine": None if launch.combine is None else _combine_fields(launch.combine),
    }


def _combine_fields(combine: Combine) -> dict[str, Any]:
    return {**asdict(combine), "busiest_bytes": None, "loads": None}


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


def write(lines: dict[str, Line]) -> None:
    """Write the file with one line a row, in the order of GPUs and definitions; lines of rows that no longer exist are dropped."""
    names = [f"{case.name} {gpu}" for gpu in gpus() for case in every_case()]
    text = ",\n".join(f" {json.dumps(name)}: {json.dumps(lines[name])}" for name in names if name in lines)
    FILE.write_text("{\n" + text + "\n}\n", encoding="utf-8")
    recorded.cache_clear()


def between(low: float, high: float) -> str:
    """Format a range as one cell, with three digits for each end."""
    first, last = (f"{number:,.0f}" if number >= 100 else f"{number:.3g}" for number in (low, high))
    return first if first == last else f"{first} to {last}"


def _limit_and_time(case: Case, gpu: str, found: Mapping[str, Any]) -> list[str]:
    """Return the cells of a row on a GPU: its roofline, and its prediction with the range."""
    limit = roof(case.work, GPUS[gpu]).us
    time = "-" if "us" not in found else f"{between(found['us'], found['us'])} ({between(found['low_us'], found['high_us'])})"
    return [between(limit, limit), time]


def table(problems: Mapping[str, str], *, with_bound: bool, gpus: Sequence[str] = SHOWN) -> str:
    """Return rows as Markdown: roofline and prediction on each of some GPUs, with the cause of most of the time. problems: by name."""
    heads = [f"{gpu}: {what}" for gpu in gpus for what in ("roofline", "clock", "binds")[: 3 if with_bound else 2]]
    lines = [f"| row | problem | {' | '.join(heads)} |\n", "|---" * (len(heads) + 2) + "|\n"]
    cases = {case.name: case for case in every_case()}
    for name, problem in problems.items():
        cells = [name, problem]
        for gpu in gpus:
            found = model_of(cases[name], gpu)
            cells += _limit_and_time(cases[name], gpu, found)
            if with_bound:
                cells.append(found["nominal"]["binds"] if "nominal" in found else "-")
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def published_table() -> str:
    """Return the rows that others have timed as Markdown: roofline and prediction on their GPU, and their times by library."""
    lines = ["| row | problem | GPU | roofline | clock | measured by others |\n", "|---" * 6 + "|\n"]
    for case, published in published_cases():
        theirs = ", ".join(f"{library} {between(us, us)}" for library, us in published.us)
        cells = [*_limit_and_time(case, published.gpu, model_of(case, published.gpu)), f"[{theirs}]({published.source})"]
        lines.append(f"| {case.name} | {case.text} | {published.gpu} | {' | '.join(cells)} |\n")
    return "".join(lines)


def tables() -> dict[tuple[Path, str], str]:
    """Return the tables by page and the line in front of them."""
    rows, boards = ({case.name: case.text for case in cases} for cases in (first_cases(), board_cases(BOARDS[-1])))
    return {
        (NOTES, BEGIN): table(rows, with_bound=True),
        (README, BEGIN): table(NUMBERS, with_bound=False, gpus=(*SHOWN, BOARDS[0])),
        (PERFORMANCE, BEGIN): published_table(),
        (PERFORMANCE, BEGIN_BOARDS): table(boards, with_bound=False, gpus=BOARDS),
    }


def main(names: Sequence[str]) -> None:
    """Record the rows that are not current, after each row, and write the tables.

    names: GPUs of the first rows, or of those of RTX boards; by default SHOWN and BOARDS. Rows that others have timed are recorded on their
    GPU, if it is among the names.
    """
    wanted = names or (*SHOWN, *BOARDS)
    first = [(case, gpu) for gpu in wanted for case in (board_cases(gpu) if gpu in BOARDS else by_priority(first_cases()))]
    others = [(case, published.gpu) for case, published in published_cases() if not names or published.gpu in names]
    for case, gpu in dict.fromkeys((case, line_gpu(gpu)) for case, gpu in first + others):
        if is_current(case, gpu) is False:
            print(f"{gpu} {case.name}", file=sys.stderr, flush=True)
            line = record_of(case, gpu)
            write({**recorded(), f"{case.name} {gpu}": line})
    for (page, begin), block in tables().items():
        before, _, rest = page.read_text(encoding="utf-8").partition(begin)
        page.write_text(before + begin + block + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

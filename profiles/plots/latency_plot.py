"""Plot of measured times against batch and against length, as SVG: one line for rows that differ in nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cute_mla.spec.dense_decode import LATENT

from .roofline_plot import OP_COLORS, op_legend
from .svg import FAINT, GRID, line, log_fraction, mark, path, picture, text

OURS = ""  # library of our own points
WIDTH, HEIGHT = 1320, 520
TOP, BOTTOM = 62, 62
_TITLES = {"batch": "requests (tokens of merge_states and of writers)", "length": "keys of a request"}
_PANEL, _LEFT, _LABELS = 660, 70, 190  # pixels: width of a panel, and its margins left and right of the axes


@dataclass(frozen=True)
class Timed:
    """One measured time.

    rest: the shape without batch and length. library: name of a baseline, or OURS. batch, length: None for an op without them.
    us: median of a call in microseconds.
    """

    op: str
    rest: str
    library: str
    batch: float | None
    length: float | None
    us: float


def timed_of(row: Mapping[str, Any]) -> list[Timed]:
    """Return the times of a timed record: ours, and those of baselines."""
    rest, batch, length = _axes_of(row["op"], row["shape"])
    theirs = {name: baseline["us"]["median"] for name, baseline in row["peers"].items() if "us" in baseline}
    times = {OURS: row["cold_us"]["median"]} | theirs
    return [Timed(row["op"], rest, library, batch, length, us) for library, us in times.items()]


def _axes_of(op: str, shape: Mapping[str, Any]) -> tuple[str, float | None, float | None]:
    """Return (rest, batch, length) of a record's shape. length: keys of a request; in sparse prefill, rows of the latent."""
    lengths = shape.get("lengths", ())
    varied = " varied" if len(set(lengths)) > 1 else ""
    match op:
        case "dense_decode":
            operands = "" if shape["operands"] == LATENT else f" {shape['operands']}"
            return f"h{shape['h_q']} s{shape['s_q']}{operands}{varied}", len(lengths), sum(lengths) / len(lengths)
        case "sparse_decode":
            return f"h{shape['h_q']} s{shape['s_q']} {shape['cache']}", shape["batch"], shape["topk"]
        case "sparse_prefill" | "sparse_prefill_backward":
            return f"h{shape['h_q']} s{shape['s_q']} topk{shape['topk']}", None, shape["s_kv"]
        case "dense_prefill" | "dense_prefill_backward":
            return f"h{shape['h_q']} {'causal' if shape['causal'] else 'full'}{varied}", len(lengths), sum(lengths) / len(lengths)
        case "combine":
            return f"h{shape['h_q']} s{shape['s_q']} splits{shape['splits']}", shape["batch"], None
        case "cache_write":
            return shape["cache"], shape["tokens"], None
        case "cache_insert":
            return f"h{shape['h_q']} {shape['cache']}", shape["tokens"], None
        case "index_write":
            return f"h{shape['h_q']}" if shape["h_q"] else "keys", shape["tokens"], None
        case "indexer_topk":
            return f"h{shape['h_q']} topk{shape['topk']} {'pages' if shape['paged'] else 'rows'}", shape["tokens"], shape["context"]
        case "topk_indices":
            return f"topk{shape['topk']}", shape["rows"], shape["columns"]
        case _:
            return f"h{shape['h_q']} states{shape['states']}", shape["tokens"], None


def lines_against(axis: str, times: Sequence[Timed]) -> dict[tuple[str, str, str], list[tuple[float, float]]]:
    """Return the lines of an axis ("batch" or "length") with at least two points.

    Keys are (op, label, library); values are (position on the axis, microseconds) in ascending order.
    """
    other = "length" if axis == "batch" else "batch"
    found: dict[tuple[str, str, str], dict[float, float]] = {}
    for time in times:
        value, fixed = getattr(time, axis), getattr(time, other)
        if value:
            label = time.rest + ("" if fixed is None else f" {'L' if other == 'length' else 'b'}{fixed:g}")
            found.setdefault((time.op, label, time.library), {})[value] = time.us
    return {key: sorted(points.items()) for key, points in found.items() if len(points) > 1}


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """Return the powers of ten that enclose some positive values, at least one decade apart."""
    low = 10.0 ** math.floor(math.log10(min(values)))
    return low, max(10.0 ** math.ceil(math.log10(max(values))), 10 * low)


def _panel(axis: str, times: Sequence[Timed], left: int) -> list[str]:
    """Return axes, lines and labels of one panel."""
    lines = lines_against(axis, times)
    right, bottom = left + _PANEL - _LEFT - _LABELS, HEIGHT - BOTTOM
    title = text((left + right) / 2, HEIGHT - 16, _TITLES[axis])
    if not lines:
        return [title, text((left + right) / 2, HEIGHT / 2, "no two rows differ in this alone", fill=FAINT)]
    points = [point for line_points in lines.values() for point in line_points]
    xs, ys = _decades([x for x, _ in points]), _decades([y for _, y in points])

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return left + (right - left) * log_fraction(point[0], xs), bottom - (bottom - TOP) * log_fraction(point[1], ys)

    parts = [title, text(left - 50, (TOP + bottom) / 2, "us a call", turn=-90)]
    for tick in (10.0**power for power in range(round(math.log10(xs[0])), round(math.log10(xs[1])) + 1)):
        x, _ = place((tick, ys[0]))
        parts += [line(x, TOP, x, bottom, GRID, 1), text(x, bottom + 18, f"{tick:g}")]
    for tick in (10.0**power for power in range(round(math.log10(ys[0])), round(math.log10(ys[1])) + 1)):
        _, y = place((xs[0], tick))
        parts += [line(left, y, right, y, GRID, 1), text(left - 8, y + 4, f"{tick:g}", anchor="end")]
    taken: list[float] = []
    for (op, label, library), line_points in sorted(lines.items(), key=lambda item: -item[1][-1][1]):
        color, places = OP_COLORS[op], [place(point) for point in line_points]
        parts.append(path(places, color, dashed=library != OURS))
        parts += (mark(x, y, color if library == OURS else "#fff", color) for x, y in places)
        y = max([places[-1][1] + 4, *(other + 11 for other in taken[-1:])])
        taken.append(y)
        parts.append(text(right + 6, y, f"{label} {library}".strip(), size=9, anchor="start", fill=color))
    return parts


def latency_svg(times: Sequence[Timed], title: str) -> str:
    """Return the plot as SVG text: times against requests on the left, against keys on the right; ours solid, baselines dashed."""
    body = [
        text(_LEFT, 22, title, size=15, anchor="start"),
        text(
            _LEFT,
            37,
            "measured; solid: ours, dashed: others; lines join rows that differ in this alone",
            size=11,
            anchor="start",
            fill=FAINT,
        ),
        *op_legend([time.op for time in times], _LEFT, 52),
        *_panel("batch", times, _LEFT),
        *_panel("length", times, _PANEL + _LEFT),
    ]
    return picture(WIDTH, HEIGHT, body)

"""Roofline plot as SVG: useful TFLOP/s against FLOP per byte, both axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..roofline import Gpu
from .svg import FAINT, GRID, line, log_fraction, mark, path, picture, text, text_width

WIDTH, HEIGHT = 980, 640
LEFT, RIGHT, TOP, BOTTOM = 70, 24, 62, 62
X_RANGE = (0.3, 200000.0)
Y_RANGE = (1.0, 3000.0)
_ROOF = "#1f5fa8"
PREDICTED = "hollow: predicted with every constant at its worst; the line ends where all are at their best; nothing here is measured"
_LABEL_SIZE = 11
_LABEL_GAP = 13.0  # pixels between the text baselines of stacked labels
_LABELS_PER_LINE = 4
_TOUCHING = 16.0  # pixels; closer marks share a label
_CLEAR = 7.0  # pixels around the middle of a mark that labels keep free
# Pixels from a mark to the top middle of its label, the nearest first
_PLACES = sorted(
    ((dx, 10 + dy) for dy in range(0, 300, 13) for dx in range(-160, 161, 20)), key=lambda at: (math.hypot(at[0], 1.5 * at[1]), at)
)

Box = tuple[float, float, float, float]  # left, top, right, bottom

OP_COLORS = {
    "dense_decode": "#c23b22",
    "sparse_decode": "#2a7f3f",
    "sparse_prefill": "#8a4fb5",
    "sparse_prefill_backward": "#5d3480",
    "dense_prefill": "#b07a12",
    "dense_prefill_backward": "#7a5a0e",
    "combine": "#3b6f8f",
    "merge_states": "#555",
    "cache_write": "#0f8a8a",
    "cache_insert": "#0b5d5d",
    "index_write": "#4aa3a3",
    "topk_indices": "#a0522d",
    "indexer_topk": "#d2691e",
}


@dataclass(frozen=True)
class Point:
    """One benchmark row of an op. tflops: useful TFLOP/s, measured or as predicted at worst. best: as predicted at best."""

    op: str
    label: str
    intensity: float
    tflops: float
    measured: bool
    best: float | None = None


def _x(intensity: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * log_fraction(intensity, X_RANGE)


def _y(tflops: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * log_fraction(tflops, Y_RANGE)


def _axes() -> list[str]:
    parts = []
    for tick in (1, 10, 100, 1000, 10000):
        parts.append(line(_x(tick), TOP, _x(tick), HEIGHT - BOTTOM, GRID, 1))
        parts.append(text(_x(tick), HEIGHT - BOTTOM + 18, str(tick)))
    for tick in (1, 3, 10, 30, 100, 300, 1000, 3000):
        parts.append(line(LEFT, _y(tick), WIDTH - RIGHT, _y(tick), GRID, 1))
        parts.append(text(LEFT - 8, _y(tick) + 4, str(tick), anchor="end"))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16, "useful FLOP per byte of device memory"))
    parts.append(text(20, (TOP + HEIGHT - BOTTOM) / 2, "useful TFLOP/s", turn=-90))
    return parts


def _roof(gpu: Gpu, best_tflops: float | None) -> list[str]:
    """Return the roof, and dashed the part above it that a matrix rate of best_tflops would open."""
    low, high = X_RANGE
    start = max(low, Y_RANGE[0] / gpu.tbytes)
    corners = [(start, gpu.tbytes * start), (gpu.ridge, gpu.tflops), (high, gpu.tflops)]
    parts = [
        path([(_x(x), _y(y)) for x, y in corners], _ROOF),
        text(_x(high) - 4, _y(gpu.tflops) + 16, f"{gpu.tflops:,g} TFLOP/s", anchor="end", fill=_ROOF),
        text(_x(start * 2.2), _y(gpu.tbytes * start * 2.2) - 12, f"{gpu.tbytes:g} TB/s", anchor="end", fill=_ROOF),
    ]
    if best_tflops is not None and best_tflops > gpu.tflops:
        higher = [(gpu.ridge, gpu.tflops), (best_tflops / gpu.tbytes, best_tflops), (high, best_tflops)]
        parts.append(path([(_x(x), _y(y)) for x, y in higher], _ROOF, dashed=True))
        parts.append(text(_x(high) - 4, _y(best_tflops) - 8, f"{best_tflops:,.0f} TFLOP/s at best", anchor="end", fill=_ROOF))
    return parts


def _inside(point: Point) -> bool:
    return X_RANGE[0] <= point.intensity <= X_RANGE[1] and Y_RANGE[0] <= point.tflops <= Y_RANGE[1]


def _groups(points: Sequence[Point]) -> list[list[Point]]:
    """Return the points inside the axes, grouped so that touching marks of one op are together."""
    groups: list[list[Point]] = []
    for point in sorted(filter(_inside, points), key=lambda point: point.intensity):
        for group in groups:
            last = group[-1]
            close = math.hypot(_x(point.intensity) - _x(last.intensity), _y(point.tflops) - _y(last.tflops)) < _TOUCHING
            if close and (point.op, point.measured) == (last.op, last.measured):
                group.append(point)
                break
        else:
            groups.append([point])
    return groups


def _points(points: Sequence[Point]) -> list[str]:
    """Return marks, ranges and labels. A label is as near to its mark as the others leave room, at the end of a line from the mark."""
    groups = _groups(points)
    taken: list[Box] = []
    ranges, marks, labels = [], [], []
    for point in (point for group in groups for point in group):
        x, y, color = _x(point.intensity), _y(point.tflops), OP_COLORS[point.op]
        taken.append((x - _CLEAR, y - _CLEAR, x + _CLEAR, y + _CLEAR))
        if point.best is not None:
            ranges.append(line(x, y, x, _y(point.best), color, 1.5))
            taken.append((x - 1, _y(point.best), x + 1, y))
        marks.append(mark(x, y, color if point.measured else "#fff", color))
    for group in groups:
        color, x, y = OP_COLORS[group[0].op], _x(group[0].intensity), _y(group[0].tflops)
        names = sorted({point.label for point in group}, key=lambda label: (len(label), label))
        lines = [", ".join(names[start : start + _LABELS_PER_LINE]) for start in range(0, len(names), _LABELS_PER_LINE)]
        box = _free_box(x, y, max(text_width(each, _LABEL_SIZE) for each in lines), _LABEL_GAP * len(lines), taken)
        taken.append(box)
        ranges.append(line(x, y, (box[0] + box[2]) / 2, box[1] + 2, color, 0.7))
        for number, each in enumerate(lines):
            labels.append(text(box[0], box[1] + _LABEL_GAP * (number + 1) - 2, each, size=_LABEL_SIZE, anchor="start", fill=color))
    return [*ranges, *marks, *labels]


def _free_box(x: float, y: float, width: float, height: float, taken: Sequence[Box]) -> Box:
    """Return the box of this size that lies nearest to a mark, inside the axes and over none of the others; below all if none is free."""
    boxes = [(x + dx - width / 2, y + dy, x + dx + width / 2, y + dy + height) for dx, dy in _PLACES]
    inside = [box for box in boxes if box[0] > LEFT and box[2] < WIDTH - RIGHT and box[3] < HEIGHT - BOTTOM]
    free = (box for box in inside if not any(box[0] < o[2] and o[0] < box[2] and box[1] < o[3] and o[1] < box[3] for o in taken))
    return next(free, (x, HEIGHT - BOTTOM - height, x + width, HEIGHT - BOTTOM))


def op_legend(ops: Sequence[str], left: float, y: float) -> list[str]:
    """Return the names of the ops in their colors, side by side."""
    parts = []
    for op in dict.fromkeys(ops):
        parts.append(text(left, y, op.replace("_", " "), size=_LABEL_SIZE, anchor="start", fill=OP_COLORS[op]))
        left += text_width(op, _LABEL_SIZE) + 16
    return parts


def roofline_svg(gpu: Gpu, points: Sequence[Point], title: str, best_tflops: float | None = None) -> str:
    """Return the plot as SVG text: filled marks for measurements, hollow ones for predictions with a line to their best case.

    best_tflops: matrix rate of that case, a dashed roof.
    """
    legend = "filled: measured" if any(point.measured for point in points) else PREDICTED
    body = [
        text(LEFT, 22, title, size=15, anchor="start"),
        text(LEFT, 37, legend, size=11, anchor="start", fill=FAINT),
        *op_legend([point.op for point in points if _inside(point)], LEFT, 52),
        *_axes(),
        *_roof(gpu, best_tflops),
        *_points(points),
    ]
    return picture(WIDTH, HEIGHT, body)

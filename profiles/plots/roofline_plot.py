"""Roofline plot as SVG: useful TFLOP/s against FLOP per byte, both axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..roofline import Gpu
from .svg import FAINT, GRID, line, log_fraction, mark, path, picture, text

WIDTH, HEIGHT = 860, 520
LEFT, RIGHT, TOP, BOTTOM = 70, 24, 62, 62
X_RANGE = (0.3, 200000.0)
Y_RANGE = (1.0, 3000.0)
_ROOF = "#1f5fa8"
_LABEL_GAP = 13.0  # pixels between the text baselines of stacked labels
_CHARACTER = 6.2  # pixels, width of a label's character
_LABELS_PER_LINE = 4
_TOUCHING = 16.0  # pixels; closer marks share a label

OP_COLORS = {
    "dense_decode": "#c23b22",
    "sparse_decode": "#2a7f3f",
    "sparse_prefill": "#8a4fb5",
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
    """One benchmark row of an op. tflops: useful TFLOP/s, at the roofline bound or measured."""

    op: str
    label: str
    intensity: float
    tflops: float
    measured: bool


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


def _roof(gpu: Gpu) -> list[str]:
    low, high = X_RANGE
    start = max(low, Y_RANGE[0] / gpu.tbytes)
    corners = [(start, gpu.tbytes * start), (gpu.ridge, gpu.tflops), (high, gpu.tflops)]
    return [
        path([(_x(x), _y(y)) for x, y in corners], _ROOF),
        text(_x(high) - 4, _y(gpu.tflops) - 8, f"{gpu.tflops:g} TFLOP/s", anchor="end", fill=_ROOF),
        text(_x(start * 2.2), _y(gpu.tbytes * start * 2.2) - 12, f"{gpu.tbytes:g} TB/s", anchor="end", fill=_ROOF),
    ]


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
    """Return the marks and labels: a group's labels at its lower right, moved down where they would cover other labels."""
    parts: list[str] = []
    labels: list[tuple[float, float, float]] = []  # left, right, baseline
    for group in _groups(points):
        color = OP_COLORS[group[0].op]
        parts += (mark(_x(point.intensity), _y(point.tflops), color if point.measured else "#fff", color) for point in group)
        names = sorted({point.label for point in group}, key=lambda label: (len(label), label))
        for start in range(0, len(names), _LABELS_PER_LINE):
            written = ", ".join(names[start : start + _LABELS_PER_LINE])
            left = min(_x(group[0].intensity) + 7, WIDTH - 4 - _CHARACTER * len(written))
            right, baseline = left + _CHARACTER * len(written), _y(group[0].tflops) + 17
            while any(left < other[1] and other[0] < right and abs(baseline - other[2]) < _LABEL_GAP for other in labels):
                baseline += _LABEL_GAP
            labels.append((left, right, baseline))
            parts.append(text(left, baseline, written, size=11, anchor="start", fill=color))
    return parts


def op_legend(ops: Sequence[str], left: float, y: float) -> list[str]:
    """Return the names of the ops in their colors, side by side."""
    parts = []
    for op in dict.fromkeys(ops):
        parts.append(text(left, y, op.replace("_", " "), size=11, anchor="start", fill=OP_COLORS[op]))
        left += _CHARACTER * (len(op) + 3)
    return parts


def roofline_svg(gpu: Gpu, points: Sequence[Point], title: str) -> str:
    """Return the plot as SVG text: the roof of `gpu`, hollow marks for bounds, filled marks for measurements, one color an op."""
    legend = "filled: measured" if any(point.measured for point in points) else "hollow: the bound of each row; nothing here is measured"
    body = [
        text(LEFT, 22, title, size=15, anchor="start"),
        text(LEFT, 37, legend, size=11, anchor="start", fill=FAINT),
        *op_legend([point.op for point in points if _inside(point)], LEFT, 52),
        *_axes(),
        *_roof(gpu),
        *_points(points),
    ]
    return picture(WIDTH, HEIGHT, body)

"""A roofline as a small SVG, written by hand: useful TFLOP/s against FLOP per byte, both logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from .roofline import Gpu

WIDTH, HEIGHT = 760, 480
LEFT, RIGHT, TOP, BOTTOM = 70, 24, 44, 62
X_RANGE = (1.0, 1000.0)
Y_RANGE = (5.0, 3000.0)
_INK, _GRID, _ROOF, _BOUND, _MEASURED = "#222", "#ddd", "#1f5fa8", "#1f5fa8", "#c23b22"
_LABEL_GAP = 13.0  # pixels between baselines of labels one above the other
_CHARACTER = 6.2  # pixels of a label's character
_LABELS_PER_LINE = 4
_TOUCHING = 16.0  # pixels between marks that share a label


@dataclass(frozen=True)
class Point:
    """One benchmark row. tflops: useful TFLOP/s, at the roofline or measured."""

    label: str
    intensity: float
    tflops: float
    measured: bool


def _x(intensity: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * _fraction(intensity, X_RANGE)


def _y(tflops: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * _fraction(tflops, Y_RANGE)


def _fraction(value: float, bounds: tuple[float, float]) -> float:
    low, high = bounds
    inside = min(max(value, low), high)
    return math.log(inside / low) / math.log(high / low)


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "middle", fill: str = _INK, turn: int = 0) -> str:
    rotation = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"{rotation}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, stroke: str, width: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" stroke-width="{width}"/>'


def _axes() -> list[str]:
    parts = []
    for tick in (1, 3, 10, 30, 100, 300, 1000):
        parts.append(_line(_x(tick), TOP, _x(tick), HEIGHT - BOTTOM, _GRID, 1))
        parts.append(_text(_x(tick), HEIGHT - BOTTOM + 18, str(tick)))
    for tick in (10, 30, 100, 300, 1000, 3000):
        parts.append(_line(LEFT, _y(tick), WIDTH - RIGHT, _y(tick), _GRID, 1))
        parts.append(_text(LEFT - 8, _y(tick) + 4, str(tick), anchor="end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16, "useful FLOP per byte of device memory"))
    parts.append(_text(20, (TOP + HEIGHT - BOTTOM) / 2, "useful TFLOP/s", turn=-90))
    return parts


def _roof(gpu: Gpu) -> list[str]:
    low, high = X_RANGE
    start = max(low, Y_RANGE[0] / gpu.tbytes)
    corners = [(start, gpu.tbytes * start), (gpu.ridge, gpu.tflops), (high, gpu.tflops)]
    path = " ".join(f"{_x(x):.1f},{_y(y):.1f}" for x, y in corners)
    return [
        f'<polyline points="{path}" fill="none" stroke="{_ROOF}" stroke-width="2"/>',
        _text(_x(high) - 4, _y(gpu.tflops) - 8, f"{gpu.tflops:g} TFLOP/s", anchor="end", fill=_ROOF),
        _text(_x(start * 2.2), _y(gpu.tbytes * start * 2.2) - 12, f"{gpu.tbytes:g} TB/s", anchor="end", fill=_ROOF),
    ]


def _groups(points: Sequence[Point]) -> list[list[Point]]:
    """The points inside the axes; those whose marks would touch are together."""
    groups: list[list[Point]] = []
    for point in sorted(points, key=lambda point: point.intensity):
        if not (X_RANGE[0] <= point.intensity <= X_RANGE[1] and Y_RANGE[0] <= point.tflops <= Y_RANGE[1]):
            continue
        for group in groups:
            last = group[-1]
            close = math.hypot(_x(point.intensity) - _x(last.intensity), _y(point.tflops) - _y(last.tflops)) < _TOUCHING
            if close and point.measured == last.measured:
                group.append(point)
                break
        else:
            groups.append([point])
    return groups


def _points(points: Sequence[Point]) -> list[str]:
    """Marks, each group's labels at its lower right, moved down where they would cover other labels."""
    parts: list[str] = []
    labels: list[tuple[float, float, float]] = []  # left, right, baseline
    for group in _groups(points):
        color = _MEASURED if group[0].measured else _BOUND
        for point in group:
            at = f'cx="{_x(point.intensity):.1f}" cy="{_y(point.tflops):.1f}" r="4.5"'
            parts.append(f'<circle {at} fill="{color if point.measured else "#fff"}" stroke="{color}" stroke-width="1.5"/>')
        names = sorted({point.label for point in group}, key=lambda label: (len(label), label))
        for start in range(0, len(names), _LABELS_PER_LINE):
            text = ", ".join(names[start : start + _LABELS_PER_LINE])
            left = min(_x(group[0].intensity) + 7, WIDTH - 4 - _CHARACTER * len(text))
            right, baseline = left + _CHARACTER * len(text), _y(group[0].tflops) + 17
            while any(left < other[1] and other[0] < right and abs(baseline - other[2]) < _LABEL_GAP for other in labels):
                baseline += _LABEL_GAP
            labels.append((left, right, baseline))
            parts.append(_text(left, baseline, text, size=11, anchor="start", fill=color))
    return parts


def roofline_svg(gpu: Gpu, points: Sequence[Point], title: str) -> str:
    """The plot as SVG text: the roof of `gpu`, hollow marks for bounds, filled ones for measurements."""
    legend = "filled: measured" if any(point.measured for point in points) else "hollow: the bound of each row; nothing here is measured"
    body = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        _text(LEFT, 22, title, size=15, anchor="start"),
        _text(LEFT, 37, legend, size=11, anchor="start", fill="#666"),
        *_axes(),
        *_roof(gpu),
        *_points(points),
    ]
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    return "\n".join([head, *body, "</svg>", ""])

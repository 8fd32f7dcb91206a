"""SVG elements as text, shared by the plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

INK, GRID, FAINT = "#222", "#ddd", "#666"


def text(x: float, y: float, content: str, *, size: int = 12, anchor: str = "middle", fill: str = INK, turn: int = 0) -> str:
    """Return a line of text. anchor: which of start, middle and end is at x. turn: rotation in degrees."""
    rotation = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"{rotation}>{escape(content)}</text>'


def text_width(content: str, size: int) -> float:
    """Return the pixels that a line of text takes at most, in the wider sans-serif fonts."""
    return 0.62 * size * len(content)


def with_article(gpu: str) -> str:
    """Return the name of a GPU behind its indefinite article."""
    return f"{'an' if gpu.startswith('H') else 'a'} {gpu}"


def line(x1: float, y1: float, x2: float, y2: float, stroke: str, width: float) -> str:
    """Return a straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" stroke-width="{width}"/>'


def path(points: Sequence[tuple[float, float]], stroke: str, *, dashed: bool = False) -> str:
    """Return a polyline through some points."""
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<polyline points="{corners}" fill="none" stroke="{stroke}" stroke-width="2"{dashes}/>'


def mark(x: float, y: float, fill: str, stroke: str) -> str:
    """Return a circle that marks a point."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{fill}" stroke="{stroke}" stroke-width="1.5"/>'


def log_fraction(value: float, bounds: tuple[float, float]) -> float:
    """Return the position of a value between two bounds on a logarithmic axis, clamped to 0..1."""
    low, high = bounds
    inside = min(max(value, low), high)
    return math.log(inside / low) / math.log(high / low)


def picture(width: int, height: int, body: Sequence[str]) -> str:
    """Return a whole SVG file with a white background."""
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#fff"/>', *body, "</svg>", ""])

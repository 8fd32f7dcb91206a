"""Three steady tiles of a kernel as SVG: a row for each warp role and unit, on an axis of predicted clocks.

python -m cute_mla.profiles.plots.tiles_plot [KERNEL...]      draws the pictures of the kernels' READMEs (default: all of PICTURES)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cute_mla.aot_build.source_lines import SourceLines
from cute_mla.runtime.artifacts import load_artifacts

from ..clock.constants import constants
from ..clock.golden_clocks import GPU_OF
from ..clock.kernel_times import LONG, SHORT, clock_kernel
from ..clock.recorded import Recorded, merged, record
from ..clock.spans import ISSUE, PORT, TENSOR_CORE, TMA, Span
from ..clock.stall_report import default_setting
from .svg import FAINT, GRID, INK, line, picture, text, with_article

PICTURES = {  # in docs/images
    "dense_decode_sm90_bf16_cluster2": "dense-decode-sm90-clock.svg",
    "dense_decode_sm100_bf16_cluster2": "dense-decode-sm100-clock.svg",
    "sparse_decode_sm90_bf16_fp8_656_cluster2": "sparse-decode-sm90-clock.svg",
    "sparse_decode_sm100_bf16_fp8_656_cluster2": "sparse-decode-sm100-clock.svg",
    "sparse_prefill_sm90_bf16_d576_cluster2": "sparse-prefill-sm90-clock.svg",
    "sparse_prefill_sm100_bf16_d576_cluster2": "sparse-prefill-sm100-clock.svg",
    "sparse_prefill_sm100_bf16_d576_cluster1": "sparse-prefill-heads64-sm100-clock.svg",
    "dense_prefill_sm90_bf16_d192": "dense-prefill-sm90-clock.svg",
    "dense_prefill_sm100_bf16_d192": "dense-prefill-sm100-clock.svg",
    "dense_prefill_dq_sm90_bf16_d192": "dense-prefill-dq-sm90-clock.svg",
    "dense_prefill_dkdv_sm90_bf16_d192": "dense-prefill-dkdv-sm90-clock.svg",
}
FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images"

WIDTH, LEFT, RIGHT = 932, 152, 24  # LEFT holds the longest name of a row, RIGHT half of the last number of the axis
TOP, ROW, BAR = 44, 30, 20
TILES = 3
SHORT_WAIT = 24  # clocks: shorter waits are drawn as work
WORK = "#8fb3d9"
PALETTE = ("#d95f4b", "#3f7f93", "#e0a23b", "#7a63a8", "#5b9a5b", "#9c6644")
OTHER_UNITS = {PORT: "#9aa5b1", TMA: "#b9a3d0"}
_HATCH = (
    '<pattern id="wait" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#f4f4f4"/><line x1="0" y1="0" x2="0" y2="6" stroke="#c9c9c9" stroke-width="2"/></pattern>'
)
WAIT = "url(#wait)"


@dataclass(frozen=True)
class Bar:
    """A bar of a row, in clocks. label: shown where it has room. opacity: below 1 for bars that overlap."""

    start: float
    end: float
    fill: str
    label: str = ""
    opacity: float = 1.0


@dataclass(frozen=True)
class Row:
    """A row of the picture."""

    name: str
    bars: tuple[Bar, ...]


def tiles_svg(run: Recorded, block: float) -> str:
    """Draw three tiles of `block` clocks in the middle of a run, of its first CTA."""
    start = steady_start(run)
    end = start + TILES * block
    kinds = product_kinds(run, start, end)
    colors = {kind: PALETTE[index % len(PALETTE)] for index, kind in enumerate(kinds)}
    rows = [row for row in rows_of(run, colors) if any(bar.end > start and bar.start < end for bar in row.bars)]
    bottom = TOP + ROW * len(rows)
    scale = (WIDTH - LEFT - RIGHT) / (end - start)
    body = [f"<defs>{_HATCH}</defs>", text(LEFT, 18, run.title, size=13, anchor="start")]
    note = f"predicted by the clock for {with_article(run.gpu)}, not measured: {block:,.0f} clocks a tile; CTA 0, first warp of each role"
    body.append(text(LEFT, 34, note, size=11, anchor="start", fill=FAINT))
    body += _axis(start, end, block, scale, bottom)
    for number, row in enumerate(rows):
        top = TOP + ROW * number + (ROW - BAR) / 2
        body.append(text(LEFT - 8, top + BAR / 2 + 4, row.name, size=12, anchor="end"))
        body += [_bar(bar, start, end, scale, top) for bar in row.bars if bar.end > start and bar.start < end]
    body += _legend(colors, bottom + 40)
    lines = -(-(2 + len(colors)) // 3)
    return picture(WIDTH, bottom + 40 + 18 * lines, body)


def steady_start(run: Recorded) -> int:
    """Return the start of a tile in the middle of a run: of a product that recurs, among those that recur most the first."""
    starts: dict[int, list[int]] = {}
    for span in run.of(0, TENSOR_CORE):
        starts.setdefault(span.address, []).append(span.start)
    if not starts:
        raise ValueError(f"{run.kernel} has no products on a tensor core")
    most = max(len(found) for found in starts.values())
    found = min((found for found in starts.values() if len(found) == most), key=lambda found: found[0])
    return found[(len(found) - 1) // 2]


def product_kinds(run: Recorded, start: float, end: float) -> list[str]:
    """Return the kinds of products between two clocks, by name."""
    return sorted({kind_of(run, span) for span in run.of(0, TENSOR_CORE) if span.end > start and span.start < end})


def kind_of(run: Recorded, span: Span) -> str:
    """Return the shape of a product and the role of the warps that issue it."""
    shape, _, warps = span.name.partition(" of warps ")
    first = int(warps.split()[0]) if warps else -1
    role = next((name for name, every in run.roles() if first in every), "")
    return f"{role}: {shape}" if role else shape


def rows_of(run: Recorded, colors: dict[str, str]) -> Iterator[Row]:
    """Yield the rows of roles and units."""
    for role, warps in run.roles():
        yield Row(role, tuple(_of_warp(run.of(0, str(warps[0])))))
    products = run.of(0, TENSOR_CORE)
    yield Row(TENSOR_CORE, tuple(_joined([(span.start, span.end, colors.get(kind_of(run, span), GRID)) for span in products], 0)))
    for unit, color in OTHER_UNITS.items():
        spans = run.of(0, unit)
        if unit == TMA:
            yield Row(unit, tuple(Bar(span.start, span.end, color, opacity=0.35) for span in spans))
        else:
            yield Row(unit, tuple(_joined([(span.start, span.end, color) for span in spans], 4)))


def _of_warp(spans: list[Span]) -> Iterator[Bar]:
    """Yield work and waits of a warp; waits that are short belong to the work around them."""
    pieces = []
    for span, _ in merged(spans):
        waits = span.name != ISSUE and span.end - span.start >= SHORT_WAIT
        pieces.append((span.start, span.end, WAIT if waits else WORK))
    yield from _joined(pieces, SHORT_WAIT)


def _joined(pieces: Sequence[tuple[int, int, str]], gap: int) -> Iterator[Bar]:
    """Yield bars of one colour for neighbours with at most so many clocks between them."""
    current: Bar | None = None
    for start, end, fill in pieces:
        if current is not None and fill == current.fill and start - current.end <= gap:
            current = Bar(current.start, max(current.end, end), fill)
            continue
        if current is not None:
            yield current
        current = Bar(start, end, fill)
    if current is not None:
        yield current


def _axis(start: float, end: float, block: float, scale: float, bottom: float) -> list[str]:
    """Return grid lines every 500 clocks, with numbers, and darker ones between tiles."""
    marks = []
    clocks = 0
    while clocks <= end - start:
        x = LEFT + clocks * scale
        marks += [line(x, TOP, x, bottom, GRID, 1), text(x, bottom + 14, f"{clocks:,}", size=11, fill=FAINT)]
        clocks += 500 if end - start <= 12000 else 2000
    marks += [line(LEFT + tile * block * scale, TOP, LEFT + tile * block * scale, bottom, INK, 1) for tile in range(TILES + 1)]
    return [*marks, text(LEFT - 8, bottom + 14, "clocks", size=11, anchor="end", fill=FAINT)]


def _bar(bar: Bar, start: float, end: float, scale: float, top: float) -> str:
    left, right = max(bar.start, start), min(bar.end, end)
    x, width = LEFT + (left - start) * scale, max((right - left) * scale, 0.4)
    opacity = f' fill-opacity="{bar.opacity}"' if bar.opacity < 1 else ""
    return f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{BAR}" fill="{bar.fill}"{opacity}/>'


def _legend(colors: dict[str, str], top: float) -> list[str]:
    """Return the legend, three entries a line."""
    entries = [("issues instructions", WORK), ("waits", WAIT), *colors.items()]
    found = []
    for number, (name, fill) in enumerate(entries):
        x, y = LEFT + number % 3 * (WIDTH - LEFT - RIGHT) / 3, top + 18 * (number // 3)
        found += [
            f'<rect x="{x:.1f}" y="{y - 10:.1f}" width="12" height="12" fill="{fill}"/>',
            text(x + 18, y, name, size=11, anchor="start"),
        ]
    return found


def draw(kernel: str) -> str:
    """Run a built kernel on the clock, over SHORT and over LONG blocks, and draw it. KeyError for a kernel that is not built."""
    entry = load_artifacts().manifest.kernels[kernel]
    values = constants(GPU_OF[entry.arch])
    setting = default_setting(entry, values)
    run = record(entry, values, setting, LONG, kernel, SourceLines())
    return tiles_svg(run, (run.end - clock_kernel(entry, values, setting, SHORT).result().end) / (LONG - SHORT))


def main(arguments: Sequence[str]) -> None:
    """Write the pictures of some kernels."""
    for kernel in arguments or PICTURES:
        (FOLDER / PICTURES[kernel]).write_text(draw(kernel), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

"""A recorded run made by hand: two CTAs, two roles, products, copies that overlap, and an mbarrier."""

from __future__ import annotations

from cute_mla.aot_build.source_lines import SourceLines
from cute_mla.profiles.clock.recorded import Recorded
from cute_mla.profiles.clock.spans import ISSUE, PORT, TENSOR_CORE, TMA, Span, mbarrier_track
from cute_mla.simulator import Names
from cute_mla.simulator.frontend.layout import SHARED_BASE

NAMES = Names(barriers=(("kv_ready", 16, 2),), roles=(("load", 0, 4), ("score", 4, 4)))
CODE = {0: "UTMALDG.2D [UR4], [UR6]", 16: "HGMMA.64x64x16.F32 R24, gdesc[UR4], R24", 32: "FADD R1, R2, R3", 48: "FMUL R1, R1, R1"}
LINES = SourceLines(
    {0: 7, 16: 9, 32: 12, 48: 13},
    {0: ("kernels/load.py", 5), 16: ("kernels/score.py", 9), 32: ("kernels/score.py", 11), 48: ("kernels/score.py", 11)},
    ("no tables of one kind",),
)
TILE = 100


def spans_of_tile(rank: int, start: int) -> list[Span]:
    """Return what one tile does from a clock on."""
    return [
        Span(rank, "0", ISSUE, start, start + 2, 0),
        Span(rank, "0", "mbarrier", start + 2, start + 90, 0),
        Span(rank, "1", ISSUE, start, start + 2, 32),
        Span(rank, "4", ISSUE, start, start + 10, 16),
        Span(rank, "4", "products", start + 10, start + 60, 32),
        Span(rank, "4", ISSUE, start + 60, start + 64, 32),
        Span(rank, "4", ISSUE, start + 64, start + 68, 48),
        Span(rank, TENSOR_CORE, "m64n64k16 SS of warps 4 to 7", start + 4, start + 36, 16),
        Span(rank, PORT, "STS", start + 70, start + 72, 48),
        Span(rank, TMA, "load 1024 bytes", start + 2, start + 80, 0),
        Span(rank, TMA, "load 1024 bytes", start + 40, start + 130, 0),
        Span(rank, mbarrier_track(SHARED_BASE + 24), f"phase {start // TILE}", max(start - 20, 0), start + 80, -1),
    ]


def recorded(title: str = "D1.fixed", tiles: int = 8) -> Recorded:
    """Return a run of some equal tiles."""
    spans = [span for rank in range(2) for tile in range(tiles) for span in spans_of_tile(rank, tile * TILE)]
    return Recorded(title, "H200", "k", 2, 8, NAMES, tiles * TILE, tuple(spans), CODE, LINES)

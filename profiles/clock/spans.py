"""Spans of a run: what a warp, a unit or a barrier did from one clock to another, kept for timelines."""

from __future__ import annotations

from typing import NamedTuple

ISSUE = ""  # name of a span in which a warp issues an instruction; other spans of warps are waits, named by their cause
TENSOR_CORE, PORT, TMA = "tensor core", "shared-memory port", "TMA"
TENSOR_MEMORY = "tensor memory"  # with the number of a scheduler: the lanes of its warps
_MBARRIER = "mbarrier "


class Span(NamedTuple):
    """A span of clocks on a track of the CTA of this rank. address: of the instruction, -1 for none.

    track: a warp's number, a unit, or an mbarrier (see mbarrier_track). Spans of warps, tensor core, port and mbarriers do not overlap.
    """

    rank: int
    track: str
    name: str
    start: int
    end: int
    address: int


def mbarrier_track(offset: int) -> str:
    """Return the track of the mbarrier at an offset of shared memory."""
    return f"{_MBARRIER}{offset:#x}"


def mbarrier_offset(track: str) -> int | None:
    """Return the offset of the mbarrier of a track; None for another track."""
    return int(track.removeprefix(_MBARRIER), 16) if track.startswith(_MBARRIER) else None

"""Static checks of control codes together."""

from __future__ import annotations

from .latencies import check_latencies
from .listing import Listing
from .scoreboards import check_scoreboards


def hazards(listing: Listing) -> tuple[str, ...]:
    """Return a sentence for every register that the code touches too early, by scoreboards and by stall counts."""
    return (*map(str, check_scoreboards(listing)), *map(str, check_latencies(listing)))

"""Static checks of control codes together."""

from __future__ import annotations

from ..findings import Finding
from .latencies import EarlyUse, check_latencies
from .listing import Listing
from .scoreboards import Hazard, check_scoreboards


def hazards(listing: Listing) -> tuple[Hazard | EarlyUse, ...]:
    """Return every register that the code touches too early, by scoreboards and by stall counts. Printed, each is a sentence."""
    return (*check_scoreboards(listing), *check_latencies(listing))


def findings(listing: Listing) -> tuple[Finding, ...]:
    """Return the hazards as findings of a launch."""
    return tuple(Finding("control_code", hazard.reason, None, hazard.ins.place) for hazard in hazards(listing))

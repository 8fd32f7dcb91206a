"""Garbage collection in processes that simulate."""

from __future__ import annotations

import gc

# New objects between two collections. Python's default of 700 costs the simulator 4 % of its time, and a run leaves few circles of
# references.
ALLOCATIONS = 20_000


def collect_seldom() -> None:
    """Take all objects so far out of the garbage collector's sight, and let it look at new ones seldom."""
    gc.freeze()
    gc.set_threshold(ALLOCATIONS)

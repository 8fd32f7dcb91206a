"""Sets of lanes of a CTA, cached: groups part and merge all the time, nearly always in the same ways."""

from __future__ import annotations

import numpy as np

from ..state.registers import WARP
from ..state.window import CtaSlot, Window


class LaneSet:
    """Lanes in ascending order.

    window: their view of the register file, None where they are no arithmetic progression. whole: complete warps, with a window.
    warpgroups: the warps are complete warpgroups.
    """

    def __init__(self, lanes: np.ndarray, sets: LaneSets) -> None:
        self.lanes = lanes
        self.sets = sets
        self.count = len(lanes)
        self.window: Window | None = sets.slot.window(lanes)
        warps = self.window.warps if self.window is not None else tuple(int(warp) for warp in np.unique(lanes // WARP))
        self.warps: tuple[int, ...] = warps
        self.warp_set = frozenset(warps)
        self.whole = self.window is not None and self.window.whole
        self.warpgroups = whole_warpgroups(warps)

    def part(self, mask: np.ndarray) -> tuple[LaneSet, LaneSet]:
        """Return the lanes where mask is true, and the others (neither is empty)."""
        return self.sets.part(self, mask)

    def union(self, other: LaneSet) -> LaneSet:
        """Return the lanes of this set and of a disjoint one."""
        return self.sets.union(self, other)


def whole_warpgroups(warps: tuple[int, ...]) -> bool:
    """Return True when warps are complete warpgroups."""
    return len(warps) % 4 == 0 and all(warps[start] % 4 == 0 and warps[start + 3] == warps[start] + 3 for start in range(0, len(warps), 4))


class LaneSets:
    """All lane sets of a CTA slot."""

    def __init__(self, slot: CtaSlot) -> None:
        self.slot = slot
        self._sets: dict[bytes, LaneSet] = {}
        self._parts: dict[tuple[int, bytes], tuple[LaneSet, LaneSet]] = {}
        self._unions: dict[tuple[int, int], LaneSet] = {}

    def clear(self) -> None:
        """Forget all sets."""
        for sets in (self._sets, self._parts, self._unions):
            sets.clear()  # type: ignore[attr-defined]

    def get(self, lanes: np.ndarray) -> LaneSet:
        """Return the set of these lanes."""
        key = lanes.tobytes()
        found = self._sets.get(key)
        if found is None:
            found = self._sets[key] = LaneSet(lanes, self)
        return found

    def part(self, whole: LaneSet, mask: np.ndarray) -> tuple[LaneSet, LaneSet]:
        """Return the lanes of a set where mask is true, and the others (neither is empty)."""
        key = (id(whole), mask.tobytes())
        found = self._parts.get(key)
        if found is None:
            found = self._parts[key] = self.get(whole.lanes[mask]), self.get(whole.lanes[~mask])
        return found

    def union(self, first: LaneSet, second: LaneSet) -> LaneSet:
        """Return the lanes of two disjoint sets."""
        key = (id(first), id(second))
        found = self._unions.get(key)
        if found is None:
            found = self._unions[key] = self.get(np.sort(np.concatenate([first.lanes, second.lanes])))
        return found

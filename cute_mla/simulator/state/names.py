"""Names of barriers and roles, given with a launch, that make findings readable."""

from __future__ import annotations

from dataclasses import dataclass

from ..frontend.layout import SHARED_BASE


@dataclass(frozen=True)
class Names:
    """Names for findings.

    barriers: (name, byte offset in dynamic shared memory, count of 8-byte mbarriers). named_barriers: (name, bar id).
    roles: (name, first warp, warps).
    """

    barriers: tuple[tuple[str, int, int], ...] = ()
    named_barriers: tuple[tuple[str, int], ...] = ()
    roles: tuple[tuple[str, int, int], ...] = ()

    def mbarrier(self, offset: int, rank: int = 0, cluster_size: int = 1) -> str:
        """Return the name of the mbarrier at a window offset (dynamic shared memory starts at SHARED_BASE)."""
        suffix = f"@cta{rank}" if cluster_size > 1 else ""
        for name, start, count in self.barriers:
            index, rest = divmod(offset - SHARED_BASE - start, 8)
            if rest == 0 and 0 <= index < count:
                return f"{name}[{index}]{suffix}" if count > 1 else f"{name}{suffix}"
        return f"smem+{offset - SHARED_BASE:#x}{suffix}"

    def named_barrier(self, barrier_id: int) -> str:
        """Return the name of a bar.sync barrier."""
        for name, known in self.named_barriers:
            if known == barrier_id:
                return name
        return f"bar {barrier_id}"

    def role(self, warp: int) -> str | None:
        """Return the role of a warp, None where no role was given."""
        for name, first, warps in self.roles:
            if first <= warp < first + warps:
                return name
        return None

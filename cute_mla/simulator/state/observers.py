"""What a check can listen to. The machine calls these only when an observer is attached."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..numerics.tma import Box
    from .barriers import ClusterBarrier, Mbarrier, NamedBarrier
    from .cta import Cta
    from .registers import Window


class Observer:
    """Base of all checks: override what is needed. An observer must not change the machine."""

    def shared_access(self, w: Window, target: Cta, index: np.ndarray | None, offsets: np.ndarray, nbytes: int, write: bool) -> None:
        """Lanes (index: positions in the window, None for all) access nbytes each at offsets of target's shared memory."""

    def global_access(self, w: Window, addresses: np.ndarray, nbytes: int, write: bool) -> None:
        """Lanes access nbytes each at global addresses."""

    def barrier(self, w: Window, barrier: Mbarrier | NamedBarrier | ClusterBarrier, action: str, number: int) -> None:
        """A barrier operation: init, arrive, wait (passed), sync, cluster_arrive, cluster_wait."""

    def fence(self, w: Window, opcode: str) -> None:
        """A fence."""

    def async_write(self, target: Cta, box: Box) -> None:
        """A TMA load takes effect in target's shared memory."""

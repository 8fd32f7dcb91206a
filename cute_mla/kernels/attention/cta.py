"""Begin and end of a CTA in the attention kernels: barriers and tensor maps, and tensor memory on Blackwell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import cutlass
from cutlass import Int32, cute

from ..primitives import tcgen05
from ..primitives.copies import prefetch_map
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import Barriers

TMEM_COLUMNS = 512  # all that an SM has

# the arrivals that complete a phase, or a function that computes them in the warp that initialises, and barriers
Arrivals = tuple[int | Callable[[], Int32], tuple[StageBarriers, ...]]


class TmemCell(Protocol):
    """Shared memory with a place for the address of tensor memory."""

    @property
    def tmem_cell(self) -> cute.Pointer:
        """Return the place, int32."""


def both_ways(name: str, stages: int) -> tuple[Barriers, Barriers]:
    """Return the barriers of a pipeline: producer -> consumer, and back."""
    return Barriers(f"{name}_ready", stages), Barriers(f"{name}_free", stages)


def set_arrivals(arrivals: tuple[Arrivals, ...]) -> None:
    """Set the arrivals of every barrier. One thread."""
    for count, barriers in arrivals:
        number = count() if callable(count) else count
        for barrier in barriers:
            barrier.initialise(number)


@cute.jit
def initialise(warp: Int32, own: int, arrivals: tuple[Arrivals, ...], maps: tuple[Any, ...]):
    """Initialise the barriers and prefetch the tensor maps, in one warp. own: its number."""
    if warp == own:
        with cute.arch.elect_one():
            set_arrivals(arrivals)
            cute.arch.mbarrier_init_fence()
            for tensor_map in maps:
                prefetch_map(tensor_map)


def sync_pair() -> None:
    """Synchronise all threads of both CTAs.

    Fences and barriers of their own order what they need of each other's memory, so the arrival need not order it: it would wait for
    every store to gmem.
    """
    cute.arch.sync_warp()
    cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()


@cute.jit
def allocate_tmem(
    smem: TmemCell, warp: Int32, own: int, paired: cutlass.Constexpr[bool] = False, clustered: cutlass.Constexpr[bool] = False
) -> Int32:
    """Allocate tensor memory in one warp, and wait for all, of both CTAs of a pair. Return its address.

    own: the warp's number. paired: whether two CTAs multiply together. clustered: whether they signal to each other, if not.
    """
    if warp == own:
        tcgen05.allocate(smem.tmem_cell, TMEM_COLUMNS, tcgen05.PAIR_GROUP if paired else tcgen05.OWN_GROUP)
    cute.arch.sync_threads()  # releases the address of tensor memory, which the relaxed arrival of sync_pair does not
    if cutlass.const_expr(paired or clustered):
        sync_pair()
    return smem.tmem_cell.load()


@cute.jit
def free_tmem(
    tmem: Int32, warp: Int32, own: int, paired: cutlass.Constexpr[bool] = False, clustered: cutlass.Constexpr[bool] = False
):  # fmt: skip
    """Free tensor memory in the warp that has allocated it, when all are done with it. Arguments: as of allocate_tmem.

    Nobody leaves before the peer has done its last arrival here, and the tensor cores have read this CTA's memory.
    """
    tcgen05.fence_before_signal()
    if cutlass.const_expr(paired or clustered):
        sync_pair()
    else:
        cute.arch.sync_threads()
    if warp == own:
        tcgen05.fence_after_wait()
        tcgen05.free(tmem, TMEM_COLUMNS, tcgen05.PAIR_GROUP if paired else tcgen05.OWN_GROUP)

"""Begin and end of a CTA in the prefill kernels: barriers and tensor maps, and tensor memory on Blackwell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

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


@cute.jit
def allocate_tmem(smem: TmemCell, warp: Int32, own: int) -> Int32:
    """Allocate tensor memory in one warp, and wait for all. Return its address. own: the warp's number."""
    if warp == own:
        tcgen05.allocate(smem.tmem_cell, TMEM_COLUMNS, tcgen05.OWN_GROUP)
    cute.arch.sync_threads()
    return smem.tmem_cell.load()


@cute.jit
def free_tmem(tmem: Int32, warp: Int32, own: int):
    """Free tensor memory in the warp that has allocated it, when all are done with it."""
    tcgen05.fence_before_signal()
    cute.arch.sync_threads()
    if warp == own:
        tcgen05.fence_after_wait()
        tcgen05.free(tmem, TMEM_COLUMNS, tcgen05.OWN_GROUP)

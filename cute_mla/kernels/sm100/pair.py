"""Begin and end of a pair of CTAs: barriers, tensor memory, and who may leave."""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from ..primitives import tcgen05
from .config import EVEN_CTA, GROUP_WARPS, PAIR, TMEM_COLUMNS, Geometry, Pipes, Tiles


def initialise(pipes: Pipes, geometry: Geometry, kv_arrivals: int, mma_releases: bool = False) -> None:
    """Set the arrivals of every barrier: warps of the arriving role, of both CTAs where the mma role waits.

    kv_arrivals: that fill a stage. mma_releases: whether the mma role, which reads the bits of a tile, also releases its stage in its
    own CTA. Its commits, which arrive in both, order nothing but products.
    """
    pipes.kv_ready.initialise(kv_arrivals)
    pipes.kv_free.initialise(cutlass.select_(cute.arch.block_idx_in_cluster() == EVEN_CTA, Int32(2), Int32(1)) if mma_releases else 1)
    pipes.query_ready.initialise(PAIR * GROUP_WARPS)
    pipes.scores_ready.initialise(1)
    pipes.scores_free.initialise(PAIR * GROUP_WARPS)
    pipes.alpha_ready.initialise(GROUP_WARPS // 2)
    pipes.probs_ready.initialise(PAIR * GROUP_WARPS)
    pipes.output_ready.initialise(PAIR * GROUP_WARPS)
    pipes.stats_ready.initialise(geometry.score_groups * GROUP_WARPS)
    pipes.stats_free.initialise(GROUP_WARPS)
    cute.arch.mbarrier_init_fence()


def sync_pair() -> None:
    """Synchronise all threads of both CTAs.

    Fences and barriers of their own order what they need of each other's memory, so the arrival need not order it: it would wait for
    every store to gmem.
    """
    cute.arch.sync_warp()
    cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()


@cute.jit
def begin(tiles: Tiles, warp: Int32, mma_warp: Int32) -> Int32:
    """Allocate tensor memory, in the mma warp, and wait for both CTAs. Return its address. One warp has initialised the barriers."""
    if warp == mma_warp:
        tcgen05.allocate(tiles.tmem_cell, TMEM_COLUMNS)
    cute.arch.sync_threads()  # releases the address of tensor memory, which the relaxed arrival of sync_pair does not
    sync_pair()
    tmem = tiles.tmem_cell.load()
    # the plan, the lengths, Q and the cache may come from the kernel before
    cute.arch.griddepcontrol_wait()
    return tmem


@cute.jit
def end(warp: Int32, mma_warp: Int32, tmem: Int32):
    """Free tensor memory.

    Nobody leaves before the peer has done its last arrival here, and the tensor cores have read this CTA's memory.
    """
    tcgen05.fence_before_signal()
    sync_pair()
    if warp == mma_warp:
        tcgen05.fence_after_wait()
        tcgen05.free(tmem, TMEM_COLUMNS)

"""Arrivals at the barriers of the SM90 kernels over a latent, and the wait for the peer's last ones."""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from .config import Geometry, Pipes
from .warpgroups import OUTPUT_GROUPS, WARPS_PER_GROUP


def initialise(pipes: Pipes, geometry: Geometry, cluster: int) -> None:
    """Set the arrivals of every barrier: warps of the arriving role, times the CTAs that share a stage."""
    pipes.kv_ready.initialise(geometry.ready_arrivals)
    pipes.kv_free.initialise(WARPS_PER_GROUP * cluster)
    pipes.rope_ready.initialise(geometry.ready_arrivals)
    pipes.rope_free.initialise(OUTPUT_GROUPS * WARPS_PER_GROUP * cluster)
    pipes.probs_ready.initialise(WARPS_PER_GROUP)
    pipes.right_turn.initialise(WARPS_PER_GROUP)
    pipes.stats_ready.initialise(WARPS_PER_GROUP)
    pipes.stats_free.initialise(OUTPUT_GROUPS * WARPS_PER_GROUP)
    cute.arch.mbarrier_init_fence()


@cute.jit
def await_peer(pipes: Pipes, geometry: cutlass.Constexpr[Geometry], tiles_done: Int32):
    """Wait until every stage is free: the peer's last arrivals must not reach a CTA that is gone.

    No cluster barrier, which would make every warp wait for its stores. One warp is enough: the CTA stays as long as any.
    """
    kv = pipes.kv_free.state(tiles_done * geometry.tile_stages)
    for _ in cutlass.range(geometry.kv_stages, unroll=1):
        pipes.kv_free.producer_acquire(kv)
        kv = pipes.kv_free.advance(kv)
    if cutlass.const_expr(geometry.frees_rope):
        rope = pipes.rope_free.state(tiles_done)
        for _ in cutlass.range(geometry.rope_stages, unroll=1):
            pipes.rope_free.producer_acquire(rope)
            rope = pipes.rope_free.advance(rope)

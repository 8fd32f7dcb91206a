"""Stores and copies to the shared memory of another CTA of the cluster, whose mbarrier counts their bytes."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint8, cute
from cutlass.experimental import primitives


def peer_shift(anchor: cute.Pointer, peer: Int32 | None = None) -> Int32:
    """Return the distance from a shared memory address of this CTA to the same one in the peer's. None: of a cluster of two."""
    if peer is None:
        peer = 1 - cute.arch.block_idx_in_cluster()
    here = anchor.toint()
    there = cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[Int32(here), Int32(peer)]
    )
    return there - here


def copy_to_peer(target: Int32, source: Int32, ready: Int32, nbytes: int) -> None:
    """Start a bulk copy to the peer's shared memory; its bytes count on the peer's barrier. target, ready: addresses there. One thread."""
    copy = cute.make_ptr(Uint8, target, cute.AddressSpace.dsmem, assumed_align=16).raw_ptr()
    primitives.cp_async_bulk_shared_cluster_shared_cta(copy, _shared(source), _shared(ready), nbytes)


def send_to_peer(target: Int32, values: list[Float32], ready: Int32) -> None:
    """Store one or four fp32 numbers of each lane to the peer's shared memory. target, ready: as in copy_to_peer."""
    vector, registers = ("", "{$r2}") if len(values) == 1 else (".v4", "{{$r2}, {$r3}, {$r4}, {$r5}}")
    store = f"st.async.shared::cluster.mbarrier::complete_tx::bytes{vector}.f32 [{{$r0}}], {registers}, [{{$r1}}];"
    cute.arch.inline_ptx(store, read_only_args=[target, ready, *values])


@cute.jit
def arrive_expecting(barrier: cute.Pointer, nbytes: cutlass.Constexpr[int]):
    """Arrive once per warp, after all its lanes, and expect bytes of the peer's warp."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, nbytes)


def _shared(address: Int32) -> Any:
    return cute.make_ptr(Uint8, address, cute.AddressSpace.smem, assumed_align=8).raw_ptr()

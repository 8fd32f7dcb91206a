"""Split of a gathered tile's keys on SM90: among the four warps that gather, and between the two CTAs of a pair.

A tile has two halves. Of each a warp has eight neighbouring keys, which are neighbours in a box of shared memory, too. Of a
pair of CTAs each brings the stages' columns of one half, and copies them to the peer. The RoPE columns both
bring: P soon overwrites them, while the peer's copy may not have been read yet.
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Uint8, cute
from cutlass.experimental import primitives

from ...spec.mla import ELEMENT_BYTES
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import BOX_COLUMNS
from .config import BOX_BYTES
from .warpgroups import WARPS_PER_GROUP

CHUNK = 16  # bytes that a thread loads or stores at a time
ROW_BYTES = BOX_COLUMNS * ELEMENT_BYTES  # of a key in a box
HALVES = 2
HALF_KEYS = TILE_KEYS // HALVES
HALF_BYTES = HALF_KEYS * ROW_BYTES  # from a key's row in a box to that of the key in the other half
KEYS_PER_WARP = HALF_KEYS // WARPS_PER_GROUP

Half = Any  # of a tile: 0 or 1, an int or an Int32


def halves_of_cta(cluster: int) -> tuple[Half, Half]:
    """Return the halves of a tile; the first is the one whose columns this CTA brings if another CTA brings the other's."""
    if cluster == 1:
        return 0, 1
    rank = cute.arch.block_idx_in_cluster()
    return rank, 1 - rank


def peer_shift(anchor: cute.Pointer) -> Int32:
    """Return the distance from a shared memory address of this CTA to the same one in the peer's."""
    peer = 1 - cute.arch.block_idx_in_cluster()
    here = anchor.toint()
    there = cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[Int32(here), Int32(peer)]
    )
    return there - here


def hand_over(ready: cute.Pointer, target: Int32, boxes: int, shift: Int32) -> None:
    """Commit half a stage, which all who store to it have fenced, and copy it to the peer.

    target: shared memory address of the half. One warp. A barrier expects one arrival, and the bytes of the peer's half. They may come
    first: that stage has been free there too, since kv_free counts the consumers of both.
    """
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(ready, boxes * HALF_BYTES)
        there = _shared(Int32(ready.toint()) + shift)
        for box in range(boxes):
            source = target + box * BOX_BYTES
            copy = cute.make_ptr(Uint8, source + shift, cute.AddressSpace.dsmem, assumed_align=CHUNK).raw_ptr()
            primitives.cp_async_bulk_shared_cluster_shared_cta(copy, _shared(source), there, HALF_BYTES)


def _shared(address: Int32) -> Any:
    return cute.make_ptr(Uint8, address, cute.AddressSpace.smem, assumed_align=8).raw_ptr()

"""The roles of the dK and dV kernels that load: work items with their keys, and query rows. The first looks the items up for all others."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Protocol

import cutlass
from cutlass import Boolean, Int32, cute

from ..dense_prefill.sm90_load import load_boxes
from ..primitives.pipeline import StageBarriers
from .operands import DkdvGeometry, DkdvItem, DkdvOperands, DkdvSmem

DV_SUM = 2  # `sums` of an item that is dV alone
ITEMS_AHEAD = 2  # a role may be at the rows of an item while the next is posted


@dataclass(frozen=True)
class DkdvPostedItem:
    """A work item as the role that looks it up hands it on through shared memory.

    sums, keys, kv_head, first_key: as in DkdvItem, but sums is 0 after the last item. tiles: of the rows of one head. hidden: rows of
    the first tile, from its first on, that key 0 of the item is hidden from.
    """

    sums: Int32
    keys: Int32
    kv_head: Int32
    first_key: Int32
    tiles: Int32
    hidden: Int32

    def post(self, items: cute.Pointer, turn: Int32) -> None:
        """Write the item of a turn. One thread."""
        for number, field in enumerate(fields(DkdvPostedItem)):
            (_posted(items, turn) + number).store(getattr(self, field.name))

    @staticmethod
    def of_turn(items: cute.Pointer, turn: Int32) -> DkdvPostedItem:
        """Read the item of a turn."""
        return DkdvPostedItem(*((_posted(items, turn) + number).load() for number in range(len(fields(DkdvPostedItem)))))


def _posted(items: cute.Pointer, turn: Int32) -> cute.Pointer:
    return items + turn % ITEMS_AHEAD * ITEM_WORDS


ITEM_WORDS = len(fields(DkdvPostedItem))


@dataclass(frozen=True)
class DkdvKeyRole:
    """One warp: the work items for the roles that compute, and TMA of their K and V."""

    geometry: DkdvGeometry

    @cute.jit
    def run(self, operands: DkdvOperands, smem: DkdvSmem):
        """Wait key_free. Signal key_ready. Keys past the sequence's end reach rows of dK and dV that are not written."""
        posted = Int32(0)
        for turn in cutlass.range(operands.items.rounds(), unroll=1):
            item = operands.items.take(turn)
            if item.keys > 0:
                count, ready = self.geometry.tiles(item), smem.key_ready.barrier(posted)
                smem.key_free.producer_acquire(posted)
                with cute.arch.elect_one():
                    hidden = item.diagonal - item.first_query
                    DkdvPostedItem(item.sums, item.keys, item.kv_head, item.first_key, count, hidden).post(smem.items, posted)
                    if count > 0:
                        cute.arch.mbarrier_arrive_and_expect_tx(ready, self.geometry.item_bytes)
                        for part in cutlass.range_constexpr(cute.size(smem.sK, mode=[2])):
                            where = (item.kv_head, item.first_key + part * cute.size(smem.sK, mode=[0]))
                            load_boxes(smem.sK, part, operands.args.k_map, where, ready)
                            load_boxes(smem.sV, part, operands.args.v_map, where, ready)
                    else:
                        cute.arch.mbarrier_arrive(ready)
                posted = posted + 1
        smem.key_free.producer_acquire(posted)
        with cute.arch.elect_one():
            DkdvPostedItem(*[Int32(0)] * ITEM_WORDS).post(smem.items, posted)
            cute.arch.mbarrier_arrive(smem.key_ready.barrier(posted))
        # the next kernel waits for the end of this one before it reads or writes anything
        cute.arch.griddepcontrol_launch_dependents()


class DkdvRowTiles(Protocol):
    """Tiles of query rows of Q or dO in shared memory, and the copies to them."""

    @property
    def landed(self) -> StageBarriers:
        """Return the barrier of a tile whose rows past the last one are cleared before it is ready."""

    def start(self, use: tuple[Int32, Int32], item: DkdvItem, where: tuple[Int32, Int32], landed: cute.Pointer) -> tuple[Boolean, Any]:
        """Start the copies of a tile when it is free. They signal `landed` unless the sequence has all of its rows.

        use: tiles before those of the head, and of the head. where: head, of those that share the item's KV head, and first row of the
        sequence. Return (whether it has all, the tile's place for `clear`).
        """

    def clear(self, place: Any, rows: Int32) -> None:
        """Clear the rows of a tile from number `rows` on, and signal that it is ready."""


@dataclass(frozen=True)
class DkdvRowRole:
    """One warp: TMA of tiles of query rows, of one head of the group after the other, and zeroes in the rows past the sequence's end.

    P and dS are 0 there, but 0 times a NaN of an unused row is NaN.
    """

    geometry: DkdvGeometry
    rows: DkdvRowTiles

    @cute.jit
    def run(self, operands: DkdvOperands):
        """Wait the free barriers of the rows. Signal the ready ones."""
        use, cleared, size = Int32(0), Int32(0), self.geometry.tile_queries
        for turn in cutlass.range(operands.items.rounds(), unroll=1):
            item = operands.items.take(turn)
            count = self.geometry.tiles(item)
            for head in cutlass.range(operands.args.heads_per_kv, unroll=1):
                for i in cutlass.range(count, unroll=1):
                    first = item.first_query + i * size
                    whole, place = self.rows.start((use, i), item, (head, first), self.rows.landed.barrier(cleared))
                    if not whole:
                        self.rows.landed.consumer_wait(cleared)
                        self.rows.clear(place, item.queries - first)
                        cleared = cleared + 1
                use = use + count

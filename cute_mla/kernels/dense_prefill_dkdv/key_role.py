"""The role of the dK and dV kernels that looks the work items up and loads their keys."""

from __future__ import annotations

from dataclasses import fields
from typing import Protocol

import cutlass
from cutlass import Int32, cute

from ..dense_prefill.sm90_load import load_boxes
from ..primitives.pipeline import StageBarriers
from .operands import KeyItem, Operands
from .posted_item import PostedItem


class Geometry(Protocol):
    """Numbers of an architecture's kernel."""

    @property
    def item_bytes(self) -> int:
        """Return the bytes of an item's K and V."""

    def tiles(self, item: KeyItem) -> Int32:
        """Return the tiles of the query rows of one head that see the item."""


class Tiles(Protocol):
    """Shared memory."""

    @property
    def sK(self) -> cute.Tensor:
        """Return K: keys x columns x parts of the item."""

    @property
    def sV(self) -> cute.Tensor:
        """Return V."""

    @property
    def items(self) -> cute.Pointer:
        """Return the posted items."""


class Pipes(Protocol):
    """Barriers. The kernels say who arrives where."""

    @property
    def key_ready(self) -> StageBarriers:
        """Return the barrier of an item that has come."""

    @property
    def key_free(self) -> StageBarriers:
        """Return the barrier back."""


class KeyRole:
    """One warp: the work items for the roles that compute, and TMA of their K and V."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    @cute.jit
    def run(self, operands: Operands, tiles: Tiles, pipes: Pipes):
        """Wait key_free. Signal key_ready. What lies behind the last key reaches rows of dK and dV that are not written."""
        posted = Int32(0)
        for turn in cutlass.range(operands.items.rounds(), unroll=1):
            item = operands.items.take(turn)
            if item.keys > 0:
                count, ready = self.geometry.tiles(item), pipes.key_ready.barrier(posted)
                pipes.key_free.producer_acquire(posted)
                with cute.arch.elect_one():
                    hidden = item.diagonal - item.first_query
                    PostedItem(item.sums, item.keys, item.kv_head, item.first_key, count, hidden).post(tiles.items, posted)
                    if count > 0:
                        cute.arch.mbarrier_arrive_and_expect_tx(ready, self.geometry.item_bytes)
                        for part in cutlass.range_constexpr(cute.size(tiles.sK, mode=[2])):
                            where = (item.kv_head, item.first_key + part * cute.size(tiles.sK, mode=[0]))
                            load_boxes(tiles.sK, part, operands.args.k_map, where, ready)
                            load_boxes(tiles.sV, part, operands.args.v_map, where, ready)
                    else:
                        cute.arch.mbarrier_arrive(ready)
                posted = posted + 1
        pipes.key_free.producer_acquire(posted)
        with cute.arch.elect_one():
            PostedItem(*[Int32(0)] * len(fields(PostedItem))).post(tiles.items, posted)
            cute.arch.mbarrier_arrive(pipes.key_ready.barrier(posted))
        # the kernel behind this one waits for the end of it before it reads or writes anything
        cute.arch.griddepcontrol_launch_dependents()

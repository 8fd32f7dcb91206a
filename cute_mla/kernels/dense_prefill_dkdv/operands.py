"""The operands of the dK and dV kernels: what a work item is, and where its rows lie."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import cutlass
from cutlass import Int32, Uint32, cute

from ...spec.dense_prefill_dkdv import TILE_KEYS, TILE_QUERIES, DensePrefillDkdvArguments, DensePrefillDkdvConfig
from ...spec.mla import ELEMENT_BYTES
from ..dense_prefill.operands import ItemRounds, row_of, span
from ..primitives.arithmetic import clip, larger, smaller
from ..primitives.pipeline import StageBarriers


@dataclass(frozen=True)
class DkdvItem:
    """A block of keys of one KV head of one sequence.

    first_head: of q, of the heads that share the KV head. first_key: row of k and v. keys: of the sequence from there on, 0 or less
    if the sequence ends before. first_row: row of q that is the sequence's first. first_query, queries: the rows that any key of the
    block is seen by, and that have statistics, are first_query .. queries - 1 of the sequence. diagonal: key j of the block is seen by
    the rows j + diagonal and later ones, if causal; by all if not. sums: 1: dK, or both dK and dV; 2: dV.
    """

    kv_head: Int32
    first_head: Int32
    first_key: Int32
    keys: Int32
    first_row: Int32
    first_query: Int32
    queries: Int32
    diagonal: Int32
    sums: Int32


class DkdvKeyRange(Protocol):
    """Position of an item's rows of dk and dv."""

    @property
    def kv_head(self) -> Int32:
        """Return the KV head."""

    @property
    def first_key(self) -> Int32:
        """Return the item's first row of k and v."""


@dataclass(frozen=True)
class DkdvItems(ItemRounds):
    """The work items of a call: blocks of keys. sums: items of a block."""

    sums: int = 1

    def count(self) -> Int32:
        """Return the number of items, with the ones that a sequence does not have."""
        return self.args.batch * self.args.h_kv * self.sums * self.args.row_blocks

    def take(self, turn: Int32) -> DkdvItem:
        """Return this CTA's item of a round; one without keys if it has none."""
        index, count = self.of_round(turn), self.count()
        there = Uint32(index) < Uint32(count)
        item = self.read(cutlass.select_(there, index, count - 1))
        keys, queries = (cutlass.select_(there, number, Int32(0)) for number in (item.keys, item.queries))
        return replace(item, keys=keys, queries=queries)

    def read(self, index: Int32) -> DkdvItem:
        """Return an item, by the lengths as they are now. Whatever they are, its rows and keys lie within q, k and v."""
        of_head = Int32(Uint32(index) // Uint32(self.args.row_blocks))
        skipped = (index - of_head * self.args.row_blocks) * self.item_rows
        sums = Int32(1)
        if self.sums > 1:
            sums = 1 + of_head % self.sums
            of_head = Int32(Uint32(of_head) // self.sums)
        sequence = Int32(Uint32(of_head) // Uint32(self.args.h_kv))
        kv_head = of_head - sequence * self.args.h_kv
        first_row, queries = span(self.args.cu_seqlens_q, sequence, self.args.total_q)
        first_key, keys = span(self.args.cu_seqlens_k, sequence, self.args.total_k)
        diagonal = cutlass.select_(self.causal, skipped + queries - keys, Int32(-self.item_rows))
        served = smaller(queries, self.args.query_limit)
        return DkdvItem(
            kv_head=kv_head,
            first_head=kv_head * self.args.heads_per_kv,
            first_key=first_key + skipped,
            keys=keys - skipped,
            first_row=first_row,
            first_query=clip(diagonal, served),
            queries=cutlass.select_(keys > skipped, served, Int32(0)),
            diagonal=diagonal,
            sums=sums,
        )


@dataclass(frozen=True)
class DkdvOperands:
    """The arguments by meaning."""

    args: DensePrefillDkdvArguments
    items: DkdvItems

    def row(self, name: str, item: DkdvKeyRange, key: Int32) -> cute.Pointer:
        """Return element 0 of a row of dk or dv. name: "dk" or "dv". key: counted from the item's first."""
        return row_of(self.args, name, item.first_key + key, item.kv_head)


@dataclass(frozen=True)
class DkdvGeometry:
    """Numbers of a variant that follow from tiles and items of its architecture."""

    config: DensePrefillDkdvConfig

    arch: ClassVar[str]

    @property
    def item_keys(self) -> int:
        """Return the keys of a work item."""
        return TILE_KEYS[self.arch][self.config.d_qk]

    @property
    def item_bytes(self) -> int:
        """Return the bytes of an item's K and V."""
        return self.item_keys * (self.config.d_qk + self.config.d_v) * ELEMENT_BYTES

    @property
    def tile_queries(self) -> int:
        """Return the query rows of a tile."""
        return TILE_QUERIES[self.arch][self.config.d_qk]

    def tiles(self, item: DkdvItem) -> Int32:
        """Return the tiles of the query rows of one head that see the item."""
        rows = larger(item.queries - item.first_query, Int32(0))
        return (rows + (self.tile_queries - 1)) // self.tile_queries


@dataclass(frozen=True)
class DkdvSmem:
    """Shared memory that both architectures have. Tensors are rows x columns x stages, boxes or parts of an item."""

    sK: cute.Tensor
    sV: cute.Tensor
    sQ: cute.Tensor
    sD: cute.Tensor  # dO
    statistics: cute.Pointer  # fp32 [tiles, 2, tile queries]: lse in log2 units, delta
    items: cute.Pointer  # int32 [2, fields]: a DkdvPostedItem each, of turns by their parity
    query_ready: StageBarriers
    query_free: StageBarriers
    dout_ready: StageBarriers
    dout_free: StageBarriers
    query_landed: StageBarriers
    dout_landed: StageBarriers
    key_ready: StageBarriers
    key_free: StageBarriers

"""The operands of the dK and dV kernels: what a work item is, and where its rows lie."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from ...spec.dense_prefill_dkdv import DensePrefillDkdvArguments
from ..dense_prefill.operands import ItemRounds, row_offset, span
from ..primitives.integers import clip, smaller


@dataclass(frozen=True)
class KeyItem:
    """A block of keys of one KV head of one sequence.

    first_head: of q, of the heads that share the KV head. first_key: row of k and v. keys: of the sequence from there on, 0 or less
    if the sequence ends before. first_row: row of q that is the sequence's first. first_query, queries: the rows that any key of the
    block is seen by, and that have statistics, are first_query .. queries - 1 of the sequence. diagonal: key j of the block is seen by
    the rows j + diagonal and those behind it, if causal; by all if not. sums: 1: dK, or both dK and dV; 2: dV.
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


class KeyRows(Protocol):
    """Position of an item's rows of dk and dv."""

    @property
    def kv_head(self) -> Int32:
        """Return the KV head."""

    @property
    def first_key(self) -> Int32:
        """Return the item's first row of k and v."""


@dataclass(frozen=True)
class KeyItems(ItemRounds):
    """The work items of a call: blocks of keys. sums: items of a block."""

    sums: int = 1

    def count(self) -> Int32:
        """Return the number of items, with the ones that a sequence does not have."""
        return self.args.batch * self.args.h_kv * self.sums * self.args.row_blocks

    def take(self, turn: Int32) -> KeyItem:
        """Return this CTA's item of a round; one without keys if it has none."""
        index, count = self.of_round(turn), self.count()
        there = Uint32(index) < Uint32(count)
        item = self.read(cutlass.select_(there, index, count - 1))
        keys, queries = (cutlass.select_(there, number, Int32(0)) for number in (item.keys, item.queries))
        return replace(item, keys=keys, queries=queries)

    def read(self, index: Int32) -> KeyItem:
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
        return KeyItem(
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
class Operands:
    """The arguments by meaning. Strides in elements, of (token, head); keys are counted from the item's first."""

    args: DensePrefillDkdvArguments
    items: KeyItems

    @property
    def softmax_scale(self) -> Float32:
        """Return the factor of dK."""
        return self.args.softmax_scale

    @property
    def scale_log2(self) -> Float32:
        """Return the factor of the scores, log2 units."""
        return self.args.scale_log2

    @property
    def heads_per_kv(self) -> Int32:
        """Return the query heads that share a KV head."""
        return self.args.heads_per_kv

    def dk_row(self, item: KeyRows, key: Int32) -> cute.Pointer:
        """Return element 0 of a row of dk."""
        return self.args.dk + row_offset(self.args.dk_stride_token, self.args.dk_stride_head, item.first_key + key, item.kv_head)

    def dv_row(self, item: KeyRows, key: Int32) -> cute.Pointer:
        """Return element 0 of a row of dv."""
        return self.args.dv + row_offset(self.args.dv_stride_token, self.args.dv_stride_head, item.first_key + key, item.kv_head)

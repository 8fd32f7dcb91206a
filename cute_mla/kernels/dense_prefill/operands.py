"""The operands of the dense prefill kernels: what a work item is, and where its rows lie."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute

from ...spec.dense_prefill import RANKED_ROUNDS
from ..primitives.integers import clip, larger, smaller


class Rows(NamedTuple):
    """The rows of out that an item writes: the part of a WorkItem that outlives its products."""

    head: Int32
    first_row: Int32
    rows: Int32

    @staticmethod
    def of(item: WorkItem) -> Rows:
        """Return the rows of an item."""
        return Rows(item.head, item.first_row, item.rows)

    @staticmethod
    def none() -> Rows:
        """Return no rows."""
        return Rows(Int32(0), Int32(0), Int32(0))


@dataclass(frozen=True)
class TileWalk:
    """The first key tiles of a sequence, `count` of them, from the last to the first."""

    count: Int32

    def advance(self) -> None:
        """Go to the first tile, or on to the next one."""

    def tile(self, i: Int32) -> Int32:
        """Return the i-th tile, after as many advances and one more."""
        return self.count - 1 - i


@dataclass(frozen=True)
class WorkItem:
    """A block of query rows of one head of one sequence.

    head, kv_head: of q, and of k and v. first_row: row of q, counted over all sequences. rows: of the sequence from there on,
    0 or less if the sequence ends before. first_key: row of k and v. keys: that any row of the block sees. diagonal: a row i of
    the block sees the keys 0 .. diagonal + i of the sequence, if causal; all of them if not.
    """

    head: Int32
    kv_head: Int32
    first_row: Int32
    rows: Int32
    first_key: Int32
    keys: Int32
    diagonal: Int32

    @property
    def in_parts(self) -> bool:
        """Return whether items come in parts, each of which has some of the key tiles."""
        return False

    @property
    def complete(self) -> bool | Boolean:
        """Return whether the item ends with this walk."""
        return True

    @property
    def leading(self) -> int | Int32:
        """Return 1 if the walk begins with the item's first tile, else 0."""
        return 1

    def walk(self, count: Int32) -> TileWalk:
        """Return the key tiles. count: tiles of the item's keys."""
        return TileWalk(count)

    def tiles_of(self, rows: Int32, count: Int32) -> Int32:
        """Return how many of the tiles are multiplied with some rows of the block. rows: of the sequence. count: tiles that they see."""
        return count

    def has_queries(self) -> Boolean:
        """Return whether Q is needed, and has not been needed before."""
        return self.keys > 0

    def is_empty(self, count: Int32) -> Boolean:
        """Return whether the item has no tile at all. count: of the walk."""
        return count == 0

    def opens(self, i: Int32) -> Boolean:
        """Return whether the i-th tile of the walk is the item's first."""
        return i == 0

    def follows(self, i: Int32) -> Boolean:
        """Return whether another tile of the item comes in front of the i-th of the walk, if there is an i-th."""
        return i > 0

    def shows(self, tile: Int32) -> bool | Boolean:
        """Return whether the walk comes to the last tile of the item's keys, which is `tile`."""
        return True

    def accumulated(self, tiles: Int32) -> Boolean:
        """Return whether anything has been multiplied for rows of the block that the sequence has. tiles: what tiles_of gives for them."""
        return tiles > 0

    def number(self, i: Int32) -> Int32:
        """Return 0 for the item's first tile, else a positive number. i: of the tile in the walk."""
        return i

    def rounds(self, count: Int32) -> Int32:
        """Return the steps of a role that multiplies for the tile before in each: at least one where an item begins. count: of the walk."""
        return larger(count, Int32(1))

    def closes(self, i: Int32, count: Int32) -> Boolean:
        """Return whether the i-th of `count` tiles of the walk is the item's last."""
        return i == count - 1

    def closes_late(self) -> Boolean:
        """Return whether this part says that the one before it was the item's last with tiles."""
        return Boolean(False)

    def items_after(self, done: Int32) -> Int32:
        """Return the number of items with tiles, up to this one. done: of those before."""
        return done + 1


@dataclass(frozen=True)
class ItemRounds:
    """The work items of a call, dealt out to CTAs in rounds; spec/dense_prefill.py has their order.

    args: the arguments of a kernel, with `row_blocks`, the items of one head of one sequence. item_rows: rows of an item. ctas: that
    take an item together; they count as one.
    """

    args: Any
    causal: Boolean
    item_rows: int
    ctas: int = 1

    def count(self) -> Int32:
        """Return the number of items, with the ones that a sequence does not have."""
        raise NotImplementedError

    def of_round(self, turn: Int32) -> Int32:
        """Return this CTA's item of a round, count() if it has none: no CTA has one in a later round then."""
        cta, ctas, blocks = Uint32(cute.arch.block_idx()[0]), Uint32(cute.arch.grid_dim()[0]), Uint32(self.args.row_blocks)
        if self.ctas > 1:
            cta, ctas = cta // self.ctas, ctas // self.ctas
        first = Uint32(turn) // RANKED_ROUNDS * RANKED_ROUNDS * ctas
        size = smaller(Uint32(self.count()) - first, RANKED_ROUNDS * ctas)
        place = cutlass.select_((turn & 1) == 0, cta, ctas - 1 - cta)
        rank = Uint32(turn) % RANKED_ROUNDS * ctas + place
        index = smaller(first + ranked(rank, first % blocks, size, blocks), Uint32(self.count()))
        return cutlass.select_(rank < size, Int32(index), self.count())

    def rounds(self) -> Int32:
        """Return the rounds after which every item has been taken."""
        ctas = Uint32(cute.arch.grid_dim()[0])
        return Int32((Uint32(self.count()) + ctas - 1) // ctas)


@dataclass(frozen=True)
class WorkItems(ItemRounds):
    """The work items of a call: blocks of query rows."""

    def count(self) -> Int32:
        """Return the number of items, with the ones that a sequence does not have."""
        return self.args.batch * self.args.h_q * self.args.row_blocks

    def take(self, turn: Int32) -> WorkItem:
        """Return this CTA's item of a round; one without rows or keys if it has none."""
        index, count = self.of_round(turn), self.count()
        there = Uint32(index) < Uint32(count)
        item = self.read(cutlass.select_(there, index, count - 1))
        rows, keys = (cutlass.select_(there, number, Int32(0)) for number in (item.rows, item.keys))
        return replace(item, rows=rows, keys=keys)

    def read(self, index: Int32) -> WorkItem:
        """Return an item, by the lengths as they are now. Whatever they are, its rows and keys lie within q, k and v."""
        of_head = Int32(Uint32(index) // Uint32(self.args.row_blocks))
        block = self.args.row_blocks - 1 - (index - of_head * self.args.row_blocks)
        sequence = Int32(Uint32(of_head) // Uint32(self.args.h_q))
        head = of_head - sequence * self.args.h_q
        first_query, queries = span(self.args.cu_seqlens_q, sequence, self.args.total_q)
        first_key, keys = span(self.args.cu_seqlens_k, sequence, self.args.total_k)
        return self.at(head, block, (first_query, queries), (first_key, keys))

    def at(self, head: Int32, block: Int32, queries_of: tuple[Int32, Int32], keys_of: tuple[Int32, Int32]) -> WorkItem:
        """Return the item of a block of rows. queries_of, keys_of: first row and rows of its sequence."""
        (first_query, queries), (first_key, keys) = queries_of, keys_of
        skipped = block * self.item_rows
        rows = queries - skipped
        diagonal = skipped + keys - queries
        seen = clip(diagonal + smaller(rows, Int32(self.item_rows)), keys)
        return WorkItem(
            head=head,
            kv_head=Int32(Uint32(head) // Uint32(self.args.heads_per_kv)),
            first_row=first_query + skipped,
            rows=rows,
            first_key=first_key,
            keys=cutlass.select_(rows > 0, cutlass.select_(self.causal, seen, keys), Int32(0)),
            diagonal=cutlass.select_(self.causal, diagonal, keys),
        )


def ranked(rank: Uint32, phase: Uint32, size: Uint32, period: Uint32) -> Uint32:
    """Return the rank-th of the numbers 0 .. size - 1, sorted by (number + phase) % period and then by number. phase < period."""
    least = size // period  # numbers of each remainder; of some, one more
    end = phase + (size - least * period)
    wraps = end > period
    # three runs of remainders: the outer ones have equally many numbers each, the middle one one more or one less
    inner = cutlass.select_(wraps, end - period, phase)
    outer = cutlass.select_(wraps, phase, end)
    each_outside = cutlass.select_(wraps, least + 1, least)
    each_inside = cutlass.select_(wraps, least, least + 1)
    before = inner * each_outside
    until = before + (outer - inner) * each_inside
    inside = (rank >= before) & (rank < until)
    begin = cutlass.select_(rank < before, Uint32(0), cutlass.select_(inside, before, until))
    first = cutlass.select_(rank < before, Uint32(0), cutlass.select_(inside, inner, outer))
    each = larger(cutlass.select_(inside, each_inside, each_outside), Uint32(1))
    steps = (rank - begin) // each
    remainder = first + steps
    lowest = cutlass.select_(remainder >= phase, remainder - phase, remainder + period - phase)
    return lowest + (rank - begin - steps * each) * period


def span(offsets: cute.Pointer, sequence: Int32, total: Int32) -> tuple[Int32, Int32]:
    """Return (first row, rows) of a sequence, within 0 .. total whatever the offsets are."""
    first = clip((offsets + sequence).load(), total)
    end = clip((offsets + (sequence + 1)).load(), total)
    return first, larger(end - first, Int32(0))


@dataclass(frozen=True)
class Operands:
    """The arguments by meaning. Strides in elements, of (token, head). args: DensePrefillArguments, or those and more."""

    args: Any
    items: WorkItems

    @property
    def scale_log2(self) -> Float32:
        """Return the factor of the scores, log2 units."""
        return self.args.scale_log2

    @property
    def empty_lse(self) -> Float32:
        """Return the lse of a row that attends to nothing."""
        return self.args.empty_lse

    def out_row(self, item: WorkItem | Rows, row: Int32) -> cute.Pointer:
        """Return element 0 of an output row."""
        return self.args.out + row_offset(self.args.out_stride_token, self.args.out_stride_head, item.first_row + row, item.head)

    def lse_of(self, item: WorkItem | Rows, row: Int32) -> cute.Pointer:
        """Return the lse of a query row."""
        return self.args.lse + row_offset(self.args.lse_stride_token, self.args.lse_stride_head, item.first_row + row, item.head)


def row_offset(token_stride: Int64, head_stride: Int64, token: Int32, head: Int32) -> Int64:
    """Return the elements before a row of a tensor [tokens, heads, columns]."""
    return Int64(token) * token_stride + Int64(head) * head_stride

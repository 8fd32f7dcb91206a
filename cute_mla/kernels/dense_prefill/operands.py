"""Work items of the dense prefill kernels, their queue, the mask over their keys, and the rows that they read and write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute

from ...spec.dense_prefill import RANKED_ROUNDS
from ..primitives.arithmetic import clip, larger, smaller
from ..primitives.pipeline import StageBarriers
from ..primitives.rows import aligned, store_vector


class DensePrefillRows(NamedTuple):
    """The rows of out that an item writes: the part of a DensePrefillItem that outlives its products."""

    head: Int32
    first_row: Int32
    rows: Int32

    @staticmethod
    def of(item: DensePrefillItem) -> DensePrefillRows:
        """Return the rows of an item."""
        return DensePrefillRows(item.head, item.first_row, item.rows)

    @staticmethod
    def none() -> DensePrefillRows:
        """Return no rows."""
        return DensePrefillRows(Int32(0), Int32(0), Int32(0))


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
class DensePrefillItem:
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

    def key_limit(self, row: Int32) -> Int32:
        """Return the keys that a row of the block sees; none if negative."""
        return smaller(self.keys, self.diagonal + row + 1)

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
class DensePrefillItems(ItemRounds):
    """The work items of a call: blocks of query rows. max_keys: of a sequence, that a row may see, from the arguments; None: all."""

    max_keys: Callable[[Any], Int32] | None = None

    def count(self) -> Int32:
        """Return the number of items, with the ones that a sequence does not have."""
        return self.args.batch * self.args.h_q * self.args.row_blocks

    def take(self, turn: Int32) -> DensePrefillItem:
        """Return this CTA's item of a round; one without rows or keys if it has none."""
        index, count = self.of_round(turn), self.count()
        there = Uint32(index) < Uint32(count)
        item = self.read(cutlass.select_(there, index, count - 1))
        rows, keys = (cutlass.select_(there, number, Int32(0)) for number in (item.rows, item.keys))
        return replace(item, rows=rows, keys=keys)

    def read(self, index: Int32) -> DensePrefillItem:
        """Return an item, by the lengths as they are now. Whatever they are, its rows and keys lie within q, k and v."""
        of_head = Int32(Uint32(index) // Uint32(self.args.row_blocks))
        block = self.args.row_blocks - 1 - (index - of_head * self.args.row_blocks)
        sequence = Int32(Uint32(of_head) // Uint32(self.args.h_q))
        head = of_head - sequence * self.args.h_q
        first_query, queries = span(self.args.cu_seqlens_q, sequence, self.args.total_q)
        first_key, keys = span(self.args.cu_seqlens_k, sequence, self.args.total_k)
        return self.at(head, block, (first_query, queries), (first_key, keys))

    def at(self, head: Int32, block: Int32, queries_of: tuple[Int32, Int32], keys_of: tuple[Int32, Int32]) -> DensePrefillItem:
        """Return the item of a block of rows. queries_of, keys_of: first row and rows of its sequence."""
        (first_query, queries), (first_key, keys) = queries_of, keys_of
        skipped = block * self.item_rows
        rows = queries - skipped
        diagonal = skipped + keys - queries
        seen = clip(diagonal + smaller(rows, Int32(self.item_rows)), keys)
        item = DensePrefillItem(
            head=head,
            kv_head=Int32(Uint32(head) // Uint32(self.args.heads_per_kv)),
            first_row=first_query + skipped,
            rows=rows,
            first_key=first_key,
            keys=cutlass.select_(rows > 0, cutlass.select_(self.causal, seen, keys), Int32(0)),
            diagonal=cutlass.select_(self.causal, diagonal, keys),
        )
        return item if self.max_keys is None else replace(item, keys=smaller(item.keys, self.max_keys(self.args)))


def ranked(rank: Uint32, phase: Uint32, size: Uint32, period: Uint32) -> Uint32:
    """Return the rank-th of the numbers 0 .. size - 1, sorted by (number + phase) % period and then by number. phase < period."""
    shortest = size // period  # numbers of each remainder; of some, one more
    end = phase + (size - shortest * period)
    wraps = end > period
    # three runs of remainders: the outer ones have equally many numbers each, the middle one one more or one less
    inner = cutlass.select_(wraps, end - period, phase)
    outer = cutlass.select_(wraps, phase, end)
    each_outside = cutlass.select_(wraps, shortest + 1, shortest)
    each_inside = cutlass.select_(wraps, shortest, shortest + 1)
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
class DensePrefillOperands:
    """The arguments by meaning. Strides in elements, of (token, head). args: DensePrefillArguments, or those and more."""

    args: Any
    items: DensePrefillItems

    def row(self, name: str, item: DensePrefillItem | DensePrefillRows, row: Int32) -> cute.Pointer:
        """Return element 0 of a row of the item's block. name: of the tensor among the arguments."""
        return row_of(self.args, name, item.first_row + row, item.head)


def row_of(args: Any, name: str, token: Int32, head: Int32) -> cute.Pointer:
    """Return element 0 of a row of a tensor [tokens, heads, columns]. name: of the tensor among the arguments."""
    token_stride, head_stride = (getattr(args, f"{name}_stride_{mode}") for mode in ("token", "head"))
    return getattr(args, name) + (Int64(token) * token_stride + Int64(head) * head_stride)


WORDS_AT_ONCE = 4  # 16 bytes
ITEM_WORDS = 8  # whether there is an item, and a DensePrefillItem


class ItemQueuePipes(Protocol):
    """The barriers of a queue."""

    @property
    def item_ready(self) -> StageBarriers:
        """Return the barriers from the warp that posts to the roles: 1 arrival."""

    @property
    def item_free(self) -> StageBarriers:
        """Return the barriers back: an arrival of every warp that takes items."""


@dataclass(frozen=True)
class ItemQueue:
    """The coming items of a CTA. sItems: int32 (stages, words): whether there is one, and the item. kind: of items."""

    sItems: cute.Pointer
    pipes: ItemQueuePipes
    kind: type[DensePrefillItem] = DensePrefillItem

    @property
    def words(self) -> int:
        """Return the words of an item."""
        return 1 + len(fields(self.kind))

    def post_item(self, turn: Int32, item: DensePrefillItem) -> Int32:
        """Post an item. Return the next turn."""
        self.post(turn, Boolean(True), item)
        return turn + 1

    def post_end(self, turn: Int32) -> None:
        """Post that there is no further item."""
        self.post(turn, Boolean(False), self.nothing())

    def nothing(self) -> DensePrefillItem:
        """Return an item without rows and keys."""
        return self.kind(*[Int32(0)] * (self.words - 1))

    def post(self, turn: Int32, there: Boolean, item: DensePrefillItem) -> None:
        """Signal item_ready when the item may be read. One warp."""
        self.pipes.item_free.producer_acquire(turn)
        words = [Int32(there), *(getattr(item, field.name) for field in fields(self.kind))]
        with cute.arch.elect_one():
            for first in range(0, self.words, WORDS_AT_ONCE):
                store_vector(self._cell(turn) + first, words[first : first + WORDS_AT_ONCE])
            cute.arch.mbarrier_arrive(self.pipes.item_ready.barrier(turn))

    def take(self, turn: Int32) -> tuple[Boolean, DensePrefillItem]:
        """Wait item_ready, signal item_free.

        Return (whether there is an item of that number, the item, without rows and keys if not). One warp.
        """
        self.pipes.item_ready.consumer_wait(turn)
        rWords = cute.make_rmem_tensor(cute.make_layout(self.words), Int32)
        cute.autovec_copy(cute.make_tensor(aligned(self._cell(turn), 16), rWords.layout), rWords)
        self.pipes.item_free.consumer_release(turn)
        there, *numbers = (cute.arch.make_warp_uniform(rWords[i]) for i in range(self.words))
        return there != 0, self.kind(*numbers)

    def _cell(self, turn: Int32) -> cute.Pointer:
        return self.sItems + self.pipes.item_ready.stage(turn) * self.words


@dataclass(frozen=True)
class EveryKey:
    """The mask of a call that gives none: it hides nothing, and costs nothing.

    stored_early: keys whose probabilities the SM100 kernel stores before it loads the last scores of a tile again.
    """

    stored_early: ClassVar[int] = 0

    def rows_of(self, item: DensePrefillItem, thread: Any, walk: TileWalk) -> EveryKey:
        """Return the mask of a thread's rows of an item's block, along a walk. thread: what says which rows these are."""
        return self

    def kept(self, flag: Boolean) -> Boolean | Int32:
        """Return a flag as a role keeps it while scores are masked."""
        return flag

    def load(self) -> None:
        """Start to load the bits of the tile that the walk is at, unless they have come."""

    def hide(self, scores: cute.Tensor) -> None:
        """Set the scores of hidden keys of that tile to -inf, by selects, so that NaN vanishes."""

    def shown(self, score: Float32, key: int) -> Float32:
        """Return a score of the tile's key of this number, or -inf if the key is hidden."""
        return score

    def advance(self, rows: Any) -> Float32:
        """Move the reference of a row of scores to that tile if need be, as RowSoftmax.advance."""
        factor: Float32 = rows.advance()
        return factor

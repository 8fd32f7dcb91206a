"""The role of the SM90 kernel that finds the CTA's work items; spec/dense_prefill.py has their order."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, Uint32, cute

from ...spec.dense_prefill import RANKED_ROUNDS, TURNED_EIGHTHS
from ..primitives.arithmetic import clip, inclusive_sum, larger, smaller
from .operands import DensePrefillItem, DensePrefillItems, ItemQueue, span
from .sm90_config import RANK_BITS, RANK_KEYS


@dataclass(frozen=True)
class Sequences:
    """Neighbouring sequences whose items are sorted together: one a lane, and lanes without one.

    count: sequences. sum: blocks of all of them. lowest, highest: ranks of blocks, see `rank`. Of the lane's sequence, which has no
    blocks if it has none: first_query, queries, first_key, keys, blocks, and the rank of its last block.
    """

    items: DensePrefillItems
    count: Int32
    sum: Int32
    lowest: Int32
    highest: Int32
    first_query: Int32
    queries: Int32
    first_key: Int32
    keys: Int32
    blocks: Int32
    rank: Int32  # of a block: the keys that its rows see, in units of RANK_KEYS, up to a constant of all blocks

    @staticmethod
    def create(items: DensePrefillItems, first: Int32, max_blocks: Int32) -> Sequences:
        """Return the sequences from `first` on: at most a warp's lanes, and one or as many as have `max_blocks` blocks together."""
        args = items.args
        lane = cute.arch.lane_idx()
        there = first + lane < args.batch
        sequence = smaller(first + lane, args.batch - 1)
        first_query, queries = span(args.cu_seqlens_q, sequence, args.total_q)
        first_key, keys = span(args.cu_seqlens_k, sequence, args.total_k)
        rows = items.item_rows
        blocks = smaller(Int32((Uint32(queries) + (rows - 1)) // rows), args.row_blocks)
        blocks = cutlass.select_(there, blocks, Int32(0))
        fits = there & ((inclusive_sum(blocks, lane, Int32) <= max_blocks) | (lane == 0))
        blocks = cutlass.select_(fits, blocks, Int32(0))
        last = ((keys - queries + (RANK_KEYS - 1)) >> RANK_BITS) + blocks - 1
        rank = cutlass.select_(items.causal, last, (keys + (RANK_KEYS - 1)) // RANK_KEYS)
        highest = cutlass.select_(blocks > 0, rank, Int32(-(1 << 30)))
        lowest = cutlass.select_(blocks > 0, cutlass.select_(items.causal, last - blocks + 1, rank), Int32(1 << 30))
        return Sequences(
            items=items,
            count=cute.arch.popc(cute.arch.vote_ballot_sync(fits)),
            sum=cute.arch.warp_reduction_sum(blocks),
            lowest=cute.arch.warp_reduction(lowest, smaller),
            highest=cute.arch.warp_reduction(highest, larger),
            first_query=first_query,
            queries=queries,
            first_key=first_key,
            keys=keys,
            blocks=blocks,
            rank=rank,
        )

    def of_rank(self, rank: Int32) -> Int32:
        """Return the blocks of the lane's sequence of this rank or a higher one."""
        above = self.rank + 1 - rank
        return clip(cutlass.select_(self.items.causal, above, cutlass.select_(above > 0, self.blocks, Int32(0))), self.blocks)

    @cute.jit
    def item(self, place: Int32, first_head: Int32, heads: Int32) -> DensePrefillItem:
        """Return the item of a place among those of `heads` heads, the highest rank first. place < heads * sum."""
        low, high = self.lowest, self.highest
        while low < high:
            middle = low + Int32(Uint32(high - low + 1) >> 1)
            found = cute.arch.warp_reduction_sum(self.of_rank(middle)) * heads > place
            low, high = cutlass.select_(found, middle, low), cutlass.select_(found, high, middle - 1)
        above = self.of_rank(low + 1)
        here = self.of_rank(low) - above
        until = inclusive_sum(here * heads, cute.arch.lane_idx(), Int32)
        remaining = place - cute.arch.warp_reduction_sum(above) * heads
        lane = cute.arch.popc(cute.arch.vote_ballot_sync(until <= remaining))
        each, before = cute.arch.shuffle_sync(here, lane), cute.arch.shuffle_sync(until - here * heads, lane)
        head = Int32(Uint32(remaining - before) // Uint32(each))
        first_query, queries, first_key, keys, blocks, last = (
            cute.arch.shuffle_sync(value, lane)
            for value in (self.first_query, self.queries, self.first_key, self.keys, self.blocks, self.rank)
        )
        block = cutlass.select_(self.items.causal, low - last + blocks - 1, remaining - before - head * each)
        return self.items.at(first_head + head, block, (first_query, queries), (first_key, keys))


class DensePrefillSm90ItemRole:
    """One warp: the CTA's work items, ahead of the other roles."""

    @cute.jit
    def run(self, items: DensePrefillItems, queue: ItemQueue):
        """Wait item_free. Signal item_ready. After the last item comes the word that there is none."""
        ctas = cute.arch.grid_dim()[0]
        posted, first, place = Int32(0), Int32(0), cute.arch.block_idx()[0]
        while first < items.args.batch:
            sequences = Sequences.create(items, first, RANKED_ROUNDS * ctas)
            heads = larger(Int32(Uint32(RANKED_ROUNDS * ctas) // Uint32(larger(sequences.sum, Int32(1)))), Int32(1))
            head = Int32(0)
            while head < items.args.h_q:
                together = smaller(heads, items.args.h_q - head)
                start, forward = Int32(0), Boolean(True)
                while start < sequences.sum * together:
                    rank = start + cutlass.select_(forward, place, ctas - 1 - place)
                    if rank < sequences.sum * together:
                        posted = queue.post_item(posted, sequences.item(rank, head, together))
                    start, forward = start + ctas, not forward
                place = place + ctas * TURNED_EIGHTHS // 8
                place = cutlass.select_(place >= ctas, place - ctas, place)
                head = head + together
            first = first + sequences.count
        queue.post_end(posted)

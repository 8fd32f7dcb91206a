"""Work of each CTA of a launch, in blocks of keys, by the plan or the order of items that the kernels follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cute_mla.spec.dense_prefill import LANE_BITS, RANKED_ROUNDS, TURNED_EIGHTHS
from cute_mla.spec.mla import ceil_div
from cute_mla.spec.mqa_logits import MqaLogitsProblem
from cute_mla.spec.split_plan import INVARIANT_SPLIT_TILES, PIECE_OVERHEAD_TILES
from cute_mla.testing.split_plan_reference import pieces, reference_plan


@dataclass(frozen=True)
class CtaWork:
    """Work of one CTA, or of the CTAs that share its keys. pieces: runs of blocks without a seam; blocks: of all pieces."""

    blocks: int
    pieces: int


@dataclass(frozen=True)
class DecodeWork:
    """Work of a decode launch, and of the combine after it.

    cut_requests: requests whose partial results combine merges. splits: accumulator rows of all requests. most_splits: of one request.
    """

    cta_work: tuple[CtaWork, ...]
    cut_requests: int
    splits: int
    most_splits: int


def decode_work(
    lengths: Sequence[int], num_parts: int, max_splits: int = 0, eighths: int = 0, overhead: int = PIECE_OVERHEAD_TILES
) -> DecodeWork:
    """Return the work that split_plan gives to its parts, empty parts left out.

    max_splits: the kernels' argument; not 0 in a batch-invariant call. eighths: split_plan's argument whole_eighths.
    overhead: piece_overhead of the architecture.
    """
    blocks: Counter[int] = Counter()
    count: Counter[int] = Counter()
    splits: Counter[int] = Counter()
    split_tiles = INVARIANT_SPLIT_TILES if max_splits else None
    for part, piece in pieces(reference_plan(lengths, num_parts, eighths=eighths, overhead=overhead), lengths, split_tiles, max_splits):
        blocks[part] += piece.end - piece.begin
        count[part] += 1
        if piece.row is not None:
            splits[piece.request] += 1
    cta_work = tuple(CtaWork(blocks[part], count[part]) for part in sorted(count))
    return DecodeWork(cta_work, len(splits), splits.total(), max(splits.values(), default=0))


def sparse_prefill_work(tokens: int, groups: int, blocks: int) -> tuple[CtaWork, ...]:
    """Return the work of sparse prefill, where group z of n takes the tokens z, z + n, ... and each token has `blocks` blocks."""
    each = [len(range(group, tokens, groups)) for group in range(groups)]
    return tuple(CtaWork(number * blocks, number) for number in each)


def logits_work(problem: MqaLogitsProblem, sm_count: int) -> tuple[CtaWork, ...]:
    """Return the work of the indexer's logits, where CTA c of n takes the items c, c + n, ... and all tokens see all keys."""
    chunk, ctas = problem.chunk(sm_count), problem.grid(sm_count)[0]
    tiles: Counter[int] = Counter()
    pieces: Counter[int] = Counter()
    for item in range(problem.items(sm_count)):
        first = item // problem.item_rows * chunk
        tiles[item % ctas] += min(chunk, problem.tiles - first)
        pieces[item % ctas] += 1
    return tuple(CtaWork(tiles[cta], pieces[cta]) for cta in range(ctas))


@dataclass(frozen=True)
class PrefillTiles:
    """Tiles of dense prefill. rows, keys: of a tile. cached: keys of each sequence in front of those of its own tokens."""

    rows: int
    keys: int
    causal: bool
    cached: int = 0

    def blocks(self, length: int) -> int:
        """Return the blocks of rows of a sequence."""
        return ceil_div(length, self.rows)

    def of_item(self, item: PrefillItem) -> int:
        """Return the key tiles of an item."""
        skipped = item.block * self.rows
        if skipped >= item.length:
            return 0
        return ceil_div((min(skipped + self.rows, item.length) if self.causal else item.length) + self.cached, self.keys)


@dataclass(frozen=True)
class KeyTiles(PrefillTiles):
    """Tiles of dK and dV, whose items are blocks of keys. rows: keys of an item; keys: query rows of a tile.

    longest: tokens of the longest sequence. Its items count from the first block on, which has the most rows under a causal mask.
    """

    longest: int = 0

    def of_item(self, item: PrefillItem) -> int:
        """Return the tiles of query rows of an item."""
        skipped = (self.blocks(self.longest) - 1 - item.block) * self.rows
        if skipped >= item.length:
            return 0
        return ceil_div(item.length - skipped if self.causal else item.length, self.keys)


class PrefillItem(NamedTuple):
    """A block of rows of a head of a sequence, and the sequence's length."""

    sequence: int
    head: int
    block: int
    length: int


def dense_prefill_order(tiles: PrefillTiles, lengths: Sequence[int], heads: int, ctas: int) -> list[list[PrefillItem]]:
    """Return the items of each CTA on sm100.

    RANKED_ROUNDS rounds at a time are sorted, longest block first, and dealt to the CTAs in alternating direction.
    """
    row_blocks = tiles.blocks(max(lengths, default=0))
    numbered = [
        PrefillItem(sequence, head, block, length)
        for sequence, length in enumerate(lengths)
        for head in range(heads)
        for block in reversed(range(row_blocks))
    ]
    dealt: list[list[PrefillItem]] = [[] for _ in range(ctas)]
    for first in range(0, len(numbered), RANKED_ROUNDS * ctas):
        run = numbered[first : first + RANKED_ROUNDS * ctas]
        _deal(sorted(run, key=lambda item: -item.block), dealt, 0)
    return dealt


def sorted_prefill_order(tiles: PrefillTiles, lengths: Sequence[int], heads: int, ctas: int) -> list[list[PrefillItem]]:
    """Return the items of each CTA on sm90, where the items of several sequences and heads are sorted together."""
    dealt: list[list[PrefillItem]] = [[] for _ in range(ctas)]
    most, first, turned = RANKED_ROUNDS * ctas, 0, 0
    while first < len(lengths):
        end, blocks = first + 1, tiles.blocks(lengths[first])
        while end < len(lengths) and end - first < 1 << LANE_BITS and blocks + tiles.blocks(lengths[end]) <= most:
            blocks, end = blocks + tiles.blocks(lengths[end]), end + 1
        together = max(most // max(blocks, 1), 1)
        for head in range(0, heads, together):
            run = [
                PrefillItem(sequence, number, block, lengths[sequence])
                for sequence in range(first, end)
                for number in range(head, min(head + together, heads))
                for block in range(tiles.blocks(lengths[sequence]))
            ]
            _deal(sorted(run, key=lambda item: -_rank(tiles, item)), dealt, turned)
            turned = (turned + ctas - ctas * TURNED_EIGHTHS // 8) % ctas
        first = end
    return dealt


def _rank(tiles: PrefillTiles, item: PrefillItem) -> int:
    return item.block + ceil_div(tiles.cached, tiles.keys) if tiles.causal else tiles.of_item(item)


def _deal(items: Sequence[PrefillItem], dealt: list[list[PrefillItem]], turned: int) -> None:
    """Deal sorted items to the CTAs in alternating direction. turned: the CTA that gets the first one."""
    ctas = len(dealt)
    for rank, item in enumerate(items):
        turn, place = divmod(rank, ctas)
        dealt[(turned + (place if turn % 2 == 0 else ctas - 1 - place)) % ctas].append(item)


def prefill_work(tiles: PrefillTiles, dealt: Sequence[Sequence[PrefillItem]]) -> tuple[CtaWork, ...]:
    """Return the work of CTAs by their items."""
    blocks = [[tiles.of_item(item) for item in items] for items in dealt]
    return tuple(CtaWork(sum(numbers), sum(1 for number in numbers if number)) for numbers in blocks)

"""Who does what: the blocks of keys of each CTA of a launch, by the plan or the order of work that the kernels follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..spec.dense_prefill import RANKED_ROUNDS
from ..spec.mla import ceil_div
from ..spec.split_plan import INVARIANT_SPLIT_TILES
from ..testing.split_plan_reference import pieces, reference_plan


@dataclass(frozen=True)
class Part:
    """What one CTA (or the CTAs that share its keys) does: blocks of keys in all, in so many pieces without a gap between blocks."""

    blocks: int
    pieces: int


@dataclass(frozen=True)
class Split:
    """A decode's parts, and what combine has to merge: requests that are cut, and the accumulator rows of all and of the most cut."""

    parts: tuple[Part, ...]
    cut_requests: int
    splits: int
    most_splits: int


def split_parts(lengths: Sequence[int], num_parts: int, max_splits: int = 0) -> Split:
    """The parts of split_plan, those without work left out. max_splits: as kernels take it, not 0 in a batch-invariant call."""
    blocks: Counter[int] = Counter()
    count: Counter[int] = Counter()
    splits: Counter[int] = Counter()
    split_tiles = INVARIANT_SPLIT_TILES if max_splits else None
    for part, piece in pieces(reference_plan(lengths, num_parts), lengths, split_tiles, max_splits):
        blocks[part] += piece.end - piece.begin
        count[part] += 1
        if piece.row is not None:
            splits[piece.request] += 1
    parts = tuple(Part(blocks[part], count[part]) for part in sorted(count))
    return Split(parts, len(splits), splits.total(), max(splits.values(), default=0))


def token_parts(tokens: int, groups: int, blocks: int) -> tuple[Part, ...]:
    """Of sparse prefill: group z of n takes the tokens z, z + n, ..., all of so many blocks."""
    each = [len(range(group, tokens, groups)) for group in range(groups)]
    return tuple(Part(number * blocks, number) for number in each)


def item_order(count: int, row_blocks: int, ctas: int) -> Iterator[list[int]]:
    """Of dense prefill: the items of each CTA. Runs of RANKED_ROUNDS rounds go out by block, the longest first, to and fro."""
    handed: list[list[int]] = [[] for _ in range(ctas)]
    for first in range(0, count, RANKED_ROUNDS * ctas):
        run = range(first, min(first + RANKED_ROUNDS * ctas, count))
        ranked = sorted(run, key=lambda item: (item % row_blocks, item))
        for rank, item in enumerate(ranked):
            turn, place = divmod(rank, ctas)
            handed[place if turn % 2 == 0 else ctas - 1 - place].append(item)
    yield from handed


def item_parts(lengths: Sequence[int], heads: int, rows: int, keys: int, causal: bool, ctas: int) -> tuple[Part, ...]:
    """Of dense prefill, whose items have so many rows and blocks so many keys. Sequences attend to themselves."""
    row_blocks = ceil_div(max(lengths), rows)
    count = row_blocks * heads * len(lengths)
    parts = []
    for items in item_order(count, row_blocks, min(ctas, count)):
        blocks = [
            _item_blocks(lengths[item // row_blocks // heads], row_blocks - 1 - item % row_blocks, rows, keys, causal) for item in items
        ]
        parts.append(Part(sum(blocks), sum(1 for number in blocks if number)))
    return tuple(parts)


def _item_blocks(length: int, block: int, rows: int, keys: int, causal: bool) -> int:
    """Blocks of keys that the rows of one item see."""
    skipped = block * rows
    if skipped >= length:
        return 0
    return ceil_div(min(skipped + rows, length) if causal else length, keys)

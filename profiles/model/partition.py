"""Work of each CTA of a launch, in blocks of keys, by the plan or the order of items that the kernels follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...spec.dense_prefill import RANKED_ROUNDS
from ...spec.mla import ceil_div
from ...spec.split_plan import INVARIANT_SPLIT_TILES
from ...testing.split_plan_reference import pieces, reference_plan


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


def decode_work(lengths: Sequence[int], num_parts: int, max_splits: int = 0) -> DecodeWork:
    """Return the work that split_plan gives to its parts, empty parts left out.

    max_splits: the kernels' argument; not 0 in a batch-invariant call.
    """
    blocks: Counter[int] = Counter()
    count: Counter[int] = Counter()
    splits: Counter[int] = Counter()
    split_tiles = INVARIANT_SPLIT_TILES if max_splits else None
    for part, piece in pieces(reference_plan(lengths, num_parts), lengths, split_tiles, max_splits):
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


def dense_prefill_order(count: int, row_blocks: int, ctas: int) -> Iterator[list[int]]:
    """Yield the items of each CTA of dense prefill.

    RANKED_ROUNDS rounds at a time are sorted, longest block first, and dealt to the CTAs in alternating direction.
    """
    dealt: list[list[int]] = [[] for _ in range(ctas)]
    for first in range(0, count, RANKED_ROUNDS * ctas):
        run = range(first, min(first + RANKED_ROUNDS * ctas, count))
        ranked = sorted(run, key=lambda item: (item % row_blocks, item))
        for rank, item in enumerate(ranked):
            turn, cta = divmod(rank, ctas)
            dealt[cta if turn % 2 == 0 else ctas - 1 - cta].append(item)
    yield from dealt


def dense_prefill_work(lengths: Sequence[int], heads: int, rows: int, keys: int, causal: bool, ctas: int) -> tuple[CtaWork, ...]:
    """Return the work of dense prefill over sequences that attend to themselves. rows: of an item; keys: of a block."""
    row_blocks = ceil_div(max(lengths), rows)
    count = row_blocks * heads * len(lengths)
    cta_work = []
    for items in dense_prefill_order(count, row_blocks, min(ctas, count)):
        blocks = [
            _item_blocks(lengths[item // row_blocks // heads], row_blocks - 1 - item % row_blocks, rows, keys, causal) for item in items
        ]
        cta_work.append(CtaWork(sum(blocks), sum(1 for number in blocks if number)))
    return tuple(cta_work)


def _item_blocks(length: int, block: int, rows: int, keys: int, causal: bool) -> int:
    """Return the blocks of keys that the rows of one item attend to."""
    skipped = block * rows
    if skipped >= length:
        return 0
    return ceil_div(min(skipped + rows, length) if causal else length, keys)

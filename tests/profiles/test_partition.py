"""Who does what: parts of the plan, tokens of groups, items of CTAs."""

from __future__ import annotations

import pytest

from cute_mla.profiles.partition import Part, item_order, item_parts, split_parts, token_parts


def test_parts_of_a_plan_by_hand() -> None:
    # one request of 10 tiles in 3 parts: cost 15, steps of 5; the first 5 units are the request's start, so cuts at tile 0 and 5
    split = split_parts([640], 3)
    assert split.parts == (Part(5, 1), Part(5, 1))
    assert (split.cut_requests, split.splits, split.most_splits) == (1, 2, 2)


def test_uncut_requests_leave_nothing_to_combine() -> None:
    split = split_parts([64] * 4, 2)
    assert split.parts == (Part(2, 2), Part(2, 2))
    assert (split.cut_requests, split.splits) == (0, 0)


@pytest.mark.parametrize("num_parts", [1, 7, 66, 132])
def test_every_tile_is_someones(num_parts: int) -> None:
    lengths = [1, 63, 64, 65, 4096, 45118, 0]
    split = split_parts(lengths, num_parts)
    assert sum(part.blocks for part in split.parts) == sum(-(-length // 64) for length in lengths)
    assert len(split.parts) <= num_parts


def test_tokens_go_round() -> None:
    assert token_parts(7, 3, 32) == (Part(96, 3), Part(64, 2), Part(64, 2))


def test_items_by_hand() -> None:
    # 2 heads x 3 blocks on 2 CTAs: all in one run; items 0, 3 have the last block, which is the longest; then to and fro
    assert list(item_order(6, 3, 2)) == [[0, 4, 2], [3, 1, 5]]
    # 300 rows in blocks of 128, causal: 3, 2, 1 tiles
    assert item_parts([300], 2, 128, 128, True, 2) == (Part(3 + 2 + 1, 3), Part(3 + 2 + 1, 3))
    assert item_parts([300], 2, 128, 128, False, 2) == (Part(9, 3), Part(9, 3))


def test_blocks_that_a_sequence_does_not_have_are_nobodys() -> None:
    parts = item_parts([256, 100], 1, 128, 128, False, 4)
    assert sum(part.blocks for part in parts) == 2 * 2 + 1
    assert sum(part.pieces for part in parts) == 3

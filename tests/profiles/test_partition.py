"""Who does what: parts of the plan, tokens of groups, items of CTAs."""

from __future__ import annotations

import pytest

from cute_mla.profiles.model.partition import CtaWork, decode_work, dense_prefill_order, dense_prefill_work, sparse_prefill_work


def test_parts_of_a_plan_by_hand() -> None:
    # one request of 10 tiles in 3 parts: cost 15, steps of 5; the first 5 units are the request's start, so cuts at tile 0 and 5
    decode = decode_work([640], 3)
    assert decode.cta_work == (CtaWork(5, 1), CtaWork(5, 1))
    assert (decode.cut_requests, decode.splits, decode.most_splits) == (1, 2, 2)


def test_uncut_requests_leave_nothing_to_combine() -> None:
    decode = decode_work([64] * 4, 2)
    assert decode.cta_work == (CtaWork(2, 2), CtaWork(2, 2))
    assert (decode.cut_requests, decode.splits) == (0, 0)


@pytest.mark.parametrize("num_parts", [1, 7, 66, 132])
def test_every_tile_is_someones(num_parts: int) -> None:
    lengths = [1, 63, 64, 65, 4096, 45118, 0]
    decode = decode_work(lengths, num_parts)
    assert sum(work.blocks for work in decode.cta_work) == sum(-(-length // 64) for length in lengths)
    assert len(decode.cta_work) <= num_parts


def test_tokens_go_round() -> None:
    assert sparse_prefill_work(7, 3, 32) == (CtaWork(96, 3), CtaWork(64, 2), CtaWork(64, 2))


def test_items_by_hand() -> None:
    # 2 heads x 3 blocks on 2 CTAs: all in one run; items 0, 3 have the last block, which is the longest; then to and fro
    assert list(dense_prefill_order(6, 3, 2)) == [[0, 4, 2], [3, 1, 5]]
    # 300 rows in blocks of 128, causal: 3, 2, 1 tiles
    assert dense_prefill_work([300], 2, 128, 128, True, 2) == (CtaWork(3 + 2 + 1, 3), CtaWork(3 + 2 + 1, 3))
    assert dense_prefill_work([300], 2, 128, 128, False, 2) == (CtaWork(9, 3), CtaWork(9, 3))


def test_blocks_that_a_sequence_does_not_have_are_nobodys() -> None:
    parts = dense_prefill_work([256, 100], 1, 128, 128, False, 4)
    assert sum(work.blocks for work in parts) == 2 * 2 + 1
    assert sum(work.pieces for work in parts) == 3

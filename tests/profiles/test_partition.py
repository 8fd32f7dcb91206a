"""Who does what: parts of the plan, tokens of groups, items of CTAs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cute_mla.profiles.launches.partition import (
    CtaWork,
    PrefillItem,
    PrefillTiles,
    decode_work,
    dense_prefill_order,
    logits_work,
    prefill_work,
    sorted_prefill_order,
    sparse_prefill_work,
)
from cute_mla.spec.mqa_logits import ITEM_COST, MAX_CHUNK_TILES, MIN_CHUNK_TILES, UNEVEN_SHARE, MqaLogitsProblem, chunk_cost

Order = Callable[[PrefillTiles, list[int], int, int], list[list[PrefillItem]]]


def test_parts_of_a_plan_by_hand() -> None:
    # one request of 10 tiles in 3 parts: cost 13, steps of 5; the first 3 units are the request's start, so cuts at tiles 2 and 7
    decode = decode_work([640], 3)
    assert decode.cta_work == (CtaWork(2, 1), CtaWork(5, 1), CtaWork(3, 1))
    assert (decode.cut_requests, decode.splits, decode.most_splits) == (1, 3, 3)


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


ORDERS = (dense_prefill_order, sorted_prefill_order)


@pytest.mark.parametrize("order", ORDERS)
def test_items_by_hand(order: Order) -> None:
    # 2 heads x 3 blocks on 2 CTAs: all in one run, the last block first, which is the longest; then to and fro
    causal, full = (PrefillTiles(128, 128, is_causal) for is_causal in (True, False))
    dealt = order(causal, [300], 2, 2)
    assert [[(item.head, item.block) for item in items] for items in dealt] == [[(0, 2), (1, 1), (0, 0)], [(1, 2), (0, 1), (1, 0)]]
    # 300 rows in blocks of 128, causal: 3, 2, 1 tiles
    assert prefill_work(causal, dealt) == (CtaWork(3 + 2 + 1, 3), CtaWork(3 + 2 + 1, 3))
    assert prefill_work(full, order(full, [300], 2, 2)) == (CtaWork(9, 3), CtaWork(9, 3))
    # behind 200 cached keys: 4, 4, 3 tiles
    after = PrefillTiles(128, 128, True, 200)
    assert sum(work.blocks for work in prefill_work(after, order(after, [300], 2, 2))) == 2 * (4 + 4 + 3)


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_that_a_sequence_does_not_have_are_nobodys(order: Order) -> None:
    tiles = PrefillTiles(128, 128, False)
    parts = prefill_work(tiles, order(tiles, [256, 100], 1, 4))
    assert sum(work.blocks for work in parts) == 2 * 2 + 1
    assert sum(work.pieces for work in parts) == 3


def test_sequences_of_many_lengths_are_spread_evenly() -> None:
    tiles, lengths = PrefillTiles(128, 128, True), [331, 946, 1804, 763, 991, 842, 1036, 1291, 88, 605, 635, 369, 1349, 813, 601, 1123]
    blocks = [work.blocks for work in prefill_work(tiles, sorted_prefill_order(tiles, lengths, 128, 132))]
    assert max(blocks) * len(blocks) < 1.02 * sum(blocks)


LOGITS = [
    MqaLogitsProblem(True, 64, 1, 1, 131072),
    MqaLogitsProblem(True, 64, 64, 1, 65536),
    MqaLogitsProblem(False, 32, 1, 128, 131072),
    MqaLogitsProblem(True, 48, 7, 5, 1000),
    MqaLogitsProblem(True, 48, 3, 1, 0),
]


@pytest.mark.parametrize("problem", LOGITS, ids=str)
@pytest.mark.parametrize("sm_count", [1, 7, 132, 148])
def test_every_tile_of_logits_is_someones(problem: MqaLogitsProblem, sm_count: int) -> None:
    work = logits_work(problem, sm_count)
    assert sum(each.blocks for each in work) == problem.item_rows * problem.tiles
    assert sum(each.pieces for each in work) == problem.items(sm_count)
    chunk = problem.chunk(sm_count)
    longest = max(each.blocks + ITEM_COST * each.pieces for each in work)
    assert chunk_cost(problem.item_rows, problem.tiles, chunk, sm_count) == pytest.approx(
        longest + UNEVEN_SHARE * chunk + (0 if problem.items(sm_count) else ITEM_COST * -(-problem.item_rows // sm_count))
    )


@pytest.mark.parametrize("problem", LOGITS[:4], ids=str)
def test_no_other_chunk_ends_sooner(problem: MqaLogitsProblem) -> None:
    chosen = problem.chunk(132)
    costs = {chunk: chunk_cost(problem.item_rows, problem.tiles, chunk, 132) for chunk in range(MIN_CHUNK_TILES, MAX_CHUNK_TILES + 1)}
    assert costs[chosen] == min(costs.values())


def test_many_tokens_leave_few_sms_idle() -> None:
    """128 tokens of 131,072 keys: 32 groups of 4 tokens with 1,024 tiles, 248.2 of each SM."""
    work = logits_work(MqaLogitsProblem(False, 64, 1, 128, 131072), 132)
    assert max(each.blocks for each in work) <= 250

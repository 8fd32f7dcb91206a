"""Properties of every plan: what consumers and workspaces rely on, for the lengths it was made for and for any others."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_mla.spec.arch import SM90, SM120
from cute_mla.spec.mla import ceil_div
from cute_mla.spec.split_plan import (
    MAX_PARTS,
    PART_BEGIN_REQ,
    PART_BEGIN_SPLIT,
    PART_BEGIN_TILE,
    PART_END_OPEN,
    PART_END_REQ,
    PART_END_TILE,
    PART_FIRST_IS_SPLIT,
    PART_LAST_IS_SPLIT,
    PIECE_OVERHEAD_TILES,
    accumulator_rows,
    keeps_whole,
    piece_overhead,
    whole_slack,
)
from cute_mla.testing.split_plan_reference import SplitPlan, actual_tiles, pieces, planned_tiles, reference_plan, whole_boundaries

LENGTHS = st.one_of(
    st.sampled_from([0, 1, 63, 64, 65, 127, 128, 8192, 8193, -1]), st.integers(0, 600), st.integers(0, 40_000), st.integers(0, 300_000)
)
BATCHES = st.lists(LENGTHS, min_size=0, max_size=24)
NUM_PARTS = st.one_of(st.sampled_from([1, 2, 66, 132, MAX_PARTS]), st.integers(1, 40))
OVERHEADS = [piece_overhead(arch) for arch in (SM90, SM120)]
SPLIT_TILES = st.sampled_from([2, 7, 128])


def check_coverage(plan: SplitPlan, lengths: list[int], split_tiles: int | None = None) -> None:
    """Every tile of every request exactly once; rows unique, in order, and all of a merged request's rows written."""
    max_splits = ceil_div(max(map(actual_tiles, lengths), default=0), split_tiles) if split_tiles else 0
    covered: dict[int, int] = dict.fromkeys(range(len(lengths)), 0)
    rows: dict[int, list[int | None]] = {request: [] for request in covered}
    for _, piece in pieces(plan, lengths, split_tiles, max_splits):
        if piece.end > piece.begin:
            assert piece.begin == covered[piece.request], "pieces of a request follow each other without gap or overlap"
            covered[piece.request] = piece.end
        rows[piece.request].append(piece.row)
    for request, length in enumerate(lengths):
        assert covered[request] == actual_tiles(length)
        first = plan.num_splits[request]
        count = plan.num_splits[request + 1] - first
        if split_tiles is not None:
            used = ceil_div(actual_tiles(length), split_tiles)
            first, count = request * max_splits, used if used > 1 else 0
        assert rows[request] == (list(range(first, first + count)) if count else [None])


def part_costs(plan: SplitPlan, lengths: list[int], split_tiles: int | None = None) -> list[int]:
    """Tiles, plus an overhead for each request, that each part takes."""
    costs, requests = [0] * len(plan.parts), set()
    for index, piece in pieces(plan, lengths, split_tiles):
        costs[index] += max(piece.end - piece.begin, 1) + PIECE_OVERHEAD_TILES * ((index, piece.request) not in requests)
        requests.add((index, piece.request))
    return costs


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 1100), st.integers(0, 9000), NUM_PARTS, st.sampled_from(OVERHEADS))
def test_requests_of_one_length_are_kept_whole_where_the_host_says_so(batch: int, keys: int, num_parts: int, overhead: int) -> None:
    lengths = [keys] * batch
    cost = planned_tiles(keys) + overhead
    boundaries = whole_boundaries(
        range(0, (batch + 1) * cost, cost), num_parts, ceil_div(batch * cost, num_parts) + whole_slack(batch * cost, batch, overhead)
    )
    whole = keeps_whole(batch, keys, num_parts, overhead)
    assert whole == (boundaries[-1] == batch <= 1024)
    if whole:
        plan = reference_plan(lengths, num_parts, overhead=overhead)
        assert plan.num_splits[-1] == 0
        assert max(part[PART_END_REQ] - part[PART_BEGIN_REQ] + (part[PART_BEGIN_REQ] < batch) for part in plan.parts) == ceil_div(
            batch, num_parts
        )


@settings(max_examples=300, deadline=None)
@given(BATCHES, NUM_PARTS, BATCHES)
def test_free_plan_covers_balances_and_fits(lengths: list[int], num_parts: int, later: list[int]) -> None:
    plan = reference_plan(lengths, num_parts)
    check_coverage(plan, lengths)
    assert plan.num_splits[-1] <= accumulator_rows(len(lengths), num_parts)
    total = sum(planned_tiles(length) + PIECE_OVERHEAD_TILES for length in lengths)
    slack = PIECE_OVERHEAD_TILES if plan.num_splits[-1] else whole_slack(total, len(lengths))
    assert all(cost <= ceil_div(total, num_parts) + slack for cost in part_costs(plan, lengths))
    changed = (later + lengths)[: len(lengths)]
    check_coverage(plan, changed)


@settings(max_examples=300, deadline=None)
@given(BATCHES, NUM_PARTS, SPLIT_TILES, BATCHES)
def test_every_plan_serves_batch_invariant_calls(lengths: list[int], num_parts: int, split_tiles: int, later: list[int]) -> None:
    plan = reference_plan(lengths, num_parts)
    check_coverage(plan, lengths, split_tiles)
    total = sum(planned_tiles(length) + PIECE_OVERHEAD_TILES for length in lengths)
    bound = ceil_div(total, num_parts) + whole_slack(total, len(lengths)) + split_tiles - 1
    assert all(cost <= bound for cost in part_costs(plan, lengths, split_tiles))
    check_coverage(plan, (later + lengths)[: len(lengths)], split_tiles)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 2000), min_size=1, max_size=9), st.integers(1, 6))
def test_requests_are_cut_only_if_no_parts_of_whole_ones_cost_as_little(lengths: list[int], num_parts: int) -> None:
    costs = [planned_tiles(length) + PIECE_OVERHEAD_TILES for length in lengths]
    cap = ceil_div(sum(costs), num_parts) + whole_slack(sum(costs), len(costs))
    ways = combinations_with_replacement(range(len(costs) + 1), num_parts - 1)
    possible = any(all(sum(costs[a:b]) <= cap for a, b in pairwise((0, *way, len(costs)))) for way in ways)
    assert (reference_plan(lengths, num_parts).num_splits[-1] == 0) >= possible


@settings(max_examples=200, deadline=None)
@given(BATCHES, NUM_PARTS)
def test_flags_and_empty_parts(lengths: list[int], num_parts: int) -> None:
    plan = reference_plan(lengths, num_parts)
    for part in plan.parts:
        begin, end = part[PART_BEGIN_REQ], part[PART_END_REQ]
        if begin == len(lengths):
            assert part == (len(lengths), len(lengths), 0, 0, 0, 0, 0, 0)
            continue
        merged = [plan.num_splits[request + 1] > plan.num_splits[request] for request in (begin, end)]
        assert [bool(part[PART_FIRST_IS_SPLIT]), bool(part[PART_LAST_IS_SPLIT])] == merged
        assert part[PART_END_OPEN] in (0, 1)


def test_one_long_request_is_shared_by_all_parts() -> None:
    plan = reference_plan([131_072], 132)
    assert plan.num_splits == (0, 129)  # 2,053 cost units in steps of 16: 129 parts, each a split
    assert all(part[PART_BEGIN_REQ] == (0 if index < 129 else 1) for index, part in enumerate(plan.parts))


@pytest.mark.parametrize("column", [PART_BEGIN_REQ, PART_BEGIN_TILE, PART_END_TILE, PART_BEGIN_SPLIT, PART_END_OPEN])
def test_coverage_check_sees_a_wrong_column(column: int) -> None:
    plan = reference_plan([40_000], 5)
    length = 50_000 if column == PART_END_OPEN else 40_000  # whose tail is missing shows when the request has grown
    for index in range(5):
        if (column, index) == (PART_END_TILE, 4):  # ignored where the part owns the tail
            continue
        part = list(plan.parts[index])
        part[column] = 1 - part[column] if column == PART_END_OPEN else part[column] + 1
        broken = SplitPlan((*plan.parts[:index], tuple(part), *plan.parts[index + 1 :]), plan.num_splits)
        with pytest.raises(AssertionError):
            check_coverage(broken, [length])


@pytest.mark.parametrize("num_parts", [1, 132])
def test_empty_batch(num_parts: int) -> None:
    plan = reference_plan([], num_parts)
    assert plan.num_splits == (0,)
    assert set(plan.parts) == {(0,) * 8}

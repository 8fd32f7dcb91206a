"""A cover holds every pair that the table holds, and is much smaller."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from cute_mla.testing.pairwise import pairs, pairwise_cover


def test_pairs_know_their_columns() -> None:
    assert pairs(("a", "a", "b")) == {((0, "a"), (1, "a")), ((0, "a"), (2, "b")), ((1, "a"), (2, "b"))}


def test_a_full_product_shrinks_to_little_more_than_its_two_longest_columns() -> None:
    rows = list(product(range(4), range(3), range(7), range(2), range(2)))
    cover = pairwise_cover(rows)
    assert 28 <= len(cover) <= 36
    assert set().union(*(pairs(rows[i]) for i in cover)) == set().union(*map(pairs, rows))


def test_pairs_that_are_covered_need_no_row() -> None:
    rows = [(0, 0), (0, 1), (1, 1)]
    assert pairwise_cover(rows, pairs(rows[1])) == [0, 2]
    assert pairwise_cover(rows, set().union(*map(pairs, rows))) == []


def test_an_empty_table_has_an_empty_cover() -> None:
    assert pairwise_cover([]) == []


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 3)] * 4), max_size=60))
def test_every_pair_is_covered(rows: list[tuple[int, ...]]) -> None:
    cover = pairwise_cover(rows)
    assert cover == sorted(set(cover))
    assert set().union(*(pairs(rows[i]) for i in cover)) == set().union(*map(pairs, rows))

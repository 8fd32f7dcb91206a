"""Access patterns say of addresses what the addresses themselves say."""

from __future__ import annotations

import numpy as np
import pytest

from cute_mla.simulator.state import access as patterns
from cute_mla.simulator.state.access import MAX_PATTERNS, GlobalAccess, SharedPattern, all_true, global_pattern, shared_pattern


def test_a_shared_pattern() -> None:
    address = np.array([64, 32, 96], np.uint32) | np.uint32(2 << 24)
    pattern = shared_pattern(address)
    assert (pattern.rank, pattern.low, pattern.high, pattern.bits) == (2, 32, 96, 96)
    assert not pattern.is_same
    assert pattern.words(8).tolist() == [[16, 17], [8, 9], [24, 25]]
    assert pattern.distinct(32)
    assert not pattern.distinct(64)
    assert pattern.part(slice(1, 2)).offsets.tolist() == [32]
    assert pattern.part(slice(1, 2)).rank == 2
    assert shared_pattern(address.copy()) is pattern


def test_bytes_of_words() -> None:
    pattern = shared_pattern(np.array([4, 6, 9], np.uint32))
    assert pattern.words(2).tolist() == [[1], [1], [2]]
    assert pattern.part_masks(2).tolist() == [[0b11], [0b1100], [0b110]]


def test_a_pattern_over_two_ctas() -> None:
    assert shared_pattern(np.array([0, 1 << 24], np.uint32)).rank is None


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 2, 0], [0, 0, 2, 2]])
def test_global_accesses_read_and_write_as_an_index_does(order: list[int]) -> None:
    base, size, count = 4096, 4, 2
    addresses = np.array([base + 64 + 8 * place for place in order], np.uint64)
    access = GlobalAccess(addresses, size * count)
    assert access.aligned
    index = ((addresses - np.uint64(base)).astype(np.int64) // size)[:, None] + np.arange(count)
    units = np.arange(64)
    assert access.take(units, base, size, count).tolist() == units[index].tolist()
    values = np.arange(100, 100 + index.size).reshape(index.shape)
    expected = units.copy()
    expected[index] = values
    access.put(units, base, size, count, values)
    assert units.tolist() == expected.tolist()


def test_misaligned_accesses_are_known() -> None:
    assert not GlobalAccess(np.array([4096, 4100], np.uint64), 8).aligned
    assert not GlobalAccess(np.array([4100, 4108], np.uint64), 8).aligned
    assert GlobalAccess(np.array([4104, 4096], np.uint64), 8).aligned


def test_equal_distances_are_one_pattern() -> None:
    first, second = (np.array([start, start + 16], np.uint64) for start in (4096, 8192))
    assert global_pattern(first) is global_pattern(second)


def test_patterns_are_bounded() -> None:
    for offset in range(MAX_PATTERNS + 10):
        last = shared_pattern(np.array([4 * offset, 8], np.uint32))
    assert isinstance(last, SharedPattern)
    assert len(patterns._shared) <= MAX_PATTERNS


def test_all_true() -> None:
    assert all_true(np.ones((2, 3), bool))
    assert not all_true(np.array([True, False]))
    assert all_true(np.zeros(0, bool))

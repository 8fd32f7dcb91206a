"""The trace of a large buffer records what an array of its units would."""

from __future__ import annotations

import numpy as np

from cute_mla.simulator.state.global_trace import SparseEntries


def test_sparse_entries_are_those_of_an_array() -> None:
    draw = np.random.default_rng(5)
    entries, array = SparseEntries(), np.zeros(1 << 18, np.int32)
    for factor in (1, 4):
        entries.refine(factor)
        array = np.repeat(array, factor)
        for value in range(1, 20):
            units = draw.integers(0, array.size, 32)[:, None] // 8 * 8 + np.arange(8)
            assert np.array_equal(entries[units], array[units])
            entries[units] = array[units] = value
            entries[units[:3]] = array[units[:3]] = np.full((3, 1), -value)
        units = np.arange(array.size)
        assert np.array_equal(entries[units], array)
    assert int(entries[array.size - 1]) == array[-1]


def test_units_far_away_take_little_memory() -> None:
    entries = SparseEntries()
    entries[np.array([1 << 40, 3])] = np.array([7, 8])
    assert (int(entries[1 << 40]), int(entries[3]), int(entries[(1 << 40) - 1])) == (7, 8, 0)
    assert entries._values.nbytes < 1 << 20

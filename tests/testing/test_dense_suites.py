"""The suites of dense decode hold what they promise: the smoke cases every factor value and every line of the edge contract."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import get_args

import pytest

from cute_mla.spec.arch import Arch
from cute_mla.spec.dense_decode import FP8, FP8_CACHE, OPERANDS, closed_variants
from cute_mla.spec.mla import ceil_div
from cute_mla.spec.split_plan import INVARIANT_SPLIT_TILES, TILE_KEYS
from cute_mla.testing.cases.base import Metadata, Outputs, QLayout, Values
from cute_mla.testing.cases.dense_decode import CacheLayout, DenseDecodeCase
from cute_mla.testing.pairwise import pairs
from cute_mla.testing.suites import suite
from cute_mla.testing.suites.dense_decode import (
    GRID_BATCH,
    GRID_H_KV,
    GRID_H_Q,
    GRID_S_K,
    GRID_S_Q,
    GRID_TYPES,
    SMOKE,
    grid,
    zero_length_cases,
)
from cute_mla.testing.suites.entries import REDUCED_TILES, SMOKE_TILES, SuiteEntry
from tests.testing.covering import variant_features

FACTORS: dict[str, tuple[object, ...]] = {
    "dtype": ("bf16", "fp16"),
    "batch": GRID_BATCH,
    "s_q": GRID_S_Q,
    "s_k": GRID_S_K,
    "h_q": GRID_H_Q,
    "h_kv": GRID_H_KV,
    "page_size": (16, 32, 64, 128),
    "varlen": (False, True),
    "causal": (False, True),
    "zero_lengths": (False, True),
    "values": get_args(Values),
    "q_layout": get_args(QLayout),
    "cache_layout": get_args(CacheLayout),
    "outputs": get_args(Outputs),
    "metadata": get_args(Metadata),
    "batch_invariant": (False, True),
    "empty_lse": (None, float("-inf")),
    "operands": OPERANDS,
}


def rows(case: DenseDecodeCase) -> int:
    """Return query rows of one KV head; 0 if there is nothing to do."""
    return case.s_q * case.h_q // case.h_kv if case.batch else 0


# Every line of the edge contract that dense decode has, and when a case exercises it.
EDGE_CONTRACT: dict[str, Callable[[DenseDecodeCase], bool]] = {
    "a request without keys": lambda case: 0 in case.key_lengths,
    "rows that causality leaves nothing": lambda case: case.has_masked_rows,
    "lse +inf for an empty row": lambda case: case.empty_lse is None and (0 in case.key_lengths or case.has_masked_rows),
    "lse -inf for an empty row": lambda case: case.empty_lse == float("-inf") and case.has_masked_rows and 0 in case.key_lengths,
    "used table entries outside the cache": lambda case: case.broken and sum(case.pages) > 4,
    "table entries past the length": lambda case: case.batch > 0,
    "NaN past a sequence's end in its last page": lambda case: any(length % case.page_size for length in case.key_lengths),
    "batch 0": lambda case: case.batch == 0,
    "bottom-right causal over several tiles": lambda case: case.causal and case.s_q > 1 and max(case.key_lengths) > TILE_KEYS,
    "offsets beyond 2^31 elements": lambda case: case.cache_layout == "far",
    "block-strided caches": lambda case: case.cache_layout == "layers",
    "sliced Q": lambda case: case.q_layout == "sliced",
    "Q that TMA cannot load": lambda case: case.q_layout == "odd",
    "outputs and workspace given": lambda case: case.outputs == "given",
    "outputs with strides": lambda case: case.outputs == "strided",
    "outputs at odd elements": lambda case: case.outputs == "odd",
    "head counts that are no multiple of a tile": lambda case: case.h_q % 64 != 0,
    "a batch-invariant request cut in two": lambda case: case.batch_invariant and max(case.key_lengths) > INVARIANT_SPLIT_TILES * TILE_KEYS,
    "a request cut into many splits": lambda case: (
        max(case.key_lengths, default=0) >= 32 * TILE_KEYS and (case.sm_count is None or case.sm_count > 64)
    ),
    "a request walked by one CTA": lambda case: (
        case.sm_count is not None and case.sm_count <= case.batch and max(case.key_lengths) > 8 * TILE_KEYS
    ),
    "CTAs that share their keys": lambda case: rows(case) > 64,
    "another number of SMs": lambda case: case.sm_count not in (None, 1),
    "a row tile that is full to the last row": lambda case: rows(case) in (64, 128),
    "a pair of CTAs of which one has no rows": lambda case: 0 < rows(case) <= 64,
    "a row tile with one row": lambda case: rows(case) % 64 == 1,
}


@pytest.mark.parametrize(("factor", "value"), [(factor, value) for factor, values in FACTORS.items() for value in values])
def test_smoke_has_every_factor_value(factor: str, value: object) -> None:
    assert any(getattr(case, factor) == value and (case.batch > 0 or factor == "batch") for case in SMOKE)


@pytest.mark.parametrize("line", EDGE_CONTRACT)
def test_smoke_has_every_line_of_the_edge_contract(line: str) -> None:
    assert any(EDGE_CONTRACT[line](case) for case in SMOKE)


def test_the_edge_contract_is_not_met_by_an_ordinary_case() -> None:
    ordinary = DenseDecodeCase(batch=2, s_k=128, h_q=64)
    met = {line for line, exercises in EDGE_CONTRACT.items() if exercises(ordinary)}
    assert met == {
        "table entries past the length", "a row tile that is full to the last row", "a pair of CTAs of which one has no rows",
    }  # fmt: skip


def test_smoke_has_every_variant(arch: Arch) -> None:
    ran = {case.problem(arch).config for case in SMOKE if rows(case)}
    assert ran == set(closed_variants(arch))


def test_smoke_is_cheap() -> None:
    assert sum(case.tiles for case in SMOKE) <= 6100
    assert max(case.tiles for case in SMOKE) <= SMOKE_TILES
    assert len({case.id for case in SMOKE}) == len(SMOKE)


def test_smoke_is_the_same_on_both_devices() -> None:
    assert suite("smoke", "dense_decode", simulated=True) == suite("smoke", "dense_decode", simulated=False) == list(map(SuiteEntry, SMOKE))


def test_the_grid_is_flashmlas() -> None:
    heads = Counter((case.h_q, case.h_kv) for case in grid("bf16"))
    assert len(heads) == 16
    assert set(heads.values()) == {4 * 3 * 3 * 2 * 2}
    assert len({case.id for case in grid("bf16")}) == 2304


def test_full_on_a_gpu_is_the_whole_grid_in_both_types() -> None:
    planned = suite("full", "dense_decode", simulated=False)
    assert {item.mode for item in planned} == {"whole"}
    running = {item.case for item in planned}
    assert len(running) == len(planned)
    assert running >= {*grid("bf16"), *grid("fp16"), *grid("bf16", FP8), *grid("bf16", FP8_CACHE), *grid("fp16", FP8_CACHE), *SMOKE}
    assert any(case.zero_lengths and case.batch == 128 for case in running)


@pytest.fixture(scope="module")
def simulated() -> list[SuiteEntry]:
    """Return the full suite of the simulated device."""
    return suite("full", "dense_decode", simulated=True)


def test_full_on_the_simulator_runs_short_cases_of_every_variant_and_feature(simulated: list[SuiteEntry]) -> None:
    whole = {item.case for item in simulated if item.mode == "whole"}
    short = {case for types in GRID_TYPES for case in grid(*types) if case.s_k <= 140 and case.batch <= 6}
    assert len(short) == 3 * 3 * 2 * 4 * (2 * 16 + 3 * 7)
    short |= {case for case in zero_length_cases() if case.batch <= 6}
    assert variant_features(short) <= variant_features(short & whole)
    assert len(short & whole) <= 150
    assert sum(case.s_k == 4096 for case in whole) >= 6


def test_full_on_the_simulator_accounts_for_every_case(simulated: list[SuiteEntry]) -> None:
    assert len(simulated) == len(suite("full", "dense_decode", simulated=False))
    assert sum(item.case.tiles for item in simulated if item.mode != "skipped") <= 15_700  # about 12 CPU minutes
    for item in simulated:
        assert bool(item.reason) == (item.mode != "whole")
    running = Counter(item.case for item in simulated if item.mode != "skipped")
    assert set(running.values()) == {1}


def test_full_on_the_simulator_covers_all_pairs_of_the_rest(simulated: list[SuiteEntry]) -> None:
    def factors(case: DenseDecodeCase) -> tuple[object, ...]:
        return case.dtype, case.operands, case.s_q, case.s_k, (case.h_q, case.h_kv), case.varlen, case.causal

    every = set().union(*(pairs(factors(case)) for types in GRID_TYPES for case in grid(*types)))  # type: ignore[arg-type]
    run = set().union(*(pairs(factors(item.case)) for item in simulated if item.mode != "skipped"))  # type: ignore[arg-type]
    assert every <= run


def test_a_reduced_case_keeps_everything_but_its_batch(simulated: list[SuiteEntry]) -> None:
    reduced = [item for item in simulated if item.mode == "reduced"]
    assert reduced
    for item in reduced:
        assert item.case.tiles <= REDUCED_TILES or item.case.batch == 1
        assert f"cut to {item.case.batch}: budget of {REDUCED_TILES} tiles" in item.reason


def test_a_seed_reaches_every_case() -> None:
    assert {item.case.seed for item in suite("full", "dense_decode", simulated=True, seed=5)} == {5}


def test_long_requests_of_the_smoke_suite_span_both_sides_of_a_cut() -> None:
    invariant = next(case for case in SMOKE if case.batch_invariant)
    assert ceil_div(max(invariant.key_lengths), TILE_KEYS) > INVARIANT_SPLIT_TILES
    assert ceil_div(min(invariant.key_lengths), TILE_KEYS) <= INVARIANT_SPLIT_TILES


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="suite is 'huge'"):
        suite("huge", "dense_decode", simulated=True)

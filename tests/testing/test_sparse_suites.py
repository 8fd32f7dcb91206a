"""The suites of sparse decode hold what they promise: the smoke cases every factor value and every line of the edge contract."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import get_args

import pytest

from cute_mla.spec.arch import Arch
from cute_mla.spec.sparse_decode import DECODED, DECODED_BESIDE, QUERY_AND_CACHE, closed_variants, serving_kernels
from cute_mla.spec.split_plan import INVARIANT_SPLIT_TILES, TILE_KEYS
from cute_mla.testing.cases.base import Metadata, Outputs, QLayout
from cute_mla.testing.cases.sparse_decode import Pool, SparseCacheLayout, SparseDecodeCase, SparseValues
from cute_mla.testing.cases.sparse_indices import IndexLayout, Indices, Sinks
from cute_mla.testing.pairwise import pairs
from cute_mla.testing.suites import suite
from cute_mla.testing.suites.entries import REDUCED_TILES, SMOKE_TILES, SuiteEntry
from cute_mla.testing.suites.sparse_decode import GRID_POOLS, HEADS, SMOKE, TOPKS, full_cases, grid
from tests.testing.covering import variant_features

FACTORS: dict[str, tuple[object, ...]] = {
    "s_q": (1, 2, 3),
    "h_q": HEADS,
    "values": get_args(SparseValues),
    "power_of_two": (False, True),
    "q_layout": get_args(QLayout),
    "cache_layout": get_args(SparseCacheLayout),
    "indices": get_args(Indices),
    "index_layout": get_args(IndexLayout),
    "sinks": get_args(Sinks),
    "outputs": get_args(Outputs),
    "metadata": tuple(value for value in get_args(Metadata) if value != "longer"),  # of dense decode
    "batch_invariant": (False, True),
    "empty_lse": (None, float("-inf")),
}
POOL_FACTORS: dict[str, tuple[object, ...]] = {
    "topk": (1, 63, 64, 65, 576, 2048),
    "page_size": (1, 2, 61, 64, 69, 576),
    "lengths": (None, "drawn", "zeros", "edges"),
}


def per_cache(case: SparseDecodeCase) -> list[tuple[int, ...]]:
    """Return how many indices of each cache are valid, for each request with two caches."""
    return list(zip(*case.counts, strict=True)) if case.extra is not None else []


# Every line of the edge contract that sparse decode has, and when a case exercises it.
EDGE_CONTRACT: dict[str, Callable[[SparseDecodeCase], bool]] = {
    "a request without keys": lambda case: 0 in case.key_counts,
    "tokens whose indices are all invalid": lambda case: case.indices == "none",
    "such tokens beside others": lambda case: case.indices == "mixed" and case.batch * case.s_q > 3,
    "lse +inf for an empty row": lambda case: case.empty_lse is None and (0 in case.key_counts or case.indices == "none"),
    "lse -inf for an empty row": lambda case: case.empty_lse == float("-inf") and case.indices == "none",
    "lse -inf for a request without keys": lambda case: case.empty_lse == float("-inf") and 0 in case.counts[0],
    "a sink where there is nothing else": lambda case: case.sinks != "none" and case.indices == "none",
    "a whole tile of invalid indices in front of valid ones": lambda case: case.indices == "mixed" and case.main.topk > TILE_KEYS + 6,
    "invalid indices in both caches": lambda case: case.indices == "mixed" and case.extra is not None,
    "a tile with keys of both caches": lambda case: any(main % TILE_KEYS and extra for main, extra in per_cache(case)),
    "nothing in the first cache": lambda case: any(not main and extra for main, extra in per_cache(case)),
    "nothing in the second cache": lambda case: any(main and not extra for main, extra in per_cache(case)),
    "lengths to be clipped": lambda case: any(
        lengths is not None and min(lengths, default=0) < 0 and max(lengths) > case.main.topk for lengths in case.topk_lengths
    ),
    "fewer keys than indices": lambda case: case.main.topk > case.main.s_k or case.indices == "mixed",
    "infinite sinks on every kind of head": lambda case: case.sinks == "infinite" and case.h_q >= 3,
    "sinks of a request cut into many splits": lambda case: case.sinks != "none" and max(case.key_counts, default=0) >= 32 * TILE_KEYS,
    "batch 0": lambda case: case.batch == 0,
    "offsets beyond 2^32 bytes": lambda case: case.cache_layout == "far",
    "block-strided caches": lambda case: case.cache_layout == "layers",
    "block-strided pages with scales behind": lambda case: case.cache_layout == "layers" and case.cache == "fp8_584",
    "Q that TMA cannot load": lambda case: case.q_layout == "odd",
    "outputs and workspace given": lambda case: case.outputs == "given",
    "head counts that are no multiple of a tile": lambda case: case.h_q % 64 != 0,
    "scales that are not powers of two": lambda case: case.cache == "fp8_656" and not case.power_of_two,
    "a batch-invariant request cut in two, in its second cache": lambda case: (
        case.batch_invariant and max(case.key_counts) > INVARIANT_SPLIT_TILES * TILE_KEYS > max(case.counts[0])
    ),
    "a batch-invariant request that is not cut": lambda case: case.batch_invariant and min(case.key_counts) < 8 * TILE_KEYS,
    "requests walked by one CTA": lambda case: case.sm_count is not None and case.sm_count < case.batch,
    "a request walked by one CTA": lambda case: (
        case.sm_count is not None and case.sm_count <= case.batch and max(case.key_counts) > 8 * TILE_KEYS
    ),
    "another number of SMs": lambda case: case.sm_count not in (None, 1),
    "a row tile that is full to the last row": lambda case: case.batch > 0 and case.h_q in (64, 128),
    "a pair of CTAs of which one has no rows": lambda case: case.batch > 0 and case.h_q <= 64,
    "two full row tiles": lambda case: case.batch > 0 and case.h_q == 128,
}


@pytest.mark.parametrize(("factor", "value"), [(factor, value) for factor, values in FACTORS.items() for value in values])
def test_smoke_has_every_factor_value(factor: str, value: object) -> None:
    assert any(getattr(case, factor) == value and case.batch for case in SMOKE)


@pytest.mark.parametrize(("factor", "value"), [(factor, value) for factor, values in POOL_FACTORS.items() for value in values])
def test_smoke_has_every_value_of_a_pool(factor: str, value: object) -> None:
    assert any(getattr(pool, factor) == value for case in SMOKE for pool in case.pools if case.batch)


@pytest.mark.parametrize("line", EDGE_CONTRACT)
def test_smoke_has_every_line_of_the_edge_contract(line: str) -> None:
    assert any(EDGE_CONTRACT[line](case) for case in SMOKE)


def test_the_edge_contract_is_not_met_by_an_ordinary_case() -> None:
    ordinary = SparseDecodeCase(batch=2, h_q=64, main=Pool(512, 128))
    assert {line for line, exercises in EDGE_CONTRACT.items() if exercises(ordinary)} == {
        "scales that are not powers of two", "a row tile that is full to the last row", "a pair of CTAs of which one has no rows",
    }  # fmt: skip


def test_smoke_has_every_variant(arch: Arch) -> None:
    assert {case.problem(arch).config for case in SMOKE if case.batch} == set(closed_variants(arch))


def test_smoke_has_every_format_with_either_kind_of_problem() -> None:
    """A second cache, of every format that one may have beside the first, and lengths."""
    assert {case.cache for case in SMOKE if case.extra is not None} == set(DECODED)
    assert {case.cache for case in SMOKE if case.main.lengths is not None} == set(DECODED)
    assert {case.cache for case in SMOKE if case.indices == "mixed"} == set(DECODED)
    pairs = {(case.cache, case.extra_format.name) for case in SMOKE if case.extra is not None}
    assert pairs == {
        (first, second) for first in DECODED for second in DECODED_BESIDE if serving_kernels(DECODED[first], DECODED_BESIDE[second])
    }


def test_smoke_is_cheap() -> None:
    assert sum(case.tiles for case in SMOKE) <= 3320
    assert max(case.tiles for case in SMOKE) <= SMOKE_TILES
    assert len({case.id for case in SMOKE}) == len(SMOKE)


def test_smoke_is_the_same_on_both_devices() -> None:
    assert (
        suite("smoke", "sparse_decode", simulated=True) == suite("smoke", "sparse_decode", simulated=False) == list(map(SuiteEntry, SMOKE))
    )


def test_the_grid_is_flashmlas() -> None:
    cases = list(grid())
    assert {(pool.s_k, pool.topk, pool.page_size) for pool in GRID_POOLS} == {
        *((512, 64, 2), (512, 64, 64), (512, 64, 69), (1024, 576, 2), (1024, 576, 61)),
        *((2046, 2048, 2), (2046, 2048, 64), (2046, 2048, 576)),
    }
    of_format = Counter((case.dtype, case.cache, case.extra_cache) for case in cases)
    alone, shapes, plain_or_not = 8, 3 * 2 * 2, 2
    assert of_format == {
        **{(dtype, cache, ""): alone * shapes * plain_or_not * (1 if cache == "latent" else 1 + 8) for dtype, cache in QUERY_AND_CACHE},
        ("bf16", "v41", "v41_fp4"): alone * shapes * plain_or_not * 8,
    }
    assert len({case.id for case in cases}) == len(cases)


def test_full_on_a_gpu_is_the_whole_grid_with_the_corners() -> None:
    planned = suite("full", "sparse_decode", simulated=False)
    assert {item.mode for item in planned} == {"whole"}
    running = {item.case for item in planned}
    assert len(running) == len(planned)
    assert running >= {*grid(), *SMOKE}
    for dtype, cache in QUERY_AND_CACHE:
        ours = [case for case in running if (case.dtype, case.cache) == (dtype, cache)]
        assert {case.h_q for case in ours} >= set(HEADS)
        assert {case.main.topk for case in ours} >= set(TOPKS)
        assert {case.indices for case in ours} == {"valid", "mixed", "none"}
        assert any(case.main.lengths == "zeros" for case in ours)
        assert any(case.extra is not None for case in ours)


@pytest.fixture(scope="module")
def simulated() -> list[SuiteEntry[SparseDecodeCase]]:
    """Return the full suite of the simulated device."""
    return suite("full", "sparse_decode", simulated=True)


def test_full_on_the_simulator_runs_short_cases_of_every_variant_and_feature(simulated: list[SuiteEntry[SparseDecodeCase]]) -> None:
    whole = {item.case for item in simulated if item.mode == "whole"}
    short = {case for case in grid() if case.batch <= 6 and all(pool.topk <= 64 for pool in case.pools)}
    assert len(short) == 2 * 2 * 3 * 2 * (5 * 4 + 2 + 3)
    assert variant_features(short) <= variant_features(short & whole)
    assert len(short & whole) <= 60
    assert sum(max(case.key_counts) >= 4096 for case in whole if case.batch) >= 5


def test_full_on_the_simulator_accounts_for_every_case(simulated: list[SuiteEntry[SparseDecodeCase]]) -> None:
    assert len(simulated) == len(full_cases())
    assert sum(item.case.tiles for item in simulated if item.mode != "skipped") <= 21_000  # about 20 CPU minutes
    for item in simulated:
        assert bool(item.reason) == (item.mode != "whole")
    running = Counter(item.case for item in simulated if item.mode != "skipped")
    assert set(running.values()) == {1}


def test_full_on_the_simulator_covers_all_pairs_of_the_rest(simulated: list[SuiteEntry[SparseDecodeCase]]) -> None:
    def factors(case: SparseDecodeCase) -> tuple[object, ...]:
        extra = None if case.extra is None else case.extra._replace(lengths=None)
        return (case.dtype, case.cache, case.extra_cache), case.s_q, case.h_q, case.main._replace(lengths=None), extra, case.sinks

    every = set().union(*(pairs(factors(case)) for case in grid()))  # type: ignore[arg-type]
    run = set().union(*(pairs(factors(item.case)) for item in simulated if item.mode != "skipped"))  # type: ignore[arg-type]
    assert every <= run


def test_a_reduced_case_keeps_everything_but_its_batch(simulated: list[SuiteEntry[SparseDecodeCase]]) -> None:
    reduced = [item for item in simulated if item.mode == "reduced"]
    assert reduced
    for item in reduced:
        assert item.case.tiles <= REDUCED_TILES or item.case.batch == 1
        assert f"cut to {item.case.batch}: budget of {REDUCED_TILES} tiles" in item.reason


def test_a_seed_reaches_every_case() -> None:
    assert {item.case.seed for item in suite("full", "sparse_decode", simulated=True, seed=5)} == {5}

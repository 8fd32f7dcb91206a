"""The suites of sparse prefill hold what they promise: the smoke cases every factor value and every line of the edge contract."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise, product
from typing import get_args

import pytest

from cute_mla.spec.arch import ARCHS, Arch
from cute_mla.spec.mla import ceil_div
from cute_mla.spec.sparse_prefill import closed_variants
from cute_mla.spec.split_plan import TILE_KEYS
from cute_mla.testing.cases.base import Outputs, QLayout
from cute_mla.testing.cases.sparse_indices import IndexLayout, Indices, Sinks
from cute_mla.testing.cases.sparse_prefill import Form, KvLayout, PrefillValues, SparsePrefillCase
from cute_mla.testing.pairwise import pairs
from cute_mla.testing.suites import suite
from cute_mla.testing.suites.entries import REDUCED_TILES, SMOKE_TILES, SuiteEntry
from cute_mla.testing.suites.sparse_prefill import HEADS, SHORT_TILES, SMOKE, TOPKS, full_cases, grid
from tests.testing.covering import variant_features

FACTORS: dict[str, tuple[object, ...]] = {
    "dtype": ("bf16", "fp16"),
    "d_qk": (576, 512),
    "h_q": HEADS,
    "topk": (1, 63, 64, 65, 2048),
    "form": get_args(Form),
    "lengths": (None, "drawn", "zeros", "edges"),
    "values": get_args(PrefillValues),
    "q_layout": get_args(QLayout),
    "kv_layout": get_args(KvLayout),
    "indices": get_args(Indices),
    "index_layout": get_args(IndexLayout),
    "sinks": get_args(Sinks),
    "outputs": get_args(Outputs),
    "empty_lse": (None, float("-inf")),
}


def walks(case: SparsePrefillCase) -> list[list[int]]:
    """On every architecture, of each group of CTAs that walks several tokens, how many tiles these have, one after the other."""
    groups = [(case.problem(arch).grid(case.sm_count or arch.sm_count)[2], case.tokens) for arch in ARCHS.values()] if case.tokens else []
    tiles = [ceil_div(count, TILE_KEYS) for count in case.counts]
    return [tiles[group::number] for number, tokens in groups for group in range(number) if tokens > number]


def follows(case: SparsePrefillCase, before: Callable[[int], bool], after: Callable[[int], bool]) -> bool:
    """Return whether a token of so many tiles follows one of so many on the same CTAs."""
    return any(before(x) and after(y) for tiles in walks(case) for x, y in pairwise(tiles))


# Every line of the edge contract that sparse prefill has, and when a case exercises it.
EDGE_CONTRACT: dict[str, Callable[[SparsePrefillCase], bool]] = {
    "a token without keys": lambda case: 0 in case.counts,
    "tokens whose indices are all invalid": lambda case: case.indices == "none",
    "such tokens beside others": lambda case: case.indices == "mixed" and case.tokens > 3,
    "lse +inf for an empty row": lambda case: case.empty_lse is None and 0 in case.counts,
    "lse -inf for an empty row": lambda case: case.empty_lse == float("-inf") and case.indices == "none",
    "a sink where there is nothing else": lambda case: case.sinks != "none" and (case.indices == "none" or 0 in case.counts),
    "infinite sinks on every kind of head": lambda case: case.sinks == "infinite" and case.h_q >= 3,
    "a whole tile of invalid indices in front of valid ones": lambda case: case.indices == "mixed" and case.topk > TILE_KEYS + 6,
    "a whole tile of them in the middle": lambda case: case.indices == "mixed" and case.tokens > 2 and max(case.counts) > 3 * TILE_KEYS,
    "lengths to be clipped": lambda case: (
        case.topk_lengths is not None and min(case.topk_lengths) < 0 and max(case.topk_lengths) > case.topk
    ),
    "fewer rows than indices": lambda case: case.topk > case.s_kv,
    "a request without rows": lambda case: any(rows == 0 for _, rows in case.row_ranges),
    "offsets to be clipped": lambda case: case.form == "clipped" and case.batch > 2,
    "indices that only a neighbour has": lambda case: case.form in ("ragged", "clipped") and case.indices == "mixed",
    "batch 0": lambda case: case.batch == 0,
    "offsets beyond 2^32 bytes": lambda case: case.kv_layout == "far",
    "one layer of several": lambda case: case.kv_layout == "layers",
    "Q that wide accesses cannot load": lambda case: case.q_layout == "odd",
    "outputs given": lambda case: case.outputs == "given",
    "outputs with strides": lambda case: case.outputs == "strided",
    "head counts that are no multiple of a tile": lambda case: case.h_q % 64 != 0,
    "a row tile that is full to the last row": lambda case: case.tokens > 0 and case.h_q in (64, 128),
    "a pair of CTAs of which one has no rows": lambda case: case.tokens > 0 and case.h_q <= 64,
    "more tokens than groups of CTAs": lambda case: bool(walks(case)),
    "a group of CTAs that walks many tokens": lambda case: any(len(tiles) >= 12 for tiles in walks(case)),
    "a token without tiles between others": lambda case: any(
        x and not y and z for tiles in walks(case) for x, y, z in zip(tiles, tiles[1:], tiles[2:], strict=False)
    ),
    "tokens without tiles one after the other": lambda case: follows(case, lambda x: x == 0, lambda y: y == 0),
    "a long token after one of a single tile": lambda case: follows(case, lambda x: x == 1, lambda y: y > 4),
    "a single tile after a long token": lambda case: follows(case, lambda x: x > 4, lambda y: y == 1),
    "nothing after a long token": lambda case: follows(case, lambda x: x > 4, lambda y: y == 0),
    "odd and even numbers of tiles after each other": lambda case: (
        follows(case, lambda x: x % 2 == 1, lambda y: y > 0) and follows(case, lambda x: x > 0 and x % 2 == 0, lambda y: y % 2 == 1)
    ),
    "long loops walked by one CTA": lambda case: any(len(tiles) > 1 and min(tiles) > 8 for tiles in walks(case)),
}


@pytest.mark.parametrize(("factor", "value"), [(factor, value) for factor, values in FACTORS.items() for value in values])
def test_smoke_has_every_factor_value(factor: str, value: object) -> None:
    assert any(getattr(case, factor) == value and case.tokens for case in SMOKE)


@pytest.mark.parametrize("line", EDGE_CONTRACT)
def test_smoke_has_every_line_of_the_edge_contract(line: str) -> None:
    assert any(EDGE_CONTRACT[line](case) for case in SMOKE)


def test_the_edge_contract_is_not_met_by_an_ordinary_case() -> None:
    ordinary = SparsePrefillCase(s_q=2, h_q=64, s_kv=512, topk=128)
    assert {line for line, exercises in EDGE_CONTRACT.items() if exercises(ordinary)} == {
        "a row tile that is full to the last row", "a pair of CTAs of which one has no rows",
    }  # fmt: skip


def test_smoke_has_every_variant(arch: Arch) -> None:
    assert {case.problem(arch).config for case in SMOKE if case.tokens} == set(closed_variants(arch))


def test_smoke_has_every_variant_walk_several_tokens(arch: Arch) -> None:
    """With valid indices: nowhere do the seams between tokens show but in a variant's own loop."""
    walked = {
        case.problem(arch).config
        for case in SMOKE
        if case.tokens and case.problem(arch).grid(case.sm_count or arch.sm_count)[2] < case.tokens
    }
    assert {config.d_qk for config in walked} == {576, 512}
    assert {config.dtype for config in walked} == {"bf16", "fp16"}
    assert {config.cluster for config in walked} == {config.cluster for config in closed_variants(arch)}
    assert {config.access_bytes for config in walked} == {config.access_bytes for config in closed_variants(arch)}


def test_smoke_is_cheap() -> None:
    assert sum(case.tiles for case in SMOKE) <= 1900
    assert max(case.tiles for case in SMOKE) <= SMOKE_TILES
    assert len({case.id for case in SMOKE}) == len(SMOKE)


def test_smoke_is_the_same_on_both_devices() -> None:
    assert (
        suite("smoke", "sparse_prefill", simulated=True)
        == suite("smoke", "sparse_prefill", simulated=False)
        == list(map(SuiteEntry, SMOKE))
    )


def test_the_grid_is_flashmlas() -> None:
    cases = list(grid())
    assert {(case.s_kv, case.topk) for case in cases} == {
        *((128, 128), (256, 256), (512, 512), (592, 128), (1840, 256), (1592, 384), (1521, 512), (95, 128), (153, 256), (114, 384)),
    }
    every = product(("bf16", "fp16"), (576, 512), (64, 128), (1, 62, 213), ("valid", "mixed"))
    assert Counter((case.dtype, case.d_qk, case.h_q, case.s_q, case.indices) for case in cases) == dict.fromkeys(every, 10)
    assert len({case.id for case in cases}) == len(cases) == 480


def test_full_on_a_gpu_is_the_whole_grid_with_the_corners() -> None:
    planned = suite("full", "sparse_prefill", simulated=False)
    assert {item.mode for item in planned} == {"whole"}
    running = {item.case for item in planned}
    assert len(running) == len(planned)
    assert running >= {*grid(), *SMOKE}
    for dtype, d_qk in product(("bf16", "fp16"), (576, 512)):
        ours = [case for case in running if (case.dtype, case.d_qk) == (dtype, d_qk)]
        assert {case.h_q for case in ours} >= set(HEADS)
        assert {case.topk for case in ours} >= set(TOPKS)
        assert {(case.s_kv, case.topk) for case in ours} >= {(32, 2048), (64, 8192)}
        assert {case.indices for case in ours} == {"valid", "mixed", "none"}
        assert {case.values for case in ours} >= {"normal", "amplified", "rising"}
        assert {case.form for case in ours} >= {"single", "batched", "ragged"}


@pytest.fixture(scope="module")
def simulated() -> list[SuiteEntry[SparsePrefillCase]]:
    """Return the full suite of the simulated device."""
    return suite("full", "sparse_prefill", simulated=True)


def test_full_on_the_simulator_runs_short_cases_of_every_variant_and_feature(simulated: list[SuiteEntry[SparsePrefillCase]]) -> None:
    whole = {item.case for item in simulated if item.mode == "whole"}
    single = {case for case in grid() if case.s_q == 1}
    short = {case for case in grid() if case.s_q == 62 and case.topk == 128 and case.h_q == 64}
    assert len(single) == 160
    assert len(short) == 3 * 2 * 2 * 2
    assert max(case.tiles for case in short) <= SHORT_TILES
    short |= single
    assert variant_features(short) <= variant_features(short & whole)
    assert len(short & whole) <= 100
    assert sum(max(case.counts, default=0) >= 4096 for case in whole) >= 3


def test_full_on_the_simulator_accounts_for_every_case(simulated: list[SuiteEntry[SparsePrefillCase]]) -> None:
    assert len(simulated) == len(full_cases())
    assert sum(item.case.tiles for item in simulated if item.mode != "skipped") <= 13_000
    for item in simulated:
        assert bool(item.reason) == (item.mode != "whole")
    running = Counter(item.case for item in simulated if item.mode != "skipped")
    assert set(running.values()) == {1}


def test_full_on_the_simulator_covers_all_pairs_of_the_rest(simulated: list[SuiteEntry[SparsePrefillCase]]) -> None:
    def factors(case: SparsePrefillCase) -> tuple[object, ...]:
        return case.dtype, case.d_qk, case.h_q, (case.s_kv, case.topk), case.indices

    every = set().union(*(pairs(factors(case)) for case in grid()))  # type: ignore[arg-type]
    run = set().union(*(pairs(factors(item.case)) for item in simulated if item.mode != "skipped"))  # type: ignore[arg-type]
    assert every <= run


def test_a_reduced_case_keeps_everything_but_its_query_tokens(simulated: list[SuiteEntry[SparsePrefillCase]]) -> None:
    reduced = [item for item in simulated if item.mode == "reduced"]
    assert reduced
    for item in reduced:
        assert item.case.tiles <= REDUCED_TILES or item.case.s_q == 1
        assert item.case.s_q > 10, "many tokens all the same"
        assert f"cut to {item.case.s_q}: budget of {REDUCED_TILES} tiles" in item.reason
        assert item.reason.startswith(("s_q 62 cut", "s_q 213 cut"))


def test_a_seed_reaches_every_case() -> None:
    assert {item.case.seed for item in suite("full", "sparse_prefill", simulated=True, seed=5)} == {5}

"""The suites of dense prefill hold what they promise: the smoke cases every factor value and every line of the edge contract."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise, product
from typing import get_args

import pytest

from cute_mla.spec import masked_prefill
from cute_mla.spec.arch import ARCHS, Arch
from cute_mla.spec.dense_prefill import closed_variants
from cute_mla.testing.cases.base import Outputs, QLayout, Values
from cute_mla.testing.cases.dense_prefill import DensePrefillCase, Ends, KvLayout, Mask, Neighbours
from cute_mla.testing.pairwise import pairs
from cute_mla.testing.suites import suite
from cute_mla.testing.suites.dense_prefill import SHORT_TILES, SMOKE, full_cases, grid
from cute_mla.testing.suites.entries import REDUCED_TILES, SMOKE_TILES, SuiteEntry
from tests.testing.covering import variant_features

FACTORS: dict[str, tuple[object, ...]] = {
    "dtype": ("bf16", "fp16"),
    "d_qk": (192, 128),
    "causal": (False, True),
    "values": get_args(Values),
    "q_layout": tuple(layout for layout in get_args(QLayout) if layout != "far_requests"),
    "outputs": tuple(outputs for outputs in get_args(Outputs) if outputs != "far_requests"),
    "kv_layout": get_args(KvLayout),
    "ends": get_args(Ends),
    "neighbours": get_args(Neighbours),
    "empty_lse": (None, float("-inf")),
}
LENGTHS = (0, 1, 17, 63, 64, 65, 127, 128, 129, 257)


def most_items(case: DensePrefillCase) -> int:
    """Return items that one CTA walks, on the architecture where it walks fewest."""
    problems = [(case.problem(arch), case.sm_count or arch.sm_count) for arch in ARCHS.values()]
    return min(problem.items // max(problem.grid(sm_count)[0], 1) for problem, sm_count in problems)


def has(case: DensePrefillCase, of: Callable[[int, int], bool]) -> bool:
    """Return whether a sequence has these numbers of query tokens and keys."""
    return any(of(s_q, s_k) for s_q, s_k in case.lengths)


# Every line of the edge contract that dense prefill has, and when a case exercises it.
EDGE_CONTRACT: dict[str, Callable[[DensePrefillCase], bool]] = {
    "a sequence without query tokens": lambda case: has(case, lambda s_q, s_k: s_q == 0 < s_k),
    "a sequence without keys": lambda case: has(case, lambda s_q, s_k: s_q > 0 == s_k),
    "a sequence without either": lambda case: has(case, lambda s_q, s_k: s_q == s_k == 0),
    "no sequences": lambda case: not case.lengths,
    "no keys at all": lambda case: bool(case.total_q) and max(s_k for _, s_k in case.lengths) == 0,
    "rows that see nothing beside rows that see some": lambda case: case.causal and has(case, lambda s_q, s_k: s_q > s_k > 0),
    "a block of rows that see nothing": lambda case: case.causal and has(case, lambda s_q, s_k: s_k > 0 and s_q - s_k >= 64),
    "lse +inf for an empty row": lambda case: case.empty_lse is None and has(case, lambda s_q, s_k: s_q > 0 == s_k),
    "lse -inf for an empty row": lambda case: case.empty_lse == float("-inf") and has(case, lambda s_q, s_k: s_q > 0 == s_k),
    "more keys than query tokens, causal": lambda case: case.causal and has(case, lambda s_q, s_k: 0 < s_q < s_k),
    "more query tokens than keys, full": lambda case: not case.causal and has(case, lambda s_q, s_k: s_q > s_k > 0),
    "heads that share keys": lambda case: case.group > 1,
    "groups of heads of several KV heads": lambda case: case.group > 1 and case.h_kv > 1,
    "a head for each KV head": lambda case: case.group == 1 and case.h_kv > 1,
    "tokens of nobody around the sequences": lambda case: case.ends == "margins" and case.total_q > case.q_starts[-1],
    "offsets to be clipped": lambda case: case.ends == "clipped" and len(case.lengths) > 1,
    "NaN behind a sequence's last key": lambda case: case.neighbours == "nan" and case.lengths[1][1] > 0 and case.lengths[0][1] % 128 != 0,
    "a NaN neighbour that has query tokens": lambda case: case.neighbours == "nan" and case.lengths[1][0] > 0,
    "a sequence behind NaN": lambda case: case.neighbours == "nan" and len(case.lengths) > 2 and case.lengths[2][0] > 0,
    "Q that TMA cannot load": lambda case: case.q_layout == "odd",
    "keys and values in one tensor": lambda case: case.kv_layout == "kvpacked",
    "outputs given": lambda case: case.outputs == "given",
    "outputs with strides": lambda case: case.outputs == "strided",
    "a CTA that walks many items": lambda case: most_items(case) >= 10,
    "long loops one after the other on a CTA": lambda case: most_items(case) >= 4 and has(case, lambda s_q, s_k: s_k >= 700),
    "a single tile after a long loop": lambda case: case.sm_count == 1 and any(
        (x[1] > 256 and 0 < y[1] <= 128) or (0 < x[1] <= 128 and y[1] > 256) for x, y in pairwise(case.lengths)
    ),
}  # fmt: skip


@pytest.mark.parametrize(("factor", "value"), [(factor, value) for factor, values in FACTORS.items() for value in values])
def test_smoke_has_every_factor_value(factor: str, value: object) -> None:
    assert any(getattr(case, factor) == value and case.tiles for case in SMOKE)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_smoke_has_every_length_of_queries_and_of_keys(length: int, causal: bool) -> None:
    """Causal and full together for query tokens, each for keys."""
    assert any(has(case, lambda s_q, s_k: s_q == length) for case in SMOKE)
    assert any(has(case, lambda s_q, s_k: s_k == length and (s_q > 0 or s_k == 0)) for case in SMOKE if case.causal == causal), length


@pytest.mark.parametrize("line", EDGE_CONTRACT)
def test_smoke_has_every_line_of_the_edge_contract(line: str) -> None:
    assert any(EDGE_CONTRACT[line](case) for case in SMOKE)


def test_the_edge_contract_is_not_met_by_an_ordinary_case() -> None:
    ordinary = DensePrefillCase(lengths=((128, 128), (256, 256)))
    assert [line for line, exercises in EDGE_CONTRACT.items() if exercises(ordinary)] == []


def test_smoke_has_every_variant(arch: Arch) -> None:
    assert {case.problem(arch).config for case in SMOKE if case.tiles} == set(closed_variants(arch))


def test_smoke_has_every_mask_in_every_variant_that_takes_one(arch: Arch) -> None:
    for config in masked_prefill.closed_variants(arch):
        own = [case for case in SMOKE if case.kernel_op == "masked_prefill" and case.problem(arch).config == config]
        assert {case.mask for case in own} == set(get_args(Mask))
        assert {case.mask_layout for case in own} == {"packed", "padded", "far_tokens"}
        assert {case.causal for case in own} == {False, True}


def test_smoke_has_every_variant_walk_several_items(arch: Arch) -> None:
    """Nowhere do the seams between items show but in a variant's own loop."""
    walked = {
        case.problem(arch).config
        for case in SMOKE
        if case.sm_count and case.problem(arch).items > case.problem(arch).grid(case.sm_count)[0]
    }
    assert walked == set(closed_variants(arch))


def test_smoke_is_cheap() -> None:
    assert sum(case.tiles for case in SMOKE) <= 2220
    assert max(case.tiles for case in SMOKE) <= SMOKE_TILES
    assert len({case.id for case in SMOKE}) == len(SMOKE)


def test_smoke_is_the_same_on_both_devices() -> None:
    assert (
        suite("smoke", "dense_prefill", simulated=True) == suite("smoke", "dense_prefill", simulated=False) == list(map(SuiteEntry, SMOKE))
    )


def test_the_grid_has_every_length_over_every_head_count() -> None:
    cases = list(grid())
    assert {(case.h_kv, case.group) for case in cases} == set(product((1, 5), (1, 4, 8)))
    kinds = (*product(("bf16", "fp16"), (192, 128)), ("bf16", 256))
    shapes = product(kinds, (True, False), (1, 5), (1, 4, 8), (1, 17, 64, 127, 128, 129, 257, 1000))
    every = {(*kind, *shape) for kind, *shape in shapes}
    for same in (True, False):
        found = [case for case in cases if (case.lengths[0][0] == case.lengths[0][1]) == same]
        assert Counter((case.dtype, case.d_qk, case.causal, case.h_kv, case.group, case.lengths[0][0]) for case in found) == dict.fromkeys(
            every, 1
        )
    assert len({case.id for case in cases}) == len(cases) == 960


def test_full_on_a_gpu_is_the_whole_grid_with_the_corners() -> None:
    planned = suite("full", "dense_prefill", simulated=False)
    assert {item.mode for item in planned} == {"whole"}
    running = {item.case for item in planned}
    assert len(running) == len(planned)
    assert running >= {*grid(), *SMOKE}
    for arch in ARCHS.values():
        corners = {case.problem(arch).config for case in running if len(case.lengths) == 9}
        assert corners == set(closed_variants(arch)), "all lengths in one call"
    assert max(case.max_seqlen_k for case in running if case.mask is None) == 4096
    assert max(case.max_seqlen_k for case in running if case.mask) > 2 * 4096  # three parts of an item


@pytest.fixture(scope="module")
def simulated() -> list[SuiteEntry[DensePrefillCase]]:
    """Return the full suite of the simulated device."""
    return suite("full", "dense_prefill", simulated=True)


def test_full_on_the_simulator_runs_short_cases_of_every_variant_and_feature(simulated: list[SuiteEntry[DensePrefillCase]]) -> None:
    whole = {item.case for item in simulated if item.mode == "whole"}
    short = {case for case in grid() if case.tiles <= SHORT_TILES}
    assert len(short) > 500
    assert {case for case in grid() if case.max_seqlen_q <= 127 and case.max_seqlen_k <= 129 and case.h_q <= 20} <= short
    assert variant_features(short) <= variant_features(short & whole)
    assert len(short & whole) <= 100


def test_full_on_the_simulator_accounts_for_every_case(simulated: list[SuiteEntry[DensePrefillCase]]) -> None:
    assert len(simulated) == len(full_cases())
    assert sum(item.case.tiles for item in simulated if item.mode != "skipped") <= 13_500
    for item in simulated:
        assert bool(item.reason) == (item.mode != "whole")
    running = Counter(item.case for item in simulated if item.mode != "skipped")
    assert set(running.values()) == {1}


def test_full_on_the_simulator_covers_all_pairs_of_the_rest(simulated: list[SuiteEntry[DensePrefillCase]]) -> None:
    """But those of many heads that share a KV head and 1,000 query tokens, whose heads are what is cut."""

    def factors(case: DensePrefillCase) -> tuple[object, ...]:
        return case.dtype, case.d_qk, case.causal, case.h_kv, case.lengths

    every = set().union(*(pairs(factors(case)) for case in grid()))  # type: ignore[arg-type]
    run = set().union(*(pairs(factors(item.case)) for item in simulated if item.mode != "skipped"))  # type: ignore[arg-type]
    assert every <= run
    groups = {(case.group, case.lengths) for case in grid() if case.max_seqlen_q < 1000}
    assert groups <= {(item.case.group, item.case.lengths) for item in simulated if item.mode != "skipped"}


def test_a_reduced_case_keeps_everything_but_heads_that_share_keys(simulated: list[SuiteEntry[DensePrefillCase]]) -> None:
    for item in simulated:
        assert item.mode == "skipped" or item.case.tiles <= REDUCED_TILES or item.case.group == 1
        assert item.mode != "reduced" or f"cut to {item.case.group}: budget of {REDUCED_TILES} tiles" in item.reason


def test_a_seed_reaches_every_case() -> None:
    assert {item.case.seed for item in suite("full", "dense_prefill", simulated=True, seed=5)} == {5}

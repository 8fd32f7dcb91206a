"""The suites of the backward pass hold what they promise: the smoke cases every factor value and every line of the edge contract."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import get_args

import pytest

from cute_mla.manifest import kernel_name
from cute_mla.spec.arch import SM90, Arch
from cute_mla.spec.dense_prefill_dkdv import closed_variants as dkdv_variants
from cute_mla.spec.dense_prefill_dq import closed_variants as dq_variants
from cute_mla.testing.cases.base import Outputs, QLayout
from cute_mla.testing.cases.dense_prefill import Ends, KvLayout, Neighbours
from cute_mla.testing.cases.dense_prefill_backward import DensePrefillBackwardCase, DoutLayout
from cute_mla.testing.suites import suite
from cute_mla.testing.suites.dense_prefill_backward import SHORT_TILES, SMOKE, corner_cases, full_cases, grid
from cute_mla.testing.suites.entries import SMOKE_TILES
from cute_mla.testing.suites.quick import kernels_of
from tests.testing.covering import variant_features

FACTORS: dict[str, tuple[object, ...]] = {
    "dtype": ("bf16", "fp16"),
    "d_qk": (192, 128),
    "causal": (False, True),
    "values": ("normal", "opposed", "steps", "peaks", "cliff"),
    "q_layout": tuple(layout for layout in get_args(QLayout) if layout != "far_requests"),
    "dout_layout": tuple(layout for layout in get_args(DoutLayout) if layout not in ("far_requests", "even")),
    "saved": tuple(saved for saved in get_args(Outputs) if saved not in ("far_requests", "allocated")),
    "outputs": tuple(outputs for outputs in get_args(Outputs) if outputs != "far_requests"),
    "kv_layout": get_args(KvLayout),
    "ends": get_args(Ends),
    "neighbours": get_args(Neighbours),
    "empty_lse": (None, float("-inf")),
}
LENGTHS = (0, 1, 17, 63, 64, 65, 129, 130)

CONTRACT: dict[str, Callable[[DensePrefillBackwardCase], bool]] = {
    "no sequences": lambda case: not case.lengths,
    "no query tokens, keys": lambda case: any(s_q == 0 < s_k for s_q, s_k in case.lengths),
    "query tokens, no keys": lambda case: any(s_k == 0 < s_q for s_q, s_k in case.lengths),
    "no query tokens at all": lambda case: case.total_q == 0 < case.total_k,
    "rows that see nothing": lambda case: case.causal and any(s_q > s_k > 0 for s_q, s_k in case.lengths),
    "keys before the rows": lambda case: case.causal and any(s_k > s_q > 0 for s_q, s_k in case.lengths),
    "tokens of no sequence": lambda case: case.ends == "margins" and case.outputs != "allocated",
    "NaN in neighbours": lambda case: case.neighbours == "nan" and len(case.lengths) > 1,
    "rows with an infinite lse that see keys": lambda case: case.holes,
    "rows that are left out": lambda case: len(case.left_out) > 0,
    "grouped heads": lambda case: case.group > 1 and case.h_kv > 1,
    "many short sequences": lambda case: len(case.lengths) > 64,
    "several items a CTA": lambda case: case.dq_problem(SM90).items > 2 * (case.sm_count or SM90.sm_count),
}


@pytest.mark.parametrize(("factor", "value"), [(factor, value) for factor, values in FACTORS.items() for value in values])
def test_smoke_has_every_factor_value(factor: str, value: object) -> None:
    assert any(getattr(case, factor) == value for case in SMOKE)


@pytest.mark.parametrize(("length", "causal"), list(product(LENGTHS, (False, True))))
def test_smoke_has_every_length_of_queries_and_of_keys(length: int, causal: bool) -> None:
    lengths = [pair for case in SMOKE if case.causal == causal for pair in case.lengths]
    assert length in {s_q for s_q, _ in lengths} | {s_k for _, s_k in lengths}


@pytest.mark.parametrize("line", CONTRACT)
def test_smoke_has_every_line_of_the_edge_contract(line: str) -> None:
    assert any(CONTRACT[line](case) for case in SMOKE)


def test_the_edge_contract_is_not_met_by_an_ordinary_case() -> None:
    assert not any(meets(DensePrefillBackwardCase(ends="clipped")) for meets in CONTRACT.values())


def test_smoke_has_every_variant(arch: Arch) -> None:
    shipped = {kernel_name("dense_prefill_dq", arch.name, config.name) for config in dq_variants(arch)}
    shipped |= {kernel_name("dense_prefill_dkdv", arch.name, config.name) for config in dkdv_variants(arch)}
    assert {name for case in SMOKE for name in kernels_of(case, arch)} == shipped


def test_smoke_is_cheap() -> None:
    assert max(case.tiles for case in SMOKE) <= SMOKE_TILES
    assert sum(case.tiles for case in SMOKE) <= 2250
    assert len({case.id for case in SMOKE}) == len(SMOKE)


def test_quick_has_kernels_of_both_kinds_and_both_types(arch: Arch) -> None:
    names = {name for entry in suite("quick", "dense_prefill_backward", simulated=True) for name in kernels_of(entry.case, arch)}
    for kernel, dtype in product(("dq", "dkdv"), ("bf16", "fp16")):
        assert any(name.startswith(f"dense_prefill_{kernel}_{arch.name}_{dtype}") for name in names)


def test_full_is_the_grid_with_the_corners() -> None:
    whole = full_cases()
    assert {*SMOKE, *grid()} < set(whole)
    assert [entry.case for entry in suite("full", "dense_prefill_backward", simulated=False)] == whole
    simulated = suite("full", "dense_prefill_backward", simulated=True)
    assert len(simulated) == len(whole)
    running = {entry.case for entry in simulated if entry.mode != "skipped"}
    assert running >= {*SMOKE, *corner_cases()}
    short = {case for case in grid() if case.tiles <= SHORT_TILES}
    assert variant_features(short) <= variant_features(short & running)
    assert sum(case.tiles for case in running) <= 8_900

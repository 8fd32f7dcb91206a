"""The suites of the cache kernels hold what they promise: the smoke cases every factor value and every line of the contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch

from cute_mla.spec.arch import Arch
from cute_mla.spec.cache_rows import CACHED, closed_variants
from cute_mla.testing.cases.cache_gather import CacheGatherCase, make_cache_gather_tensors
from cute_mla.testing.cases.cache_write import CacheWriteCase, KeyLayout, KeyValues, SlotType, make_cache_write_tensors
from cute_mla.testing.cases.paged_cache import PagedCacheCase, PagedLayout, allocate_cache
from cute_mla.testing.operations import operation
from cute_mla.testing.suites import suite
from cute_mla.testing.suites.cache_gather import SMOKE as GATHER_SMOKE
from cute_mla.testing.suites.cache_gather import full_cases as full_gathers
from cute_mla.testing.suites.cache_write import SMOKE as WRITE_SMOKE
from cute_mla.testing.suites.cache_write import full_cases as full_writes
from cute_mla.testing.suites.entries import SMOKE_TILES
from cute_mla.testing.suites.paged_cache import TOKENS

SUITES: dict[str, tuple[PagedCacheCase, ...]] = {"cache_write": WRITE_SMOKE, "cache_gather": GATHER_SMOKE}
FACTORS: dict[str, dict[str, tuple[object, ...]]] = {
    "cache_write": {
        "cache": tuple(CACHED),
        "dtype": ("bf16", "fp16"),
        "tokens": TOKENS,
        "values": get_args(KeyValues),
        "key_layout": get_args(KeyLayout),
        "slot_type": get_args(SlotType),
        "cache_layout": get_args(PagedLayout),
        "power_of_two": (False, True),
    },
    "cache_gather": {
        "cache": tuple(CACHED),
        "dtype": ("bf16", "fp16"),
        "outputs": ("allocated", "given", "strided", "odd"),
        "cache_layout": get_args(PagedLayout),
        "broken": (False, True),
    },
}
CONTRACT: dict[str, dict[str, Callable[..., bool]]] = {
    "cache_write": {
        "odd pages of 584 bytes a token": lambda case: case.cache == "fp8_584" and case.page_size % 2 == 1,
        "pages of one token": lambda case: case.page_size == 1 and case.tokens > 0,
        "a scale of the cache": lambda case: case.scale_of_cache is not None,
        "none": lambda case: case.cache == "fp8_576" and case.scale_of_cache is None,
    },
    "cache_gather": {
        "a request without keys between others": lambda case: 0 in case.lengths[1:-1],
        "chunks that begin inside a page": lambda case: any(start % case.page_size for start in case.firsts),
        "chunks that begin with a page": lambda case: any(start and start % case.page_size == 0 for start in case.firsts),
        "more requests than a warp has lanes": lambda case: len(case.lengths) > 64,
        "rows behind the last": lambda case: case.rest > 0 and case.keys > 0,
        "rows for fewer keys than there are": lambda case: case.rest < 0,
        "rows behind the keys of one request": lambda case: len(case.lengths) == 1 and case.rest > 0,
        "a last request with keys that is the first of a warp's load": lambda case: len(case.lengths) % 32 == 1 and case.lengths[-1] > 0,
        "no requests": lambda case: not case.lengths,
        "odd pages": lambda case: case.page_size % 2 == 1,
    },
}


@pytest.mark.parametrize(
    ("op", "factor", "value"), [(op, f, v) for op, factors in FACTORS.items() for f, values in factors.items() for v in values]
)
def test_smoke_has_every_factor_value(op: str, factor: str, value: object) -> None:
    assert any(getattr(case, factor) == value for case in SUITES[op])


@pytest.mark.parametrize(("op", "line"), [(op, line) for op, lines in CONTRACT.items() for line in lines])
def test_smoke_has_every_line_of_the_contract(op: str, line: str) -> None:
    assert any(CONTRACT[op][line](case) for case in SUITES[op])


@pytest.mark.parametrize("op", SUITES)
def test_smoke_has_every_variant(op: str, arch: Arch) -> None:
    assert {case.problem(arch).config for case in SUITES[op] if case.keys} == set(closed_variants())


@pytest.mark.parametrize("op", SUITES)
def test_smoke_is_small_and_each_case_is_there_once(op: str) -> None:
    assert sum(case.tiles for case in SUITES[op]) <= 140
    assert all(case.tiles <= SMOKE_TILES for case in SUITES[op])
    assert len({case.id for case in SUITES[op]}) == len(SUITES[op])
    assert [item.case for item in suite("smoke", op, simulated=True)] == list(SUITES[op])


@pytest.mark.parametrize("op", SUITES)
def test_full_is_run_whole(op: str) -> None:
    every = full_writes() if op == "cache_write" else full_gathers()
    assert len(every) == len({case.id for case in every}) > 80
    assert [item.mode for item in suite("full", op, simulated=True)] == ["whole"] * len(every)


def test_slots_are_distinct_but_for_those_outside() -> None:
    for case in (case for case in (*WRITE_SMOKE, *full_writes()) if case.tokens):
        slots = make_cache_write_tensors(case).slot_mapping.long()
        inside = slots[(slots >= 0) & (slots < case.pages * case.page_size)]
        assert len(inside.unique()) == len(inside) >= case.tokens * 3 // 4
        assert case.tokens < 5 or len(inside) < case.tokens


def test_nasty_values_are_nasty() -> None:
    tensors = make_cache_write_tensors(CacheWriteCase(cache="fp8_656", values="nasty"))
    keys = tensors.kv_c
    assert keys.isnan().any()
    assert keys.isinf().any()
    assert (keys == 0).view(-1, 4, 128).all(dim=-1).any()
    assert ((keys != 0) & (keys.abs() < torch.finfo(keys.dtype).tiny)).any()
    assert (keys.abs() == torch.finfo(keys.dtype).max).any()
    assert ((keys == 0) & keys.signbit()).any()
    largest = torch.frexp(keys.float().abs().view(-1, 8, 64).amax(dim=-1) / 448)
    assert (largest.mantissa == 0.5).all(dim=-1).any()  # powers of two
    assert keys.isinf().view(-1, 8, 64).any(dim=-1).any(dim=0)[1:].all()


@pytest.mark.parametrize("cache", CACHED)
def test_what_no_length_uses_is_nan(cache: str) -> None:
    case = CacheGatherCase(cache=cache, lengths=(3,), starts=(2,), page_size=16)
    tensors = make_cache_gather_tensors(case)
    (out,) = operation(case).reference(case, tensors)
    assert out.isfinite().all()
    whole = CacheGatherCase(cache=cache, lengths=(16,), page_size=16)
    table, tensors = tensors.block_table, make_cache_gather_tensors(case)
    (out,) = operation(whole).reference(whole, tensors)
    assert out.isnan().any(dim=1).tolist() == [not 2 <= row < 5 for row in range(16)]
    assert table.shape == (1, 1)


@pytest.mark.parametrize("layout", get_args(PagedLayout))
def test_pages_lie_where_the_layout_says(layout: PagedLayout) -> None:
    case = CacheWriteCase(cache="fp8_656", cache_layout=layout, page_size=8)
    cache = allocate_cache(case, torch.device("cpu"))
    assert (cache == 0xFF).all()
    last = cache[-1].data_ptr() - cache.data_ptr()
    if layout == "far_rows":
        last = cache[0, -1].data_ptr() - cache.data_ptr()
    far = last >= 1 << 32
    assert {"packed": last == 3 * 8 * 656, "layers": last == 9 * 8 * 656, "far": far, "far_rows": far}[layout]

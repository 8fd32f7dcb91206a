"""Bits of sparse decode: equal for equal inputs, under every schedule; and calls with a plan made for other lengths.

What batch_invariant promises beyond that is tested in tests/ops/batch_invariance/test_batch_invariance.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_mla
from cute_mla.spec.sparse_decode import DECODED
from cute_mla.testing.cases.sparse_decode import Pool, SparseDecodeCase, SparseDecodeTensors, make_sparse_decode_tensors
from cute_mla.testing.runner import call, schedules
from tests.support.bench import Bench, Result, expect, identical

MIXED = SparseDecodeCase(
    batch=3, s_q=2, h_q=10, main=Pool(512, 140, 61, (140, 70, 0)), extra=Pool(256, 90, 64, (90, 0, 65)),
    indices="mixed", sinks="drawn", sm_count=14,
)  # fmt: skip


@pytest.mark.parametrize(("cache", "extra_cache"), [*((cache, "") for cache in DECODED), ("v41", "v41_fp4")], ids=[*DECODED, "v41_fp4"])
def test_every_schedule_gives_the_same_bits(bench: Bench, cache: str, extra_cache: str) -> None:
    records = bench.judge(replace(MIXED, cache=cache, extra_cache=extra_cache), *schedules(4, 0))
    assert len(records) == 4


def planned(tensors: SparseDecodeTensors, plan: tuple[Tensor, Tensor], **options: Any) -> Result:
    """Decode MIXED with a plan made beforehand."""
    return cute_mla.flash_mla_with_kvcache(
        tensors.q,
        tensors.k_cache,
        None,
        None,
        512,
        *plan,
        is_fp8_kvcache=True,
        indices=tensors.indices,
        attn_sink=tensors.attn_sink,
        topk_length=tensors.topk_length,
        extra_k_cache=tensors.extra_k_cache,
        extra_indices_in_kvcache=tensors.extra_indices,
        extra_topk_length=tensors.extra_topk_length,
        **options,
    )


def told(tensors: SparseDecodeTensors, lengths: list[int] | None, extra: list[int] | None) -> SparseDecodeTensors:
    """Return the operands with other lengths."""
    as_tensors = [None if given is None else torch.tensor(given, dtype=torch.int32) for given in (lengths, extra)]
    return replace(tensors, topk_length=as_tensors[0], extra_topk_length=as_tensors[1])


OTHER_LENGTHS = [([0, 140, 1], None), (None, [0, 0, 90]), ([0, 0, 0], [0, 7, 0])]


def spacious() -> SparseDecodeTensors:
    """Return operands of MIXED in which every index counts, so that nothing that lengths may reach is NaN."""
    return make_sparse_decode_tensors(replace(MIXED, main=Pool(512, 140, 61), extra=Pool(256, 90, 64)))


@pytest.mark.parametrize(("topk", "invariant"), [(230, False), (1, False), (20_000, False), (1, True)])
def test_a_plan_made_for_another_number_of_indices_gives_the_right_answer(bench: Bench, topk: int, invariant: bool) -> None:
    tensors = spacious()
    with cute_mla.simulate(bench.arch, 14):
        plan = cute_mla.get_mla_metadata(torch.zeros(3, dtype=torch.int32), 20, 1, 10, True, topk)
        for lengths in OTHER_LENGTHS:
            used = told(tensors, *lengths)
            expect(MIXED, used, planned(used, plan, batch_invariant=invariant))


def test_a_schedule_object_used_with_other_lengths_gives_the_right_answer(bench: Bench) -> None:
    tensors = spacious()
    with cute_mla.simulate(bench.arch, 14) as device:
        schedule = cute_mla.get_mla_metadata()
        for lengths in OTHER_LENGTHS:
            used = told(tensors, *lengths)
            expect(MIXED, used, planned(used, schedule))  # type: ignore[arg-type]
        assert device.launches == 1 + 2 * len(OTHER_LENGTHS), "planned once"


@pytest.mark.parametrize("value", [1, -1, (1 << 31) - 1])
def test_numbers_that_are_no_plan_end_and_keep_to_the_operands(bench: Bench, value: int) -> None:
    case = replace(MIXED, batch=2, main=Pool(128, 100, 64, (100, 3)), extra=Pool(64, 30, 2, (0, 30)))
    tensors = make_sparse_decode_tensors(case)
    with cute_mla.simulate(bench.arch, 14, on_finding="collect") as device:
        plan = cute_mla.get_mla_metadata(torch.zeros(2, dtype=torch.int32), 20, 1, 10, True, 130)
        for part in plan:
            part.fill_(value)
        for invariant in (False, True):
            planned(tensors, plan, batch_invariant=invariant)
    assert {finding.kind for finding in device.findings} <= {"poison"}, device.findings


def test_int8_and_e4m3_views_of_a_cache_are_the_same_cache(bench: Bench) -> None:
    case = replace(MIXED, batch=1, s_q=1, h_q=3, main=Pool(128, 100, 64), extra=Pool(64, 30, 2))
    tensors = make_sparse_decode_tensors(case)
    results = []
    for dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn):
        assert tensors.extra_k_cache is not None
        views = replace(tensors, k_cache=tensors.k_cache.view(dtype), extra_k_cache=tensors.extra_k_cache.view(dtype))
        with cute_mla.simulate(bench.arch, case.sm_count):
            results.append(call(case, views))
    assert all(identical(results[0], result) for result in results[1:])

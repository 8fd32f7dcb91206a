"""Bits of dense decode: equal for equal inputs, under every schedule; and calls with a plan made for other lengths.

What batch_invariant promises beyond that is tested in tests/ops/batch_invariance/test_batch_invariance.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_mla
from cute_mla.testing.cases.dense_decode import DenseDecodeCase, DenseDecodeTensors, make_dense_decode_tensors
from cute_mla.testing.runner import Schedule, schedules
from tests.support.bench import Bench, Result, expect, identical
from tests.support.decoding import with_lengths

MIXED = DenseDecodeCase(batch=3, s_q=2, lengths=(500, 70, 260), h_q=40, causal=True, sm_count=9)


def decode_planned(tensors: DenseDecodeTensors, plan: tuple[Tensor, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """Decode with a plan made beforehand."""
    return cute_mla.flash_mla_with_kvcache(
        tensors.q, tensors.k_cache, tensors.block_table, tensors.cache_seqlens, 512, *plan, causal=True, **options
    )


def test_the_same_inputs_give_the_same_bits(bench: Bench) -> None:
    tensors = make_dense_decode_tensors(MIXED)
    assert identical(bench.run(MIXED, tensors), bench.run(MIXED, tensors))


def test_every_schedule_gives_the_same_bits(bench: Bench) -> None:
    records = bench.judge(MIXED, *schedules(4, 0), Schedule("random", 1), Schedule("adversarial", 1))
    assert len(records) == 6


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_schedule_gives_the_same_bits_in_clusters(bench: Bench, dtype: str) -> None:
    bench.judge(DenseDecodeCase(dtype, batch=2, lengths=(300, 65), h_q=128, page_size=32, values="rising", sm_count=6), *schedules(4, 3))


OTHER_LENGTHS = [[500, 70, 260], [70, 500, 260], [0, 1, 512], [512, 512, 512], [0, 0, 0], [1, 2, 3]]


def spacious() -> DenseDecodeTensors:
    """Return operands of MIXED in which every request has 512 keys."""
    return make_dense_decode_tensors(replace(MIXED, lengths=(512, 512, 512)))


@pytest.mark.parametrize("invariant", [False, True])
def test_a_plan_used_with_other_lengths_gives_the_right_answer(bench: Bench, invariant: bool) -> None:
    """And a batch-invariant call the bits that it has with any plan."""
    tensors = spacious()
    results: list[list[Result]] = [[] for _ in OTHER_LENGTHS]
    with cute_mla.simulate(bench.arch, 12):
        for number, planned_for in enumerate(([500, 70, 260], [0, 0, 0], [1, 512, 64])):
            plan = cute_mla.get_mla_metadata(torch.tensor(planned_for, dtype=torch.int32), 80, 1, 40)
            for i, (lengths, found) in enumerate(zip(OTHER_LENGTHS, results, strict=True)):
                if i % 3 == number:
                    continue  # two plans for each
                used = with_lengths(tensors, lengths)
                found.append(decode_planned(used, plan, batch_invariant=invariant))
                expect(MIXED, used, found[-1])
    assert all(identical(found[0], other) for found in results for other in found[1:]) == invariant


def test_a_schedule_object_used_with_other_lengths_gives_the_right_answer(bench: Bench) -> None:
    tensors = spacious()
    with cute_mla.simulate(bench.arch, 12):
        schedule, none = cute_mla.get_mla_metadata()
        for lengths in OTHER_LENGTHS:
            used = with_lengths(tensors, lengths)
            expect(MIXED, used, decode_planned(used, (schedule, none)))  # type: ignore[arg-type]


def test_layers_share_a_schedule_object(bench: Bench) -> None:
    with cute_mla.simulate(bench.arch, 12) as device:
        schedule, none = cute_mla.get_mla_metadata()
        for layer in range(3):
            tensors = make_dense_decode_tensors(replace(MIXED, seed=layer))
            expect(MIXED, tensors, decode_planned(tensors, (schedule, none)))  # type: ignore[arg-type]
        assert device.launches == 1 + 3 * 2, "planned once"

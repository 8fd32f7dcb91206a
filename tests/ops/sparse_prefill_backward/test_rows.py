"""Rows that tokens add to the gradient of the latent, before they are summed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_mla.spec.arch import Arch
from cute_mla.testing.compare import same_bits
from tests.ops.sparse_prefill_backward.rows import call_of, expect, run

SCHEDULES = (("round_robin", 0), ("lazy", 0), ("adversarial", 0), ("random", 1), ("random", 2))
SHAPES = ((1, 576), (64, 576), (65, 512), (128, 576), (16, 512))  # heads, columns


@pytest.mark.parametrize("shape", SHAPES)
def test_rows(arch: Arch, shape: tuple[int, int]) -> None:
    expect(*run(arch, call_of(130), (0, 6), shape))


@pytest.mark.parametrize("schedule", SCHEDULES[1:])
@pytest.mark.parametrize("shape", [(64, 576), (128, 576)])
def test_schedules(arch: Arch, shape: tuple[int, int], schedule: tuple[str, int]) -> None:
    call = call_of(130)
    usual, expected = run(arch, call, (0, 6), shape)
    actual, _ = run(arch, call, (0, 6), shape, schedule)
    expect(actual, expected)
    assert same_bits(actual, usual)


@pytest.mark.parametrize("shape", [(64, 576), (96, 512)])
def test_machine_code(arch: Arch, shape: tuple[int, int]) -> None:
    """Compare with fp64, and bit for bit with PTX."""
    call = call_of(70)
    actual, expected = run(arch, call, (0, 6), shape, code="sass")
    expect(actual, expected)
    assert same_bits(actual, run(arch, call, (0, 6), shape)[0])


@pytest.mark.parametrize("topk", [1, 63, 64, 65])
def test_chunks_lengths_and_packed_rows(arch: Arch, topk: int) -> None:
    """A chunk has the bits of the whole, on a device with other SMs too; lengths cut tokens short, and offsets leave rows out."""
    call = call_of(topk)
    lengths = torch.tensor([[topk, 0, 1], [topk + 1, -1, topk // 2]], dtype=torch.int32)
    call = replace(call, topk_length=lengths, kv_offsets=torch.tensor([10, 200, 250], dtype=torch.int32))
    whole, expected = run(arch, call, (0, 6), (16, 576))
    expect(whole, expected)
    assert same_bits(run(arch, call, (2, 3), (16, 576), sm_count=1)[0], whole[2:5])

"""Gradients of sparse prefill against fp64 autograd: dq, dkv and d_sink, by the kernels that make them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cute_mla.ops.key_lists import IndexedKeys
from cute_mla.spec.arch import Arch
from cute_mla.testing.compare import same_bits
from tests.ops.sparse_prefill_backward.keys import patterns
from tests.ops.sparse_prefill_backward.problems import Problem, keys_of, problem

SCHEDULES = (("lazy", 0), ("adversarial", 0), ("random", 1))


@pytest.mark.parametrize(("heads", "columns"), [(64, 576), (1, 576), (65, 512), (128, 576), (12, 512)])
def test_gradients(arch: Arch, heads: int, columns: int) -> None:
    call = problem(heads, columns, keys_of(), sinks=heads != 64, dlse=heads == 12)
    call.expect(call.run(arch))


@pytest.mark.in_turn
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("heads", "columns"), [(64, 576), (64, 512), (128, 576), (128, 512)])
def test_schedules(arch: Arch, heads: int, columns: int, schedule: tuple[str, int]) -> None:
    """No order of warps and copies changes a bit, nor does the number of SMs."""
    call = problem(heads, columns, keys_of(), sinks=True)
    result = call.run(arch, schedule=schedule)
    call.expect(result)
    for actual, usual in zip(result, call.run(arch, sm_count=1), strict=True):
        assert actual is not None
        assert usual is not None
        assert same_bits(actual, usual)


@pytest.mark.parametrize(("heads", "columns"), [(64, 576), (64, 512), (128, 576), (128, 512)])
def test_machine_code(arch: Arch, heads: int, columns: int) -> None:
    call = problem(heads, columns, keys_of(70), dlse=True)
    call.expect(call.run(arch, code="sass"))


@pytest.mark.in_turn
@pytest.mark.parametrize(("heads", "chunk_tokens"), [(16, 1), (16, 4), (16, 5), (70, 4)])
def test_chunks_do_not_change_a_bit(arch: Arch, heads: int, chunk_tokens: int) -> None:
    call = problem(heads, 576, keys_of(66, 40))
    call.expect(call.run(arch, chunk_tokens))
    for actual, usual in zip(call.run(arch, chunk_tokens)[:2], call.run(arch)[:2], strict=True):
        assert same_bits(actual, usual)


@pytest.mark.in_turn
@pytest.mark.parametrize("name", patterns())
def test_indices_of_every_kind(arch: Arch, name: str) -> None:
    keys = patterns()[name]
    if name == "two rounds":
        keys = IndexedKeys(keys.indices[..., :200] % 190, None, None, 200)
    call = problem(3, 512, keys)
    call.expect(call.run(arch, 7))


@pytest.mark.in_turn
@pytest.mark.parametrize("topk", [1, 63, 64, 65])
@pytest.mark.parametrize("heads", [20, 80])
def test_short_lists(arch: Arch, topk: int, heads: int) -> None:
    """A token with one tile, without tiles, and with tiles that name no row, in turn in one CTA."""
    lengths = torch.tensor([[topk, 0, 1], [topk + 1, -1, topk // 2]], dtype=torch.int32)
    call = problem(heads, 576, replace(keys_of(topk, 90), topk_length=lengths))
    call.expect(call.run(arch, schedule=("lazy", 0), sm_count=1))


def test_a_request_has_the_bits_that_it_has_alone(arch: Arch) -> None:
    call = problem(8, 576, keys_of(65, 60))
    dq, dkv, _ = call.run(arch)
    for request in range(2):
        saved, own = call.saved, slice(request, request + 1)
        keys = replace(saved.keys, indices=saved.keys.indices[own])
        alone = replace(saved, q=saved.q[own], kv=saved.kv[own], out=saved.out[own], lse=saved.lse[own], keys=keys)
        results = Problem(alone, call.dout[own], None, ()).run(arch)
        assert same_bits(results[0], dq[own])
        assert same_bits(results[1], dkv[60 * request : 60 * (request + 1)])


def test_strided_operands(arch: Arch) -> None:
    """Rows of wide tensors, and results in them, have the same bits."""
    call = problem(65, 576, keys_of(33, 50))
    usual, saved = call.run(arch), call.saved

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        padded = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 24), math.nan, dtype=tensor.dtype)
        return padded[..., 8:-16].copy_(tensor)

    moved = replace(saved, q=wide(saved.q), kv=wide(saved.kv), out=wide(saved.out), lse=saved.lse.mT.contiguous().mT)
    for actual, expected in zip(replace(call, saved=moved, dout=wide(call.dout)).run(arch)[:2], usual[:2], strict=True):
        assert same_bits(actual, expected)

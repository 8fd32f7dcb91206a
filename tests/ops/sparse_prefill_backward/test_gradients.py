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
@pytest.mark.parametrize("columns", [576, 512])
def test_schedules(arch: Arch, columns: int, schedule: tuple[str, int]) -> None:
    """No order of warps and copies changes a bit, nor does the number of SMs."""
    call = problem(64, columns, keys_of(), sinks=True)
    result = call.run(arch, schedule=schedule)
    call.expect(result)
    for actual, usual in zip(result, call.run(arch, sm_count=1), strict=True):
        assert actual is not None
        assert usual is not None
        assert same_bits(actual, usual)


@pytest.mark.parametrize("columns", [576, 512])
def test_machine_code(arch: Arch, columns: int) -> None:
    call = problem(64, columns, keys_of(70), dlse=True)
    call.expect(call.run(arch, code="sass"))


@pytest.mark.in_turn
@pytest.mark.parametrize("chunk_tokens", [1, 4, 5])
def test_chunks_do_not_change_a_bit(arch: Arch, chunk_tokens: int) -> None:
    call = problem(16, 576, keys_of(66, 40))
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

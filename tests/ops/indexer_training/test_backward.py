"""Gradients of an indexer's scores against fp64 autograd: dq, dk and dweights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import cute_mla
from cute_mla.indexer import indexer_backward
from cute_mla.ops.key_lists import IndexedKeys
from cute_mla.spec.arch import SM90, Arch
from cute_mla.testing.compare import same_bits
from tests.ops.indexer_training.problems import SMALL, Simulated, chosen, drawn_gradients, expect_gradients, keys_of, runs
from tests.ops.sparse_prefill_backward.keys import drawn, patterns


@pytest.mark.parametrize("heads", [64, 1, 33])
def test_gradients(heads: int, arch: Arch) -> None:
    call = chosen(keys_of(), heads, 128)
    dscores = drawn_gradients(call)
    expect_gradients(call.gradients(Simulated(arch.name), dscores), call.expected_gradients(dscores))


@pytest.mark.parametrize("name", patterns())
def test_indices_of_every_kind(name: str, arch: Arch) -> None:
    keys = patterns()[name]
    if name == "two rounds":
        keys = IndexedKeys(keys.indices[..., :200] % 190, None, None, 200)
    call = chosen(keys, 3, 128)
    dscores = drawn_gradients(call)
    expect_gradients(call.gradients(Simulated(arch.name), dscores), call.expected_gradients(dscores))


@pytest.mark.parametrize("topk", [1, 63, 64, 65])
def test_lengths(topk: int, arch: Arch) -> None:
    """Lengths of 0, less and more than topk cut tokens short; offsets leave rows out."""
    lengths = torch.tensor([[topk, 0], [topk + 1, topk // 2]], dtype=torch.int32)
    keys = replace(keys_of(topk, 300), topk_length=lengths, kv_offsets=torch.tensor([10, 200, 250], dtype=torch.int32))
    call = chosen(keys, 16, 128)
    dscores = drawn_gradients(call)
    expect_gradients(call.gradients(Simulated(arch.name), dscores), call.expected_gradients(dscores))


def test_bits_do_not_depend_on_order(arch: Arch) -> None:
    """No order of warps and copies changes a bit, nor does machine code, the number of SMs or the other request."""
    call = chosen(keys_of(70, 60), 40, 128)
    dscores = drawn_gradients(call)
    usual = call.gradients(Simulated(arch.name), dscores)
    for run in runs(arch):
        assert all(map(same_bits, call.gradients(run, dscores), usual))
    for i in range(2):
        alone = call.request(i).gradients(Simulated(arch.name), dscores[i : i + 1])
        assert all(same_bits(mine[0], whole[i]) for mine, whole in zip(alone, usual, strict=True))


def test_chunks_and_plans_do_not_change_a_bit(arch: Arch) -> None:
    """Nor does an fp32 dk that is rounded; accumulation adds."""
    call = chosen(IndexedKeys(drawn(1, 5, 12, 20) % 17, None, None, 16), 9, 128)
    dscores, run = drawn_gradients(call), Simulated(arch.name)
    usual = call.gradients(run, dscores)
    assert all(map(same_bits, call.gradients(run, dscores, max_workspace=0), usual))
    for chunk in (2, 100):
        with run.active():
            plan = cute_mla.plan_sparse_backward(call.tables()["indices"], 16, chunk_tokens=chunk)
        assert plan[0].shape == (-(-5 // chunk), 17)
        wide = torch.full((1, 16, 128), math.nan)
        assert all(map(same_bits, call.gradients(run, dscores, key_plan=plan), usual))
        first = call.gradients(run, dscores, key_plan=plan, dk=wide)[1].clone()
        assert same_bits(first.bfloat16(), usual[1])
        call.gradients(run, dscores, key_plan=plan, dk=wide, dk_accumulate=True)
        assert same_bits(wide, first + first)


def test_strided_operands_and_results_of_the_caller(arch: Arch) -> None:
    call = chosen(keys_of(65, 90), 6, 128)
    dscores, run = drawn_gradients(call), Simulated(arch.name)
    usual = call.gradients(run, dscores)
    wide = torch.full((*call.q.shape[:-1], 152), math.nan).bfloat16()[..., 8:136].copy_(call.q)
    moved = replace(call, q=wide, terms=call.terms.mT.contiguous().mT)
    given = {
        "dq": torch.full_like(call.q, math.nan),
        "dk": torch.full_like(call.k, math.nan),
        "dweights": torch.full_like(call.terms, math.nan),
    }
    results = moved.gradients(run, dscores.mT.contiguous().mT, **given)
    assert all(mine is its for mine, its in zip(results, given.values(), strict=True))
    assert all(map(same_bits, results, usual))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dscores": torch.zeros(3, 4)}, r"dscores has shape \[3, 4\]; supported: \[3, 5\]"),
        ({"dscores": torch.zeros(3, 5).bfloat16()}, "dscores has dtype torch.bfloat16; supported: torch.float32"),
        ({"dk_accumulate": True}, "dk is None with dk_accumulate; supported: a tensor in fp32, to add to"),
        ({"dk_accumulate": True, "dk": torch.zeros(9, 128).bfloat16()}, "dk has dtype torch.bfloat16; supported: torch.float32"),
        ({"dq": torch.zeros(3, 4, 136).bfloat16()[..., :128]}, "dq has shape .* supported: a contiguous tensor"),
        ({"dweights": torch.zeros(3, 4).bfloat16()}, "dweights has dtype torch.bfloat16; supported: torch.float32"),
        ({"max_workspace": -1}, "max_workspace is -1; supported: an integer, 0 or more"),
        ({"key_plan": 3}, "key_plan is 3; supported: None, and what plan_sparse_backward returns"),
        (
            {"key_plan": (torch.zeros(1, 9).int(), torch.zeros(3, 5).int())},
            r"key_plan.row_starts has shape \[1, 9\]; supported: \[chunks, 10\]",
        ),
        ({"key_plan": (torch.zeros(1, 10).int(), torch.zeros(3, 4).int())}, r"key_plan.entries has shape \[3, 4\]; supported: \[3, 5\]"),
        (
            {"key_plan": (torch.zeros(1, 10), torch.zeros(3, 5).int())},
            "key_plan.row_starts has dtype torch.float32; supported: torch.int32",
        ),
        ({"key_plan": (torch.zeros(4, 10).int(), torch.zeros(3, 5).int())}, "key_plan.row_starts has 4 chunks of 3 tokens"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    with cute_mla.simulate(SM90.name), pytest.raises(ValueError, match=message):
        indexer_backward(**{**SMALL, "dscores": torch.zeros(3, 5), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indices": torch.zeros(3, 5, dtype=torch.int32)}, r"indices has shape \[3, 5\]; supported: \[s_q, 1, topk\]"),
        ({"indices": torch.zeros(3, 1, 5)}, "indices has dtype torch.float32; supported: torch.int32"),
        ({"s_kv": -1}, "s_kv is -1; supported: an integer, 0 to"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0; supported: an integer, 1 or more"),
        ({"topk_length": torch.zeros(2).int()}, r"topk_length has shape \[2\]; supported: \[3\]"),
        ({"kv_offsets": torch.zeros(2).int()}, r"kv_offsets is given with indices of shape \[3, 1, 5\]"),
    ],
)
def test_bad_arguments_of_plans_are_refused(changes: dict[str, Any], message: str) -> None:
    with cute_mla.simulate(SM90.name), pytest.raises(ValueError, match=message):
        cute_mla.plan_sparse_backward(**{"indices": SMALL["indices"], "s_kv": 9, **changes})

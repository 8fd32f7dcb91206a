"""Sums over the heads at chosen keys: probabilities of attention, and scores of an indexer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import cute_mla
from cute_mla import reference
from cute_mla.indexer import attention_head_sums, indexer_scores
from cute_mla.ops.key_lists import IndexedKeys
from cute_mla.spec.arch import SM90, Arch
from cute_mla.testing.compare import same_bits
from tests.ops.indexer_training.problems import SCALE, SMALL, Chosen, Simulated, chosen, expect_probs, expect_scores, keys_of, runs
from tests.ops.sparse_prefill_backward.keys import patterns


@pytest.mark.parametrize(("heads", "columns"), [(128, 576), (1, 576), (65, 512)])
def test_probabilities(heads: int, columns: int, arch: Arch) -> None:
    call = chosen(keys_of(), heads, columns, sinks=heads != 1)
    expect_probs(call, call.probs(Simulated(arch.name)))


def test_heads_without_probabilities(arch: Arch) -> None:
    """Rows whose lse is infinite, and heads whose sink is inf, add nothing; a sink of -inf changes nothing."""
    call = chosen(keys_of(64, 60), 5, 512)
    call.terms[0, 0, 1], call.terms[0, 1, 2] = math.inf, -math.inf
    expect_probs(call, call.probs(Simulated(arch.name)))
    call = replace(call, sinks=torch.tensor([-math.inf, 0.5, math.inf, -math.inf, 3.0]))
    expect_probs(call, call.probs(Simulated(arch.name)))


def test_probabilities_of_attention_add_up_to_its_heads() -> None:
    """With the lse of sparse prefill over the same keys, each head has a whole 1 but for what its sink takes."""
    call = chosen(keys_of(70, 100), 3, 576)
    sinks = torch.tensor([-math.inf, 1.0, -1.0])
    with cute_mla.simulate(SM90.name, sm_count=4):
        kv = call.k.nan_to_num().unsqueeze(-2)
        _, _, lse = cute_mla.flash_mla_sparse_fwd(call.q, kv, call.tables()["indices"], SCALE, attn_sink=sinks)
        sums = attention_head_sums(call.q, kv, lse, call.tables()["indices"], SCALE, sinks)
    shares = (lse - torch.logaddexp(lse, sinks)).exp().sum(dim=-1).masked_fill(~call.named().any(dim=-1), 0.0)
    torch.testing.assert_close(sums.sum(dim=-1), shares, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("heads", [64, 1, 33])
def test_scores(heads: int, arch: Arch) -> None:
    call = chosen(keys_of(), heads, 128)
    expect_scores(call, call.scores(Simulated(arch.name)))


def test_scores_are_logits_of_the_reference(arch: Arch) -> None:
    """The scores of all keys are what fp8_mqa_logits computes, from values that both can hold."""
    draw = torch.Generator().manual_seed(2)
    q, k = (torch.randn(*shape, generator=draw).to(torch.float8_e4m3fn) for shape in ((3, 9, 128), (70, 128)))
    weights, ends = torch.randn(3, 9, generator=draw), torch.tensor([70, 0, 64], dtype=torch.int32)
    logits = reference.fp8_mqa_logits(q, (k, torch.ones(70)), weights, torch.zeros_like(ends), ends)
    with cute_mla.simulate(arch.name, sm_count=4):
        every = torch.arange(70, dtype=torch.int32).expand(3, 1, 70)
        scores = indexer_scores(q.bfloat16(), k.bfloat16(), weights, every, ends)
    torch.testing.assert_close(scores, logits, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", patterns())
def test_indices_of_every_kind(name: str, arch: Arch) -> None:
    keys = patterns()[name]
    if name == "two rounds":
        keys = IndexedKeys(keys.indices[..., :200] % 190, None, None, 200)
    call = chosen(keys, 3, 128)
    expect_scores(call, call.scores(Simulated(arch.name)))
    if arch is SM90:
        wide = chosen(replace(keys, indices=keys.indices[:, :6]) if keys.topk_length is None else keys, 2, 512)
        expect_probs(wide, wide.probs(Simulated(arch.name)))


@pytest.mark.parametrize("topk", [1, 63, 64, 65])
def test_lengths(topk: int, arch: Arch) -> None:
    """Lengths of 0, less and more than topk cut tokens short; offsets leave rows out."""
    lengths = torch.tensor([[topk, 0], [topk + 1, topk // 2]], dtype=torch.int32)
    keys = replace(keys_of(topk, 300), topk_length=lengths, kv_offsets=torch.tensor([10, 200, 250], dtype=torch.int32))
    call = chosen(keys, 16, 128)
    expect_scores(call, call.scores(Simulated(arch.name)))


def test_bits_do_not_depend_on_order(arch: Arch) -> None:
    """No order of warps and copies changes a bit, nor does machine code, the number of SMs or the other request."""
    for call, made in ((chosen(keys_of(), 40, 128), Chosen.scores), (chosen(keys_of(66, 70), 30, 576, sinks=True), Chosen.probs)):
        usual = made(call, Simulated(arch.name))
        for run in runs(arch):
            assert same_bits(made(call, run), usual)
        assert all(same_bits(made(call.request(i), Simulated(arch.name))[0], usual[i]) for i in range(2))


def test_strided_operands(arch: Arch) -> None:
    """Rows of wide tensors, transposed terms and odd addresses have the same bits; results go where the caller says."""
    call = chosen(keys_of(65, 90), 6, 128)
    usual = call.scores(Simulated(arch.name))

    def wide(tensor: torch.Tensor, first: int) -> torch.Tensor:
        padded = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 24), math.nan, dtype=tensor.dtype)
        return padded[..., first : first + tensor.shape[-1]].copy_(tensor)

    for first in (8, 3):
        moved = replace(call, q=wide(call.q, first), k=wide(call.k, 8), terms=call.terms.mT.contiguous().mT)
        assert same_bits(moved.scores(Simulated(arch.name)), usual)
    out = torch.full(usual.shape, math.nan)
    with cute_mla.simulate(arch.name, sm_count=4):
        assert indexer_scores(call.q, call.k, call.terms, **call.tables(), out=out) is out
    assert same_bits(out, usual)


def test_nan_in_a_key_reaches_its_own_sums_alone(arch: Arch) -> None:
    call = chosen(keys_of(66, 70), 3, 128)
    usual = call.scores(Simulated(arch.name))
    call.k[0, 7, 100] = math.nan
    hit = torch.zeros(usual.shape, dtype=torch.bool)
    hit[0] = call.keys.indices[0] == 7
    scores = call.scores(Simulated(arch.name))
    assert scores[hit].isnan().all()
    assert hit.any()
    assert same_bits(scores[~hit], usual[~hit])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(3, 4, 64).bfloat16()}, r"q has shape \[3, 4, 64\]; supported: \[s_q, h_q, 128\] or \[batch, s_q, h_q, 128\]"),
        ({"q": torch.zeros(3, 65, 128).bfloat16()}, r"q has shape \[3, 65, 128\]; supported: h_q 1 to 64"),
        ({"q": torch.zeros(3, 4, 128)}, "q has dtype torch.float32; supported: torch.bfloat16"),
        ({"k": torch.zeros(9, 1, 128).bfloat16()}, r"k has shape \[9, 1, 128\]; supported: \[s_kv, 128\]"),
        ({"k": torch.zeros(9, 132).bfloat16()[:, :128]}, "k has shape .* 264 bytes along dimension 0; supported: multiples of 16 bytes"),
        ({"k": torch.zeros(9, 128).half()}, "k has dtype torch.float16; supported: torch.bfloat16"),
        ({"weights": torch.zeros(3, 4).bfloat16()}, "weights has dtype torch.bfloat16; supported: torch.float32"),
        ({"weights": torch.zeros(3, 5)}, r"weights has shape \[3, 5\]; supported: \[3, 4\]"),
        ({"indices": torch.zeros(3, 5, dtype=torch.int32)}, r"indices has shape \[3, 5\]; supported: \[3, 1, topk\]"),
        ({"topk_length": torch.zeros(2, dtype=torch.int32)}, r"topk_length has shape \[2\]; supported: \[3\]"),
        ({"kv_offsets": torch.zeros(2, dtype=torch.int32)}, "kv_offsets is given with q of shape"),
        ({"out": torch.zeros(3, 6)[:, :5]}, "out has shape .* supported: a contiguous tensor"),
        ({"out": torch.zeros(3, 5).bfloat16()}, "out has dtype torch.bfloat16; supported: torch.float32"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    with cute_mla.simulate(SM90.name), pytest.raises(ValueError, match=message):
        indexer_scores(**{**SMALL, **changes})


def test_bad_arguments_of_attention_are_refused() -> None:
    call = chosen(keys_of(5, 9), 2, 512)
    with cute_mla.simulate(SM90.name):
        with pytest.raises(ValueError, match=r"kv has shape \[2, 9, 512\]; supported with a batch and no kv_offsets: \[2, s_kv, 1, 512\]"):
            attention_head_sums(call.q, call.k, call.terms, call.tables()["indices"], SCALE)
        with pytest.raises(ValueError, match="sm_scale is -1; supported: a positive finite number"):
            attention_head_sums(call.q, call.k.unsqueeze(-2), call.terms, call.tables()["indices"], -1)
        with pytest.raises(ValueError, match="lse requires grad; supported: the forward pass only"):
            attention_head_sums(call.q, call.k.unsqueeze(-2), call.terms.requires_grad_(), call.tables()["indices"], SCALE)

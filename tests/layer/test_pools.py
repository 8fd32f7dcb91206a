"""Layers whose indexer chooses pools of 16 tokens and attends to the tail behind them: GLM-5.3-Flash."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_mla
from cute_mla.layer import Indexer, IndexerWeights, MlaAttention, MlaBatch, MlaConfig, MlaWeights, PooledIndexCache, plan_sequences
from cute_mla.spec.arch import Arch
from tests.layer.dsa_models import chosen, rounded_rows
from tests.layer.mla_models import GLM_5, GLM_5_3_FLASH, PREFIX, V2_LITE, naive
from tests.layer.mla_steps import TOLERANCE, Sequences

POOL, TOPK, HEADS = 16, 32, 4
CONFIG: dict[str, Any] = {**GLM_5_3_FLASH, "index_topk": TOPK, "index_n_heads": HEADS}
CONTEXTS, ENDS, DECODES = [99, 15, 60], [101, 17, 97], 2  # two decodes, of which one completes a pool, and a prefill


def drawn(dtype: torch.dtype = torch.float32) -> Sequences:
    """Draw sequences, and weights with those of an indexer."""
    own, draw = Sequences.drawn(CONFIG, ENDS, dtype), torch.Generator().manual_seed(8)
    hidden, shapes = own.config["hidden_size"], {"wq_b": HEADS * 128, "wk": 128, "weights_proj": HEADS}
    tensors = {
        f"{name}.weight": torch.randn(rows, width, generator=draw) * width**-0.5
        for name, rows in shapes.items()
        for width in (own.config["q_lora_rank"] if name == "wq_b" else hidden,)
    }
    tensors |= {"k_norm.weight": 1 + 0.2 * torch.randn(128, generator=draw), "k_norm.bias": 0.2 * torch.randn(128, generator=draw)}
    tensors["index_kpool_compress_ape"] = torch.randn(POOL, 128, generator=draw)
    tensors["index_kpool_compress_gate"] = torch.randn(128, hidden, generator=draw) * hidden**-0.5
    return replace(own, weights=own.weights | {f"{PREFIX}indexer.{name}": tensor.to(dtype) for name, tensor in tensors.items()})


def layer_of(sequences: Sequences, *, indexed: bool = True) -> MlaAttention:
    config = MlaConfig.from_hugging_face(sequences.config)
    weights = MlaWeights.from_tensors(sequences.weights, config, prefix=PREFIX)
    return MlaAttention(
        config, weights, Indexer(config, IndexerWeights.from_tensors(sequences.weights, config, prefix=PREFIX)) if indexed else None
    )


def pools_of(sequences: Sequences) -> PooledIndexCache:
    """Return an index cache, NaN wherever nothing was written, whose pages and rows are out of order."""
    keys = torch.full((4, 16, 1, 132), 0xFF, dtype=torch.uint8)
    tail = torch.full((4, POOL + 1, 256), math.nan)
    return PooledIndexCache(keys, tail, torch.tensor([[2], [0], [3]], dtype=torch.int32), torch.tensor([3, 0, 2]))


def cut(sequences: Sequences, ends: list[int]) -> Sequences:
    """Return the sequences cut at these ends, over the same cache."""
    return replace(sequences, hidden=tuple(states[:end] for states, end in zip(sequences.hidden, ends, strict=True)))


def step(sequences: Sequences, contexts: list[int], decodes: int, cache: PooledIndexCache, layer: MlaAttention) -> tuple[Tensor, MlaBatch]:
    """Return the output of everything behind the contexts, packed, and its batch."""
    batch = sequences.plan(contexts, decodes)
    return layer(torch.cat(sequences.new_tokens(contexts)), sequences.k_cache, batch, index_cache=cache), batch


def seen(states: Tensor, weights: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    """Return bool [tokens, keys]: the tokens of the pools that a token chooses, and of its tail, by e4m3 queries and pooled keys."""
    own, hidden = {name.removeprefix(PREFIX): weight.double() for name, weight in weights.items()}, states.double()
    latent = hidden @ own["q_a_proj.weight"].T
    latent = latent / (latent.square().mean(1, keepdim=True) + config["rms_norm_eps"]).sqrt() * own["q_a_layernorm.weight"]
    keys = hidden @ own["indexer.wk.weight"].T
    keys = torch.nn.functional.layer_norm(keys, (128,), own["indexer.k_norm.weight"], own["indexer.k_norm.bias"], 1e-6)
    whole = len(states) // POOL * POOL
    gates = (hidden @ own["indexer.index_kpool_compress_gate"].T)[:whole].view(-1, POOL, 128)
    pooled = ((gates + own["indexer.index_kpool_compress_ape"]).softmax(1) * keys[:whole].view(-1, POOL, 128)).sum(1)
    q = rounded_rows((latent @ own["indexer.wq_b.weight"].T).view(-1, HEADS, 128))
    scores = torch.einsum("th,thp->tp", hidden @ own["indexer.weights_proj.weight"].T, (q @ rounded_rows(pooled).T).relu())
    token = torch.arange(len(states))
    visible = torch.arange(len(pooled)) < ((token + 1) // POOL).unsqueeze(1)
    pools = chosen(scores.masked_fill(~visible, -math.inf), TOPK // POOL).repeat_interleave(POOL, dim=1)
    tail = (token >= ((token + 1) // POOL * POOL).unsqueeze(1)) & (token <= token.unsqueeze(1))
    return torch.nn.functional.pad(pools, (0, len(states) - whole)) | tail


def sparse(states: Tensor, weights: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    """Return the layer's output over the tokens that its indexer chooses."""
    return naive(states, weights, config, seen(states, weights, config))


def test_a_mixed_batch() -> None:
    """A prompt in two pieces, then decodes beside a prefill; a second layer shares the choice; whole sequences without a cache."""
    sequences = drawn()
    cache, layer = pools_of(sequences), layer_of(sequences)
    step(cut(sequences, [40, 0, 0]), [0] * 3, 0, cache, layer)
    early = cut(sequences, CONTEXTS)
    out, _ = step(early, [40, 0, 0], 0, cache, layer)
    early.expect(out, early.expected([40, 0, 0], sparse))
    out, batch = step(sequences, CONTEXTS, DECODES, cache, layer)
    sequences.expect(out, sequences.expected(CONTEXTS, sparse))
    assert batch.selection.decode is not None
    assert batch.selection.decode.counts.tolist() == [TOPK + 101 % POOL, 17]
    shared = layer_of(sequences, indexed=False)(torch.cat(sequences.new_tokens(CONTEXTS)), sequences.k_cache, batch)
    assert torch.equal(shared, out)
    whole = layer(torch.cat(sequences.hidden), None, plan_sequences(ENDS, "cpu"))
    sequences.expect(whole, sequences.expected([0, 0, 0], sparse))


@pytest.mark.parametrize("packed", [False, True])
def test_by_the_kernels(packed: bool, arch: Arch) -> None:
    """Over 16 bits, and over 528 bytes a token, against the layer's own reference path."""
    sequences = drawn(torch.bfloat16)
    if packed:
        sequences = replace(sequences, k_cache=torch.full((*sequences.k_cache.shape[:3], 528), 0xFF, dtype=torch.uint8))
    cache, layer = pools_of(sequences), layer_of(sequences)
    step(cut(sequences, CONTEXTS), [0] * 3, 0, cache, layer)
    copies = replace(sequences, k_cache=sequences.k_cache.clone()), PooledIndexCache(cache.keys.clone(), cache.tail.clone(), *cache[2:])
    wanted, other = step(copies[0], CONTEXTS, DECODES, copies[1], layer)
    with cute_mla.simulate(arch, 2) as device:
        out, batch = step(sequences, CONTEXTS, DECODES, cache, layer)
    assert device.findings == []
    for one, same in ((batch.selection.decode, other.selection.decode), (batch.selection.prefill, other.selection.prefill)):
        assert one is not None
        assert same is not None
        assert torch.equal(one.indices, same.indices)
    assert torch.equal(cache.keys, copies[1].keys)
    assert (out.float() - wanted.float()).abs().max() <= TOLERANCE[torch.bfloat16] * wanted.float().abs().max()


def test_what_is_refused() -> None:
    sequences = drawn()
    cache, layer = pools_of(sequences), layer_of(sequences)
    batch, hidden = sequences.plan([0] * 3, 0), torch.cat(sequences.hidden)
    with pytest.raises(ValueError, match=r"index_cache is Tensor with index_kpool 16; supported: PooledIndexCache with 2 or more"):
        layer(hidden, sequences.k_cache, batch, index_cache=cache.keys)
    short = cache._replace(block_table=cache.block_table[:2])
    with pytest.raises(ValueError, match=r"block_table has shape \[2, 1\]; supported with this batch: \[3, pages per request\]"):
        layer(hidden, sequences.k_cache, batch, index_cache=short)
    narrow = cache._replace(block_table=cache.block_table[:, :0])
    with pytest.raises(ValueError, match=r"a request has 101 keys; supported with index_cache\.block_table: up to 15, in 0 pools"):
        layer(hidden, sequences.k_cache, batch, index_cache=narrow)
    with pytest.raises(ValueError, match=r"a request has 101 keys; supported"):
        step(sequences, CONTEXTS, DECODES, narrow, layer)
    with pytest.raises(ValueError, match="index_cache is None, and tokens choose their keys"):
        layer(hidden, sequences.k_cache, batch)
    for config, message in (
        ({**CONFIG, "index_topk": 40}, "index_topk is 40 with index_kpool 16; supported: a multiple of it"),
        ({**GLM_5, "index_kpool": 16}, "index_kpool is 16 with qk_rope_head_dim 64; supported: 1, or with 0"),
        ({**V2_LITE, "index_topk": 9, "index_n_heads": 4}, "q_lora_rank is None with an indexer; supported: an integer"),
    ):
        with pytest.raises(ValueError, match=message):
            IndexerWeights.from_tensors({}, MlaConfig.from_hugging_face(config))


def test_weights_come_back() -> None:
    sequences = drawn()
    config = MlaConfig.from_hugging_face(sequences.config)
    weights = IndexerWeights.from_tensors(sequences.weights, config, prefix=PREFIX)
    found = weights.to_tensors(config)
    assert found.keys() == {name.removeprefix(PREFIX) for name in sequences.weights if ".indexer." in name}
    assert all(torch.equal(tensor, sequences.weights[PREFIX + name]) for name, tensor in found.items())
    narrow = weights.to(dtype=torch.bfloat16)
    assert narrow.pool_gate is not None
    assert narrow.pool_bias is not None
    assert (narrow.pool_gate.dtype, narrow.pool_bias.dtype) == (torch.bfloat16, torch.float32)

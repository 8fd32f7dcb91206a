"""The pools that cute_mla.indexer's functions choose for GLM-5.3-Flash, beside those of transformers' own indexer in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import DynamicCache

from cute_mla import reference
from cute_mla.indexer import expand_pools, prepare_index_queries, write_pooled_index_keys
from tests.integrations.transformers_models.tiny_models import make

POOL, STEPS = 16, (150, 1, 3, 20)
TABLE = torch.tensor([[1]], dtype=torch.int32)


class Steps:
    """A request that passes through transformers' indexer and through ours: the choices of both, token by token."""

    def __init__(self, topk: int) -> None:
        model = make("glm_5_3_flash", index_topk=topk, num_hidden_layers=1, layer_types=["indexed_attention"], indexer_types=["full"])
        self.indexer: Any = next(module for module in model.modules() if hasattr(module, "index_kpool_compress_ape"))
        draw = torch.Generator().manual_seed(4)
        self.indexer.index_kpool_compress_ape.data = torch.randn(POOL, 128, generator=draw)
        self.indexer.index_kpool_compress_gate.data = torch.randn(128, self.indexer.hidden_size, generator=draw) * 0.3
        self.cache = DynamicCache(config=model.config)
        self.index_cache, self.tail = torch.zeros(2, 64, 1, 132, dtype=torch.uint8), torch.full((1, POOL, 256), torch.nan)
        self.draw, self.seen, self.pools = draw, 0, topk // POOL

    @torch.no_grad()
    def step(self, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return transformers' choice, ours and its counts, of so many new tokens, their logits of all pools by transformers, and errors.

        The latter are 6 times the standard error of a logit whose query and key are rounded to e4m3, if all errors are independent.
        """
        own = self.indexer
        hidden, latent = (torch.randn(tokens, width, generator=self.draw) for width in (own.hidden_size, own.q_lora_rank))
        self.cache.update(torch.zeros(1, 1, tokens, 1), torch.zeros(1, 1, tokens, 0), 0)
        theirs = own(hidden[None], latent[None], torch.ones(1, tokens, dtype=torch.bool), self.cache)[0]

        bounds, context = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([self.seen], dtype=torch.int32)
        keys, gates = own.k_norm(own.wk(hidden)), linear(hidden, own.index_kpool_compress_gate)
        write_pooled_index_keys(keys, gates, own.index_kpool_compress_ape, self.index_cache, TABLE, self.tail, bounds, context)
        still = torch.cat((torch.ones(tokens, 32), torch.zeros(tokens, 32)), dim=1)
        q8, weights = prepare_index_queries(own.wq_b(latent).view(tokens, -1, 128), own.weights_proj(hidden), still, rope="interleaved")
        lengths = torch.arange(self.seen + 1, self.seen + tokens + 1, dtype=torch.int32)
        pools = reference.indexer_topk(q8.unsqueeze(0), weights, self.index_cache, (lengths // POOL).unsqueeze(0), TABLE, self.pools)
        ours, counts = expand_pools(pools, lengths, POOL)

        packed = self.cache.layers[0].indexer_keys
        pooled, _, _ = own.get_pooled_states(packed)
        q, head_weights = own.wq_b(latent).view(tokens, -1, 128), own.weights_proj(hidden) * own.n_heads**-0.5
        logits = (head_weights.unsqueeze(1) @ (q @ pooled[0].T * 128**-0.5).relu()).squeeze(1)
        errors = 0.02 * 128**-0.5 * (head_weights.abs() * q.norm(dim=2)).sum(dim=1) * pooled.norm(dim=2).max()
        self.seen += tokens
        hides = torch.arange(logits.shape[1]) >= (lengths // POOL).unsqueeze(1)
        return theirs, ours, counts, logits.masked_fill(hides, -torch.inf), errors


def named(choice: Tensor) -> list[int]:
    """Return the tokens of a choice, ascending."""
    return sorted(token for token in choice.tolist() if token >= 0)


@pytest.mark.parametrize("topk", [32, 512])
def test_pools_of_transformers(topk: int) -> None:
    """A prompt, then 1, 3 and 20 tokens. Where all pools are chosen the tokens are the same, and the tail always is.

    Else each chosen pool has one of the greatest logits of transformers, but for the rounding of queries and keys to e4m3.
    """
    request, others = Steps(topk), 0
    for tokens in STEPS:
        theirs, ours, counts, logits, errors = request.step(tokens)
        for token in range(tokens):
            found, wanted = named(ours[token]), named(theirs[token])
            visible = request.seen - tokens + token + 1
            assert counts[token] == len(found) == len(wanted)
            assert ours[token][: len(found)].tolist() == found
            assert [one for one in found if one >= visible // POOL * POOL] == list(range(visible // POOL * POOL, visible))
            if visible // POOL <= topk // POOL:
                assert found == wanted
                continue
            others += found != wanted
            least = float(logits[token].topk(topk // POOL).values[-1])
            chosen = {one // POOL for one in found if one < visible // POOL * POOL}
            assert all(float(logits[token][pool]) >= least - float(errors[token]) for pool in chosen)
    assert others <= 25  # of 127 choices among more pools than are chosen, of which some have equal logits of 0

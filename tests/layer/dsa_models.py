"""Layers with sparse attention, and what they should choose and give: the indexer of a checkpoint written out in fp64.

Nothing here uses the package.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.layer.mla_models import GLM_5, PREFIX, V3, checkpoint, naive, turned

V3_2: dict[str, Any] = {**V3, "model_type": "deepseek_v32", "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
# Three layers of four share the keys of the one before them, and a theta of 8 million for a million tokens
GLM_5_2: dict[str, Any] = {
    **GLM_5,
    "model_type": "glm_moe_dsa",
    "rope_parameters": {"rope_type": "default", "rope_theta": 8_000_000},
    "max_position_embeddings": 1_048_576,
    "num_hidden_layers": 78,
    "index_topk_freq": 4,
}
SPARSE = {"v3_2": V3_2, "glm_5": GLM_5, "glm_5_2": GLM_5_2}
TOPK = 16  # of reduced configurations
E4M3_MAX = 448.0


def short_topk(config: Mapping[str, Any], topk: int = TOPK, heads: int = 4) -> dict[str, Any]:
    """Return a real configuration whose indexer chooses few keys, with few heads."""
    return {**config, "index_topk": topk, "index_n_heads": heads}


def indexer_checkpoint(config: Mapping[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """Return the weights of a layer with an indexer by Hugging Face's names."""
    draw = torch.Generator().manual_seed(seed + 100)
    hidden, heads, q_lora = config["hidden_size"], config["index_n_heads"], config["q_lora_rank"]

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=draw) * columns**-0.5

    own = {
        "wq_b.weight": matrix(heads * 128, q_lora),
        "wk.weight": matrix(128, hidden),
        "k_norm.weight": 1 + 0.2 * torch.randn(128, generator=draw),
        "k_norm.bias": 0.2 * torch.randn(128, generator=draw),
        "weights_proj.weight": matrix(heads, hidden),
    }
    return checkpoint(config, dtype, seed) | {f"{PREFIX}indexer.{name}": weight.to(dtype) for name, weight in own.items()}


class Indexed(NamedTuple):
    """Projections of a sequence by an indexer, after RoPE: q [tokens, heads, 128], k [tokens, 128], weights [tokens, heads]."""

    q: Tensor
    k: Tensor
    weights: Tensor


def indexer_projections(hidden: Tensor, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> Indexed:
    """Project the hidden states [tokens, hidden size] of a sequence, from its first token on (transformers, modeling_deepseek_v32.py)."""
    own = {name.removeprefix(PREFIX): weight.double() for name, weight in weights.items()}
    states = hidden.double()
    q_latent = states @ own["q_a_proj.weight"].T
    q_latent = q_latent / (q_latent.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * own["q_a_layernorm.weight"]
    q = (q_latent @ own["indexer.wq_b.weight"].T).view(len(hidden), config["index_n_heads"], 128)
    k = states @ own["indexer.wk.weight"].T
    k = k - k.mean(-1, keepdim=True)
    k = k / (k.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    k = k * own["indexer.k_norm.weight"] + own["indexer.k_norm.bias"]
    return Indexed(
        q=torch.cat((turned_first(q[..., :64], config), q[..., 64:]), dim=-1),
        k=torch.cat((turned_first(k[..., :64], config), k[..., 64:]), dim=-1),
        weights=states @ own["indexer.weights_proj.weight"].T * (config["index_n_heads"] * 128) ** -0.5,
    )


def turned_first(columns: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Turn the first 64 columns: neighbours are a pair in GLM-5, columns i and i + 32 in DeepSeek-V3.2."""
    if config.get("indexer_rope_interleave"):
        return turned(columns, config)
    neighbours = torch.arange(64).view(2, 32).T.flatten()  # 0, 32, 1, 33, ...
    return turned(columns[..., neighbours], config)[..., neighbours.argsort()]


def rounded_rows(rows: Tensor) -> Tensor:
    """Round rows [.., 128] to e4m3, each by the least power of two that keeps it in range, and return their values."""
    amax = rows.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    scale = 2.0 ** torch.ceil(torch.log2(amax / E4M3_MAX))
    return (rows / scale).float().to(torch.float8_e4m3fn).double() * scale


def logits(hidden: Tensor, weights: Mapping[str, Tensor], config: Mapping[str, Any], rounded: bool = True) -> Tensor:
    """Return logits fp64 [tokens, keys], -inf for later keys; of queries and keys in e4m3, or of unrounded ones."""
    own = indexer_projections(hidden, weights, config)
    q, k = (rounded_rows(own.q), rounded_rows(own.k)) if rounded else (own.q, own.k)
    scores = torch.einsum("th,thk->tk", own.weights, torch.einsum("thd,kd->thk", q, k).relu())
    future = torch.ones(len(hidden), len(hidden), dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -math.inf)


def chosen(scores: Tensor, topk: int) -> Tensor:
    """Return bool [tokens, keys], the topk greatest of a token's keys, of equal ones the first."""
    order = scores.argsort(dim=-1, descending=True, stable=True)[:, :topk]
    seen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, value=True)
    return seen & ~scores.isneginf()


def sparse(hidden: Tensor, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """Return the layer's output [tokens, hidden size] over the keys that its indexer chooses by e4m3 queries and keys."""
    return naive(hidden, weights, config, chosen(logits(hidden, weights, config), config["index_topk"]))

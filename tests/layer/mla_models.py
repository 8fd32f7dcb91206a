"""Layers to test, and what they should give: attention from the weights of a checkpoint, written out twice in fp64 and rounded to fp32.

Nothing here uses the package. `naive` decompresses every key and attends to it; `absorbed` never does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
_HEADS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "attention_bias": False}
V3: dict[str, Any] = {
    **_HEADS,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "max_position_embeddings": 163840,
}
V2_LITE: dict[str, Any] = {
    **V3,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}
# Defaults of transformers' configuration_glm_moe_dsa.py, configuration_glm5_next.py and configuration_mistral4.py. Heads of 192 + 64
# columns and 256 of values; keys of 512 columns without rotary ones; keys of 256 + 64 columns, and queries that grow with their position.
GLM_5: dict[str, Any] = {
    **_HEADS,
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000},
    "max_position_embeddings": 202752,
    "index_topk": 2048,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "indexer_rope_interleave": True,
}
GLM_5_3_FLASH: dict[str, Any] = {
    **GLM_5,
    "hidden_size": 4096,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 256,
    "qk_rope_head_dim": 0,
    "rope_parameters": None,
    "index_kpool": 16,
}
MISTRAL_SMALL_4: dict[str, Any] = {
    **_HEADS,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        **YARN,
        "rope_theta": 10000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
    "max_position_embeddings": 1048576,
}
# The same, with a context so short that the positions of tests lie far behind it.
MISTRAL_FAR: dict[str, Any] = {
    **MISTRAL_SMALL_4,
    "rope_parameters": {**MISTRAL_SMALL_4["rope_parameters"], "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5},
}
OTHER_COLUMNS = {"glm_5": GLM_5, "glm_5_3_flash": GLM_5_3_FLASH, "mistral_small_4": MISTRAL_SMALL_4, "mistral_far": MISTRAL_FAR}
# Options of Kimi K3, and those of LongCat Flash, Ling 3 and Hy4 at once
KIMI_K3: dict[str, Any] = {**V3, "rope_scaling": None, "mla_use_nope": True, "mla_use_output_gate": True}
SCALED_GATED: dict[str, Any] = {
    **V3,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "gated_attention_proj_granularity_type": "head_wise",
    "learnable_sink_init": 0.0,
}
MODELS = {"v3": V3, "v2_lite": V2_LITE, "kimi_k3": KIMI_K3, "scaled_gated": SCALED_GATED, **OTHER_COLUMNS}
PREFIX = "model.layers.0.self_attn."


def reduced(config: Mapping[str, Any], hidden: int = 96, heads: int = 3) -> dict[str, Any]:
    """Return a real configuration with fewer columns and heads."""
    return {**config, "hidden_size": hidden, "num_attention_heads": heads}


class Columns(NamedTuple):
    """Columns of a layer: of a key, latent and rotary, and of a head, without rotary embedding and of values."""

    latent: int
    rotary: int
    nope: int
    v: int

    @staticmethod
    def of(config: Mapping[str, Any]) -> Columns:
        """Return those of a configuration."""
        return Columns(*(config[name] for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")))


def checkpoint(config: Mapping[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """Return weights by Hugging Face's names, such that values stay near 1 on their way."""
    draw = torch.Generator().manual_seed(seed)
    heads, hidden, q_lora = config["num_attention_heads"], config["hidden_size"], config["q_lora_rank"]
    columns = Columns.of(config)

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=draw) * columns**-0.5).to(dtype)

    def norm(columns: int) -> Tensor:
        return (1 + 0.2 * torch.randn(columns, generator=draw)).to(dtype)

    weights = {
        "kv_a_proj_with_mqa": matrix(columns.latent + columns.rotary, hidden),
        "kv_a_layernorm": norm(columns.latent),
        "kv_b_proj": matrix(heads * (columns.nope + columns.v), columns.latent),
        "o_proj": matrix(hidden, heads * columns.v),
    }
    q_rows = heads * (columns.nope + columns.rotary)
    if q_lora is None:
        weights |= {"q_proj": matrix(q_rows, hidden)}
    else:
        weights |= {"q_a_proj": matrix(q_lora, hidden), "q_a_layernorm": norm(q_lora), "q_b_proj": matrix(q_rows, q_lora)}
    if {"mla_use_output_gate", "gated_attention_proj_granularity_type"} & config.keys():
        weights["g_proj"] = matrix(heads * (columns.v if "mla_use_output_gate" in config else 1), hidden)
    tensors = {f"{PREFIX}{name}.weight": weight for name, weight in weights.items()}
    if "learnable_sink_init" in config:
        tensors[f"{PREFIX}sinks"] = 2 + torch.randn(heads, generator=draw)
    if config["attention_bias"]:
        biased = [name for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj") if name in weights]
        tensors |= {f"{PREFIX}{name}.bias": 0.5 * matrix(1, len(weights[name]))[0] * len(weights[name]) ** 0.5 for name in biased}
    return tensors


def rope_of(config: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, float]:
    """Return YaRN's parameters, or None, and theta, from where older configurations keep them or newer ones."""
    newer = config.get("rope_parameters") or {}
    yarn = config.get("rope_scaling") or (newer if "factor" in newer else None)
    theta: float = newer["rope_theta"] if "rope_theta" in newer else config.get("rope_theta", 0.0)
    return yarn, theta


# Of the pairs that turn 32 times and once in so many positions: 10.47 and 22.51, 12.88 and 24.92, -8.79 and 3.25
_RAMPS = {4096: (10, 23), 8192: (12, 25), 16: (0, 4)}


def turned(columns: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Return rotary columns [tokens, .., 64 or 0] of the tokens 0, 1, ..., as complex numbers turned by their positions."""
    if not columns.shape[-1] or config.get("mla_use_nope"):
        return columns.double()
    pairs = torch.view_as_complex(columns.double().unflatten(-1, (-1, 2)).contiguous())
    yarn, theta = rope_of(config)
    first, last = _RAMPS[yarn["original_max_position_embeddings"]] if yarn else (0, 1)
    radians = []
    for pair in range(32):
        plain = theta ** (-pair / 32)
        share = min(max((pair - first) / (last - first), 0), 1) if yarn else 0
        radians.append(plain * (1 - share) + plain / yarn["factor"] * share if yarn else plain)
    angles = torch.outer(torch.arange(len(columns), dtype=torch.float64), torch.tensor(radians, dtype=torch.float64))
    angles = angles.view(len(columns), *[1] * (pairs.dim() - 2), 32)
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def softmax_scale(config: Mapping[str, Any]) -> float:
    """Return columns ** -0.5 of a query, times the square of YaRN's magnitude."""
    yarn, _ = rope_of(config)
    magnitude = 0.1 * yarn["mscale_all_dim"] * math.log(yarn["factor"]) + 1 if yarn else 1
    return (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5 * magnitude**2


def query_scales(tokens: int, config: Mapping[str, Any]) -> Tensor:
    """Return what the queries of the tokens 0, 1, ... are multiplied with, [tokens]."""
    yarn, _ = rope_of(config)
    if not yarn or "llama_4_scaling_beta" not in yarn:
        return torch.ones(tokens, dtype=torch.float64)
    context = yarn["original_max_position_embeddings"]
    scales = [1 + yarn["llama_4_scaling_beta"] * math.log(1 + token // context) for token in range(tokens)]
    return torch.tensor(scales, dtype=torch.float64)


@dataclass(frozen=True)
class Projected:
    """Projections of a sequence, after RoPE: q [tokens, heads, nope + rotary], latent and rotary columns of keys [tokens, columns]."""

    q: Tensor
    latent: Tensor
    rotary: Tensor


def _norm(columns: Tensor, weight: Tensor, eps: float) -> Tensor:
    return columns / (columns.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight


def project(hidden: Tensor, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> Projected:
    """Project the hidden states [tokens, hidden size] of a sequence, from its first token on."""
    own = {name.removeprefix(PREFIX).removesuffix(".weight"): weight.double() for name, weight in weights.items()}
    q_a_bias, kv_a_bias = own.get("q_a_proj.bias", 0), own.get("kv_a_proj_with_mqa.bias", 0)
    states, eps = hidden.double(), config["rms_norm_eps"]
    if config["q_lora_rank"] is None:
        q = states @ own["q_proj"].T
    else:
        q = _norm(states @ own["q_a_proj"].T + q_a_bias, own["q_a_layernorm"], eps) @ own["q_b_proj"].T
        q = q * _lora_scale("mla_scale_q_lora", "q_lora_rank", config)
    columns = Columns.of(config)
    q = q.view(len(hidden), config["num_attention_heads"], columns.nope + columns.rotary) * query_scales(len(hidden), config).view(-1, 1, 1)
    keys = states @ own["kv_a_proj_with_mqa"].T + kv_a_bias
    return Projected(
        q=torch.cat((q[..., : columns.nope], turned(q[..., columns.nope :], config)), dim=-1),
        latent=_norm(keys[:, : columns.latent], own["kv_a_layernorm"], eps) * _lora_scale("mla_scale_kv_lora", "kv_lora_rank", config),
        rotary=turned(keys[:, columns.latent :], config),
    )


def _lora_scale(key: str, rank: str, config: Mapping[str, Any]) -> float:
    return math.sqrt(config["hidden_size"] / config[rank]) if config.get(key) else 1.0


def _shares(scores: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the softmax of scores [heads, .., keys] beside the sinks, if there are any."""
    if f"{PREFIX}sinks" not in weights:
        return scores.softmax(dim=-1)
    sinks = weights[f"{PREFIX}sinks"].double().view(-1, *[1] * (scores.dim() - 1)).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]


def _output(columns: Tensor, hidden: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the output of columns [tokens, heads, v], behind their gate if there is one."""
    gate = weights.get(f"{PREFIX}g_proj.weight")
    if gate is not None:
        columns = columns * (hidden.double() @ gate.double().T).sigmoid().view(*columns.shape[:2], len(gate) // columns.shape[1])
    out = columns.flatten(1) @ weights[f"{PREFIX}o_proj.weight"].double().T
    return (out + weights.get(f"{PREFIX}o_proj.bias", torch.zeros(())).double()).float()


def naive(hidden: Tensor, weights: Mapping[str, Tensor], config: Mapping[str, Any], seen: Tensor | None = None) -> Tensor:
    """Return the layer's output [tokens, hidden size] for a whole sequence: keys and values of every head, full causal attention.

    seen: bool [tokens, tokens], the keys that each token attends to instead.
    """
    own, heads, columns = project(hidden, weights, config), config["num_attention_heads"], Columns.of(config)
    both = (own.latent @ weights[f"{PREFIX}kv_b_proj.weight"].double().T).view(-1, heads, columns.nope + columns.v)
    k = torch.cat((both[..., : columns.nope], own.rotary.unsqueeze(1).expand(-1, heads, -1)), dim=-1)
    scores = torch.einsum("ihd,jhd->hij", own.q, k) * softmax_scale(config)
    unseen = torch.ones(len(hidden), len(hidden), dtype=torch.bool).triu(1) if seen is None else ~seen
    out = torch.einsum("hij,jhd->ihd", _shares(scores.masked_fill(unseen, -math.inf), weights), both[..., columns.nope :])
    return _output(out, hidden, weights)


def absorbed(hidden: Tensor, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """Compute the result of `naive` token by token, with queries and outputs in the latent space."""
    own, heads, columns = project(hidden, weights, config), config["num_attention_heads"], Columns.of(config)
    up = weights[f"{PREFIX}kv_b_proj.weight"].double().view(heads, columns.nope + columns.v, columns.latent)
    keys = torch.cat((own.latent, own.rotary), dim=-1)
    outputs = []
    for token in range(len(hidden)):
        latent_q = torch.einsum("hd,hdc->hc", own.q[token, :, : columns.nope], up[:, : columns.nope])
        q = torch.cat((latent_q, own.q[token, :, columns.nope :]), dim=-1)
        shares = _shares(q @ keys[: token + 1].T * softmax_scale(config), weights)
        latent_out = shares @ own.latent[: token + 1]
        outputs.append(torch.einsum("hdc,hc->hd", up[:, columns.nope :], latent_out))
    stacked = torch.stack(outputs) if outputs else torch.empty(0, heads, columns.v, dtype=torch.float64)
    return _output(stacked, hidden, weights)

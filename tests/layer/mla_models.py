"""Layers to test, and what they should give: attention from the weights of a checkpoint, written out twice in fp32 or wider.

Nothing here uses the package. `naive` decompresses every key and attends to it; `absorbed` never does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
MODELS = {"v3": V3, "v2_lite": V2_LITE}
PREFIX = "model.layers.0.self_attn."


def reduced(config: Mapping[str, Any], hidden: int = 96, heads: int = 3) -> dict[str, Any]:
    """Return a real configuration with fewer columns and heads."""
    return {**config, "hidden_size": hidden, "num_attention_heads": heads}


def checkpoint(config: Mapping[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """Return weights by Hugging Face's names, such that values stay near 1 on their way."""
    draw = torch.Generator().manual_seed(seed)
    heads, hidden, q_lora = config["num_attention_heads"], config["hidden_size"], config["q_lora_rank"]

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=draw) * columns**-0.5).to(dtype)

    def norm(columns: int) -> Tensor:
        return (1 + 0.2 * torch.randn(columns, generator=draw)).to(dtype)

    weights = {"kv_a_proj_with_mqa": matrix(576, hidden), "kv_a_layernorm": norm(512), "kv_b_proj": matrix(heads * 256, 512)}
    weights |= {"o_proj": matrix(hidden, heads * 128)}
    if q_lora is None:
        weights |= {"q_proj": matrix(heads * 192, hidden)}
    else:
        weights |= {"q_a_proj": matrix(q_lora, hidden), "q_a_layernorm": norm(q_lora), "q_b_proj": matrix(heads * 192, q_lora)}
    return {f"{PREFIX}{name}.weight": weight for name, weight in weights.items()}


def turned(columns: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Return rotary columns [tokens, .., 64] of the tokens 0, 1, ..., as complex numbers turned by their positions."""
    pairs = torch.view_as_complex(columns.double().unflatten(-1, (-1, 2)).contiguous())
    yarn, theta = config["rope_scaling"], config["rope_theta"]
    first, last = 10, 23  # of the pairs that turn 32 times and once in 4096 positions, 10.47 and 22.51
    radians = []
    for pair in range(32):
        plain = theta ** (-pair / 32)
        share = min(max((pair - first) / (last - first), 0), 1) if yarn else 0
        radians.append(plain * (1 - share) + plain / yarn["factor"] * share if yarn else plain)
    angles = torch.outer(torch.arange(len(columns), dtype=torch.float64), torch.tensor(radians, dtype=torch.float64))
    angles = angles.view(len(columns), *[1] * (pairs.dim() - 2), 32)
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2).float()


def softmax_scale(config: Mapping[str, Any]) -> float:
    """192 ** -0.5, times the square of YaRN's magnitude."""
    yarn = config["rope_scaling"]
    return 192**-0.5 * ((0.1 * yarn["mscale_all_dim"] * math.log(yarn["factor"]) + 1) ** 2 if yarn else 1)


@dataclass(frozen=True)
class Projected:
    """Projections of one sequence, after RoPE: queries [tokens, heads, 192], keys' latent [tokens, 512] and rotary [tokens, 64] columns."""

    q: Tensor
    latent: Tensor
    rotary: Tensor


def _norm(columns: Tensor, weight: Tensor, eps: float) -> Tensor:
    return columns / (columns.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight


def project(hidden: Tensor, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> Projected:
    """Project the hidden states [tokens, hidden size] of a sequence, from its first token on."""
    own = {name.removeprefix(PREFIX).removesuffix(".weight"): weight.float() for name, weight in weights.items()}
    states, eps = hidden.float(), config["rms_norm_eps"]
    if config["q_lora_rank"] is None:
        q = states @ own["q_proj"].T
    else:
        q = _norm(states @ own["q_a_proj"].T, own["q_a_layernorm"], eps) @ own["q_b_proj"].T
    q = q.view(len(hidden), config["num_attention_heads"], 192)
    keys = states @ own["kv_a_proj_with_mqa"].T
    return Projected(
        q=torch.cat((q[..., :128], turned(q[..., 128:], config)), dim=-1),
        latent=_norm(keys[:, :512], own["kv_a_layernorm"], eps),
        rotary=turned(keys[:, 512:], config),
    )


def naive(hidden: Tensor, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """Return the layer's output [tokens, hidden size] for a whole sequence: keys and values of every head, full causal attention."""
    own, heads = project(hidden, weights, config), config["num_attention_heads"]
    both = (own.latent @ weights[f"{PREFIX}kv_b_proj.weight"].float().T).view(-1, heads, 256)
    k = torch.cat((both[..., :128], own.rotary.unsqueeze(1).expand(-1, heads, -1)), dim=-1)
    scores = torch.einsum("ihd,jhd->hij", own.q, k) * softmax_scale(config)
    future = torch.ones(len(hidden), len(hidden), dtype=torch.bool).triu(1)
    out = torch.einsum("hij,jhd->ihd", scores.masked_fill(future, -math.inf).softmax(dim=-1), both[..., 128:])
    return out.flatten(1) @ weights[f"{PREFIX}o_proj.weight"].float().T


def absorbed(hidden: Tensor, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """Compute the result of `naive` token by token, with queries and outputs in the latent space."""
    own, heads = project(hidden, weights, config), config["num_attention_heads"]
    up = weights[f"{PREFIX}kv_b_proj.weight"].float().view(heads, 256, 512)
    keys = torch.cat((own.latent, own.rotary), dim=-1)
    outputs = []
    for token in range(len(hidden)):
        latent_q = torch.einsum("hd,hdc->hc", own.q[token, :, :128], up[:, :128])
        q = torch.cat((latent_q, own.q[token, :, 128:]), dim=-1)
        shares = torch.softmax(q @ keys[: token + 1].T * softmax_scale(config), dim=-1)
        latent_out = shares @ own.latent[: token + 1]
        outputs.append(torch.einsum("hdc,hc->hd", up[:, 128:], latent_out).flatten())
    stacked = torch.stack(outputs) if outputs else torch.empty(0, heads * 128)
    return stacked @ weights[f"{PREFIX}o_proj.weight"].float().T

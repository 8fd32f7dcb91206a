"""Small models in files, and what they compute: Llama, Qwen2 and DeepSeek-V3 without experts, written out in the dtype that is asked for.

Nothing here uses the package. The models are those of transformers' modeling_llama.py, modeling_qwen2.py and modeling_deepseek_v3.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, silu

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN2: dict[str, Any] = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TOKENS = torch.randint(0, 97, (2, 70), generator=torch.Generator().manual_seed(5))
Weights = dict[str, Tensor]
Edit = Callable[[Weights, int], None]


@dataclass(frozen=True)
class Keys:
    """Keys of a layer as complex pairs, to confine them: rows [KV heads, pairs, inputs] of k_proj, complex."""

    config: Mapping[str, Any]

    def read(self, weights: Weights, layer: int) -> Tensor:
        rows = weights[f"model.layers.{layer}.self_attn.k_proj.weight"]
        by_head = rows.view(self.config["num_key_value_heads"], 2, self.config["head_dim"] // 2, -1)
        return torch.complex(by_head[:, 0], by_head[:, 1])

    def write(self, weights: Weights, layer: int, pairs: Tensor) -> None:
        weights[f"model.layers.{layer}.self_attn.k_proj.weight"] = torch.cat((pairs.real, pairs.imag), dim=1).flatten(0, 1).contiguous()


def random_weights(config: Mapping[str, Any], seed: int = 0) -> Weights:
    """Return weights in fp64 whose attention is far from uniform and whose logits stay below ten."""
    draw = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, std: float) -> Tensor:
        return torch.randn(rows, columns, generator=draw, dtype=torch.float64) * std

    hidden, inner, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    rows = {"q": config["num_attention_heads"] * d, "k": config["num_key_value_heads"] * d}
    rows["v"] = rows["k"]
    weights = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden, 1.0),
        "model.norm.weight": 1 + matrix(1, hidden, 0.1)[0],
    }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(config["vocab_size"], hidden, hidden**-0.5)
    for layer in range(config["num_hidden_layers"]):
        own = {f"self_attn.{name}_proj.weight": matrix(rows[name], hidden, 0.25 if name != "v" else hidden**-0.5) for name in rows}
        own["self_attn.o_proj.weight"] = matrix(hidden, rows["q"], rows["q"] ** -0.5)
        if config["model_type"] == "qwen2" or config.get("attention_bias"):
            own |= {f"self_attn.{name}_proj.bias": matrix(1, rows[name], 0.5)[0] for name in rows}
        if config.get("attention_bias"):
            own["self_attn.o_proj.bias"] = matrix(1, hidden, 0.5)[0]
        own |= {f"mlp.{name}_proj.weight": matrix(inner, hidden, hidden**-0.5) for name in ("gate", "up")}
        own["mlp.down_proj.weight"] = matrix(hidden, inner, inner**-0.5)
        own |= {f"{name}_layernorm.weight": 1 + matrix(1, hidden, 0.1)[0] for name in ("input", "post_attention")}
        weights |= {f"model.layers.{layer}.{name}": weight for name, weight in own.items()}
    return weights


def write_checkpoint(folder: Path, config: Mapping[str, Any], weights: Weights, dtype: torch.dtype = torch.float64) -> Path:
    """Write config.json and model.safetensors."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    rounded = {name: weight.to(dtype).contiguous() for name, weight in weights.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], Weights]:
    """Read the configuration and all weights of a checkpoint."""
    weights: Weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    return json.loads((folder / "config.json").read_text()), weights


def logits(folder: Path, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the logits [sequences, tokens, vocabulary] of a checkpoint, computed in a dtype."""
    config, weights = _read_as(folder, dtype)
    *_, (hidden, _) = _layers(config, weights, tokens)
    head = weights["model.embed_tokens.weight"] if config["tie_word_embeddings"] else weights["lm_head.weight"]
    return linear(_norm(hidden, weights["model.norm.weight"], config["rms_norm_eps"]), head)


def attention_inputs(folder: Path, tokens: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return the input of each layer's attention [sequences, tokens, hidden size]."""
    return [inputs for _, inputs in _layers(*_read_as(folder, dtype), tokens)]


def _read_as(folder: Path, dtype: torch.dtype) -> tuple[dict[str, Any], Weights]:
    config, weights = read_checkpoint(folder)
    return config, {name: weight.to(dtype) for name, weight in weights.items()}


def _layers(config: Mapping[str, Any], weights: Weights, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the hidden states behind each layer, and the input of its attention."""
    attend = {"deepseek_v3": _latent_attention}.get(config["model_type"], grouped_attention)
    eps = config["rms_norm_eps"]
    hidden = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        own = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
        attended = _norm(hidden, own["input_layernorm.weight"], eps)
        hidden = hidden + attend(attended, own, config)
        inputs = _norm(hidden, own["post_attention_layernorm.weight"], eps)
        inner = silu(linear(inputs, own["mlp.gate_proj.weight"])) * linear(inputs, own["mlp.up_proj.weight"])
        hidden = hidden + linear(inner, own["mlp.down_proj.weight"])
        yield hidden, attended


def _norm(columns: Tensor, weight: Tensor, eps: float) -> Tensor:
    return columns / (columns.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight


def _frequencies(config: Mapping[str, Any], columns: int) -> list[float]:
    """Return the frequency of each pair, that of Llama 3.1 if the configuration has its scaling."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = config.get("rope_theta", rope.get("rope_theta"))
    found = []
    for pair in range(columns // 2):
        plain = theta ** (-2 * pair / columns)
        if rope.get("rope_type", "default") == "llama3":
            wavelength = 2 * math.pi / plain
            context, low, high = (rope[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
            if wavelength > context / low:
                plain /= rope["factor"]
            elif wavelength > context / high:
                share = (context / wavelength - low) / (high - low)
                plain = (1 - share) * plain / rope["factor"] + share * plain
        found.append(plain)
    return found


def _turned(pairs: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Return complex pairs [sequences, tokens, heads, pairs] turned by the positions 0, 1, .."""
    radians = torch.tensor(_frequencies(config, 2 * pairs.shape[-1]), dtype=torch.float64)
    angles = torch.outer(torch.arange(pairs.shape[1], dtype=torch.float64), radians).view(1, pairs.shape[1], 1, -1)
    return pairs * torch.polar(torch.ones_like(angles), angles).to(pairs.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention, heads joined: q, k, v [sequences, tokens, heads, columns]."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(future, -math.inf).softmax(dim=-1), v).flatten(2)


def grouped_attention(inputs: Tensor, own: Weights, config: Mapping[str, Any]) -> Tensor:
    q, k, v = (
        linear(inputs, own[f"self_attn.{name}_proj.weight"], own.get(f"self_attn.{name}_proj.bias")).unflatten(2, (-1, config["head_dim"]))
        for name in ("q", "k", "v")
    )
    q, k = (torch.view_as_real(_turned(torch.complex(*each.chunk(2, dim=-1)), config)).flatten(-2) for each in (q, k))
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    out = _attend(q, k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2))
    return linear(out, own["self_attn.o_proj.weight"], own.get("self_attn.o_proj.bias"))


def _latent_attention(inputs: Tensor, own: Weights, config: Mapping[str, Any]) -> Tensor:
    own = {name.removeprefix("self_attn."): weight for name, weight in own.items()}
    heads, latent, nope = config["num_attention_heads"], config["kv_lora_rank"], config["qk_nope_head_dim"]
    if config["q_lora_rank"] is None:
        q = linear(inputs, own["q_proj.weight"])
    else:  # transformers' latent norms have an eps of 1e-6 whatever the configuration says
        low = linear(inputs, own["q_a_proj.weight"], own.get("q_a_proj.bias"))
        q = linear(_norm(low, own["q_a_layernorm.weight"], 1e-6), own["q_b_proj.weight"])
    q = q.unflatten(2, (heads, -1))
    keys = linear(inputs, own["kv_a_proj_with_mqa.weight"], own.get("kv_a_proj_with_mqa.bias"))
    both = linear(_norm(keys[..., :latent], own["kv_a_layernorm.weight"], 1e-6), own["kv_b_proj.weight"]).unflatten(2, (heads, -1))
    rotary = _turned(torch.view_as_complex(keys[..., latent:].unflatten(2, (1, -1, 2)).contiguous()), config)
    q_rotary = _turned(torch.view_as_complex(q[..., nope:].unflatten(3, (-1, 2)).contiguous()), config)
    q = torch.cat((q[..., :nope], torch.view_as_real(q_rotary).flatten(-2)), dim=-1)
    k = torch.cat((both[..., :nope], torch.view_as_real(rotary).flatten(-2).expand(-1, -1, heads, -1)), dim=-1)
    return linear(_attend(q, k, both[..., nope:]), own["o_proj.weight"], own.get("o_proj.bias"))

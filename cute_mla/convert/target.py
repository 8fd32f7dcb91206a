"""Converted checkpoint: the weights of a layer and the configuration, as transformers' DeepseekV3ForCausalLM reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..layer.rope import pair_frequencies
from ..spec.mla import D_ROPE
from .calibration import root
from .low_rank import Factors, Importance, balanced, effect, joint, split
from .options import ConvertOptions
from .report import LayerReport
from .rotation import Chosen, Pairs, choose, slot_theta
from .source import SourceConfig

EPS = 1e-6  # of DeepSeek's latent norms in transformers, whatever the configuration says
COLUMNS = 128  # of a head's keys without rotary embedding, and of its values
_DOWN = 2.0**-32  # scale of the latent in front of its norm: its mean square is then far below EPS, and the norm a constant
_WEIGHT = 2.0**22  # of the norm; a power of two, exact in bf16
_GAIN = _DOWN * _WEIGHT / math.sqrt(EPS)  # what the norm leaves of a latent: 0.977, divided out of the matrix behind it
_BIAS_INPUTS = 64  # inputs of q_b_proj behind the hidden size, of which the first is 1: the alignment of matrix products

Tensors = dict[str, Tensor]


def query_inputs(config: SourceConfig) -> int | None:
    """Return q_lora_rank: None without biases, else the hidden size and a 1, which carries the biases of queries, padded to 64 more."""
    return config.hidden_size + _BIAS_INPUTS if config.biases else None


def residual_scale(config: SourceConfig) -> float:
    """Return what the hidden states are multiplied with, so that an rms_norm_eps of 1e-6 does what the source's does."""
    return math.sqrt(EPS / config.rms_norm_eps)


def target_config(config: SourceConfig, options: ConvertOptions, dtype: torch.dtype) -> dict[str, Any]:
    """Return the config.json of the converted checkpoint."""
    theta = slot_theta(config, options.strategy if options.method == "mha2mla" else None)
    scaling = {"rope_type": "default"} if config.rope_scaling is None else config.rope_scaling.to_hugging_face()
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_attention_heads,
        "q_lora_rank": query_inputs(config),
        "kv_lora_rank": options.latent,
        "qk_nope_head_dim": COLUMNS,
        "qk_rope_head_dim": D_ROPE,
        "v_head_dim": COLUMNS,
        "attention_bias": bool(config.biases),
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": EPS,
        "rope_parameters": {**scaling, "rope_theta": theta},
        "rope_theta": theta,
        "rope_scaling": None if config.rope_scaling is None else scaling,
        "rope_interleave": True,
        "tie_word_embeddings": config.tie_word_embeddings,
        "first_k_dense_replace": config.num_hidden_layers,
        "num_nextn_predict_layers": 0,
        **config.passed_on,
        "dtype": str(dtype).removeprefix("torch."),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def convert_layer(
    layer: Mapping[str, Tensor], config: SourceConfig, options: ConvertOptions, moment: Tensor | None, tolerance: float
) -> tuple[Tensors, LayerReport]:
    """Convert a layer: return its weights, fp32 or wider where they change, and what was lost.

    layer: weights by the names of SourceConfig.layer_shapes. moment: Calibration.moment, or None to count all inputs alike.
    tolerance: share of the energy of scores that counts as rounding.
    """
    q, k, v = (_with_bias(layer, name, config) for name in ("q", "k", "v"))
    metric = root(moment, q.shape[1])
    pairs = Pairs.of(q, k, config, metric)
    chosen = choose(pairs, config, options, tolerance)
    queries = _attenuated(q, config, options)
    factors = _factors(_columns(chosen.rest), v, metric, options, _importance(queries, layer, config, metric))
    weights = {
        **_queries(queries, pairs, chosen, config),
        **_keys(pairs, chosen, factors, config, options.latent),
        **_output(layer, config),
        "mlp.down_proj.weight": _scaled(layer["mlp.down_proj.weight"], residual_scale(config)),
        **{name: layer[name] for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight")},
        **{name: layer[name] for name in ("input_layernorm.weight", "post_attention_layernorm.weight")},
    }
    rank_loss = factors.loss if factors.loss > tolerance else 0.0
    exact = not chosen.loss and not rank_loss and chosen.fold == 1
    return weights, LayerReport(kept_rotary_energy=1 - chosen.loss, rank_loss=rank_loss, fold=chosen.fold, exact=exact)


def convert_outer(weights: Mapping[str, Tensor], config: SourceConfig) -> Tensors:
    """Convert the embedding, the last norm and the head."""
    scale = residual_scale(config)
    converted = dict(weights)
    converted["model.embed_tokens.weight"] = _scaled(weights["model.embed_tokens.weight"], scale)
    if config.tie_word_embeddings:  # the head is the scaled embedding
        converted["model.norm.weight"] = _scaled(weights["model.norm.weight"], 1 / scale)
    return converted


def converted_shapes(config: SourceConfig, latent: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a converted layer, by its name behind "model.layers.N."."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    inputs = query_inputs(config)
    attention: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (latent + D_ROPE, hidden),
        "kv_a_layernorm.weight": (latent,),
        "kv_b_proj.weight": (heads * 2 * COLUMNS, latent),
        "o_proj.weight": (hidden, heads * COLUMNS),
    }
    if inputs is None:
        attention["q_proj.weight"] = (heads * (COLUMNS + D_ROPE), hidden)
    else:
        attention |= {"q_a_proj.weight": (inputs, hidden), "q_a_proj.bias": (inputs,), "q_a_layernorm.weight": (inputs,)}
        attention |= {"q_b_proj.weight": (heads * (COLUMNS + D_ROPE), inputs), "o_proj.bias": (hidden,)}
        attention["kv_a_proj_with_mqa.bias"] = (latent + D_ROPE,)
    kept = {name: shape for name, shape in config.layer_shapes().items() if not name.startswith("self_attn.")}
    return {**kept, **{f"self_attn.{name}": shape for name, shape in attention.items()}}


def _scaled(weight: Tensor, scale: float) -> Tensor:
    """Return a weight times a scale, in fp32 or wider: fp64 copies of embeddings would be the largest tensors of a conversion."""
    return weight if scale == 1 else weight.to(torch.promote_types(weight.dtype, torch.float32)) * scale


def _with_bias(layer: Mapping[str, Tensor], name: str, config: SourceConfig) -> Tensor:
    """Return the rows of a projection, fp64 [rows, inputs], with its bias, or 0, as the last input if the model has biases."""
    weight = layer[f"self_attn.{name}_proj.weight"].double()
    if not config.biases:
        return weight
    bias = layer.get(f"self_attn.{name}_proj.bias")
    column = weight.new_zeros(len(weight)) if bias is None else bias.double()
    return torch.cat((weight, column.unsqueeze(1)), dim=1)


def _attenuated(q: Tensor, config: SourceConfig, options: ConvertOptions) -> Tensor:
    """Return the rows of queries for the keys without rotary embedding: those of fast pairs are smaller (ConvertOptions.attenuation)."""
    if options.method == "mha2mla":
        return q
    radians = pair_frequencies(config.head_dim, config.rope_theta, config.rope_scaling, torch.float64)
    return q / (1 + (options.attenuation * radians).square()).repeat(2 * config.num_attention_heads).unsqueeze(1)


def _importance(queries: Tensor, layer: Mapping[str, Tensor], config: SourceConfig, metric: Tensor) -> Importance:
    """Return the effect of errors of keys and of values: by the queries of a KV head's group, and by its part of the output projection."""
    by_head = (queries @ metric).unflatten(0, (config.num_key_value_heads, config.group, config.head_dim))
    output = layer["self_attn.o_proj.weight"].double().unflatten(1, (config.num_key_value_heads, config.group, config.head_dim))
    rows_k, rows_v = by_head.transpose(2, 3).flatten(1, 2), output.permute(1, 2, 0, 3).flatten(1, 2)
    return Importance(effect(rows_k), effect(rows_v))


def _factors(k: Tensor, v: Tensor, metric: Tensor, options: ConvertOptions, importance: Importance) -> Factors:
    if options.method == "transmla":
        return balanced(k, v, metric, options.rank, importance)
    return joint(k, v, options.rank) if options.svd == "joint" else split(k, v, options.rank)


def _columns(pairs: Tensor) -> Tensor:
    """Return the rows of complex pairs [heads, pairs, inputs] with real parts before imaginary ones, [heads * columns, inputs]."""
    return torch.cat((pairs.real, pairs.imag), dim=1).flatten(0, 1)


def _interleaved(pairs: Tensor) -> Tensor:
    """Return the rows of complex pairs [.., slots, inputs] with real and imaginary parts in turn, [.., 2 * slots, inputs]."""
    return torch.stack((pairs.real, pairs.imag), dim=-2).flatten(-3, -2)


def _padded(rows: Tensor, config: SourceConfig) -> Tensor:
    """Return the rows [heads * head_dim, inputs] by head with zeros up to 128: [heads, 128, inputs]."""
    by_head = rows.unflatten(0, (-1, config.head_dim))
    return torch.cat((by_head, by_head.new_zeros(len(by_head), COLUMNS - config.head_dim, rows.shape[1])), dim=1)


def _queries(queries: Tensor, pairs: Pairs, chosen: Chosen, config: SourceConfig) -> Tensors:
    """Return the weights of queries: per head columns for the latent, then slots; scaled, because DeepSeek's softmax has another scale."""
    rotary = _interleaved(chosen.rotation.rotary_queries(pairs))
    scale = math.sqrt((COLUMNS + D_ROPE) / config.head_dim)
    rows = torch.cat((_padded(queries, config), rotary), dim=1).flatten(0, 1) * scale
    inputs, hidden = query_inputs(config), config.hidden_size
    if inputs is None:
        return {"self_attn.q_proj.weight": rows}
    scaled = torch.zeros(inputs, hidden + 1, dtype=rows.dtype)
    scaled.fill_diagonal_(_DOWN)
    return {
        "self_attn.q_a_proj.weight": scaled[:, :hidden],
        "self_attn.q_a_proj.bias": scaled[:, hidden],
        "self_attn.q_a_layernorm.weight": torch.full((inputs,), _WEIGHT, dtype=rows.dtype),
        "self_attn.q_b_proj.weight": torch.cat((rows / _GAIN, rows.new_zeros(len(rows), inputs - hidden - 1)), dim=1),
    }


def _keys(pairs: Pairs, chosen: Chosen, factors: Factors, config: SourceConfig, latent: int) -> Tensors:
    """Return the weights of the latent and the rotary key, and those of keys and values from the latent."""
    rotary, unused = _interleaved(chosen.rotation.rotary_keys(pairs)), latent - len(factors.down)
    down = torch.cat((factors.down * _DOWN, factors.down.new_zeros(unused, factors.down.shape[1]), rotary))
    up = torch.cat([_padded(each, config) for each in (factors.up_k, factors.up_v)], dim=1) / _GAIN
    up = torch.cat((up, up.new_zeros(*up.shape[:2], unused)), dim=2).repeat_interleave(config.group, dim=0)
    weights = {
        "self_attn.kv_a_proj_with_mqa.weight": down[:, : config.hidden_size],
        "self_attn.kv_a_layernorm.weight": torch.full((latent,), _WEIGHT, dtype=down.dtype),
        "self_attn.kv_b_proj.weight": up.flatten(0, 1),
    }
    if config.biases:
        weights["self_attn.kv_a_proj_with_mqa.bias"] = down[:, config.hidden_size]
    return weights


def _output(layer: Mapping[str, Tensor], config: SourceConfig) -> Tensors:
    """Return the output projection, with zeros for the columns of padded values, and its bias if the model has biases."""
    scale = residual_scale(config)
    weights = {"self_attn.o_proj.weight": _padded(layer["self_attn.o_proj.weight"].double().T, config).flatten(0, 1).T * scale}
    if config.biases:
        bias = layer.get("self_attn.o_proj.bias", torch.zeros(config.hidden_size))
        weights["self_attn.o_proj.bias"] = bias.double() * scale
    return weights
